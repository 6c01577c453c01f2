"""`python -m bench.replica`: `gdq replicate` beside PostgreSQL's own logical replication, and pg_dump for copies.

    python -m bench.replica [--changes 1000000] [--rows 6000000] [--seconds 20] [--rounds 3]
    python -m bench.replica --only-write --write docs/benchmarks-replica.md

All take turns with the same work, another one first in each round: changes that gathered while nothing was applied, a
copy of whole tables, and the lag at a steady rate. At the end of each turn source and target are compared. Every
result goes to a file at once: a run that was stopped goes on from there.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click
import psycopg

from bench.__main__ import machine
from bench.packages import BenchError
from bench.replica_report import COPY, DUMP, GDQ_TICKER, LAG, PART, WORK, Kind, page
from bench.replica_sides import COPY_QUEUE, EACH, GDQ_WORKERS, QUEUE, BuiltIn, Gdq, Side, session
from bench.replica_stage import (
    BIG,
    ITEMS,
    MARKS,
    PING,
    SETTINGS,
    Stage,
    Usage,
    check_same,
    fill_big,
    mark,
    wait_for_marks,
    watched,
)
from bench.results import Results
from bench.slot_reader import libpq_environment
from bench.steady import Child, ticker
from gdq.embedded.files import find_binaries
from gdq.errors import EmbeddedError, GdqError

Tell = Callable[[str], None]

# Rows a second of the steady rate, and of each transaction: a slow disk does not commit a thousand times a second.
_RATE, _ROWS = 1000, 20


@dataclass(frozen=True, slots=True)
class Size:
    """Row changes to catch up, rows to copy, seconds of a steady rate, and rounds of all."""

    changes: int
    rows: int
    seconds: float
    rounds: int


def measure(size: Size, kinds: Sequence[Kind], results: Results, tell: Tell) -> None:
    """Measure what is missing in `results`, on servers of its own."""
    with ExitStack() as stack:
        stage = Stage.opened(stack, size.changes)
        tell("the servers are ready")
        for number in range(1, size.rounds + 1):
            for kind, run in (("catch-up", _catch_up), ("copy", _copies), ("lag", _lags)):
                if kind in kinds:
                    run(stage, size, number, results, tell)


def _in_turns(sides: Sequence[Side], number: int) -> list[Side]:
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


def _catch_up(stage: Stage, size: Size, number: int, results: Results, tell: Tell) -> None:
    """The same changes gather in both sources, then each side applies them."""
    for case, (what, rows) in WORK.items():
        if all(results.has(PART, case, side.name, number) for side in stage.sides):
            continue
        stage.write(what, size.changes, rows)
        for side in _in_turns(stage.sides, number):
            with watched(side.processes) as usage:
                started = time.perf_counter()
                with side.at_work():
                    wait_for_marks(side.source, side.target)
                    seconds = time.perf_counter() - started
            check_same(side.source, side.target, (*ITEMS, *MARKS))
            results.add(PART, case, side.name, number, _values(seconds, size.changes, usage))
            tell(f"round {number}, {case}: {side.name} {seconds:.1f} s")
        stage.give_back()


def _copies(stage: Stage, size: Size, number: int, results: Results, tell: Tell) -> None:
    """Each side copies the same tables into empty ones."""
    ways: list[tuple[str, Side | str]] = [
        (side.name, side) for side in stage.sides if side.name not in (EACH, GDQ_WORKERS)
    ]
    ways.append((DUMP, stage.dumped))
    first = number % len(ways)
    for name, way in (*ways[first:], *ways[:first]):
        if results.has(PART, COPY, name, number):
            continue
        fill_big(stage, size.rows)
        source, target = (stage.sources[1], way) if isinstance(way, str) else (way.source, way.target)
        with session(target) as connection:
            connection.execute("checkpoint")
        with watched(dict if isinstance(way, str) else way.processes) as usage:
            started = time.perf_counter()
            with _copying(stage, way):
                seconds = time.perf_counter() - started
                check_same(source, target, BIG)
        with session(target) as connection:
            connection.execute(f"truncate {', '.join(BIG)}".encode())
        results.add(PART, COPY, name, number, _values(seconds, size.rows, usage))
        tell(f"round {number}, {COPY}: {name} {seconds:.1f} s")


@contextmanager
def _copying(stage: Stage, way: Side | str) -> Iterator[None]:
    """Copy; at the end of the block what the copy has set up is dropped."""
    if isinstance(way, str):
        _dump(stage, way)
        yield
    elif isinstance(way, Gdq):
        with way.replicate(COPY_QUEUE):
            pass
        yield
        way.drop(COPY_QUEUE)
    else:
        copier = BuiltIn(way.source, way.target, way.name)
        copier.subscribe([BIG], "copy", copy=True)
        copier.wait_until_copied()
        yield
        copier.unsubscribe()


def _dump(stage: Stage, target: str) -> None:
    """pg_dump | psql, in one transaction of the target."""
    binaries, source = stage.programs.binaries, stage.sources[1]
    tables = [f"--table={name}" for name in BIG]
    with subprocess.Popen(
        [str(binaries.program("pg_dump")), "--data-only", *tables, f"--dbname={source}"], stdout=subprocess.PIPE
    ) as dump:
        load = [str(binaries.program("psql")), "--quiet", "--no-psqlrc", "--single-transaction", f"--dbname={target}"]
        done = subprocess.run(
            [*load, "--output=/dev/null"], stdin=dump.stdout, check=False, env=libpq_environment(target)
        )
    if dump.returncode or done.returncode:
        raise BenchError("pg_dump | psql failed")


def _lags(stage: Stage, size: Size, number: int, results: Results, tell: Tell) -> None:
    """Transactions at a steady rate: from the commit of each to when another session sees its rows in the target."""
    ways: list[tuple[str, Side]] = [("gdq", stage.gdq), (GDQ_TICKER, stage.gdq)]
    ways += [(side.name, side) for side in stage.built_in if side.name != EACH]
    first = number % len(ways)
    for name, side in (*ways[first:], *ways[:first]):
        if results.has(PART, LAG, name, number):
            continue
        with watched(side.processes) as usage:
            delays = _lag(side, size.seconds, beside_ticker=name == GDQ_TICKER)
        check_same(side.source, side.target, [PING])
        values = {"p50": median(delays), "p99": quantiles(delays, n=100)[98], "made": len(delays) / size.seconds}
        results.add(PART, LAG, name, number, values | usage.values())
        tell(f"round {number}, {LAG}: {name} p50 {values['p50']:.1f} ms, p99 {values['p99']:.1f} ms")


def _lag(side: Side, seconds: float, *, beside_ticker: bool) -> list[float]:
    """The milliseconds from commit to being seen, of each row."""
    with (
        ticker(side.source) if beside_ticker else nullcontext(),
        side.replicate(QUEUE, "--follow") if isinstance(side, Gdq) else side.at_work(),
    ):
        # all that was there before, and the mark, which shows that changes come through
        with session(side.source) as connection:
            mark(connection)
        wait_for_marks(side.source, side.target)
        with Child(write_pings, side.source, seconds) as writer, session(side.target) as connection:
            last, seen = writer.hear(), dict[int, float]()
            committed: dict[int, float] = {}
            end = time.monotonic() + seconds + 60
            while not committed or len(seen) < len(committed):
                rows = connection.execute(
                    f"select id from {PING} where id > %s".encode(), [last], prepare=True
                ).fetchall()
                now = time.monotonic()
                for (row,) in rows:
                    seen[row], last = now, max(last, row)
                if not committed and writer.said(0):
                    committed = writer.hear(1)
                if isinstance(side, Gdq):
                    side.check()
                if now > end:
                    raise BenchError(f"{side.name} has not applied all rows a minute after the last one")
                time.sleep(0.001)
    return [(seen[row] - moment) * 1000 for row, moment in committed.items()]


def write_pings(told: Pipe, conninfo: str, seconds: float) -> None:
    """Insert rows at random moments; tell the last number before, then when each row was committed."""
    committed: dict[int, float] = {}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        row = connection.execute(f"select coalesce(max(id), 0) from {PING}".encode()).fetchone()
        number = int(row[0]) if row else 0
        told.send(number)
        insert = f"insert into {PING} select generate_series(%s::bigint, %s)".encode()
        time.sleep(0.5)
        due = time.monotonic()
        end = due + seconds
        while time.monotonic() < end:
            connection.execute(insert, [number + 1, number + _ROWS], prepare=True)
            committed |= dict.fromkeys(range(number + 1, number + _ROWS + 1), time.monotonic())
            number += _ROWS
            due += random.expovariate(_RATE / _ROWS)
            time.sleep(max(due - time.monotonic(), 0))
    told.send(committed)


def _values(seconds: float, rows: int, usage: Usage) -> dict[str, Any]:
    return {"seconds": seconds, "rate": rows / seconds, "load": os.getloadavg()[0]} | usage.values()


def _default_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gdq" / "bench-replica.jsonl"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("kinds", nargs=-1, type=click.Choice(["catch-up", "copy", "lag"]))
@click.option("--changes", type=click.IntRange(1000), default=1_000_000, show_default=True, help="To catch up.")
@click.option("--rows", type=click.IntRange(2), default=6_000_000, show_default=True, help="To copy.")
@click.option("--seconds", type=float, default=20, show_default=True, help="Of a steady rate.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Of all measurements.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Keep results in this file.")
@click.option("--fresh", is_flag=True, help="Forget the results that the file holds.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the page of the results here.")
@click.option("--only-write", is_flag=True, help="Measure nothing.")
def main(kinds: tuple[Kind, ...], file: Path | None, write: Path | None, **options: Any) -> None:
    """Measure replicas: all of KINDS, catch-up, copy and lag, unless some are named."""
    path = file or _default_path()
    size = Size(options["changes"], options["rows"], options["seconds"], options["rounds"])
    started = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - started:.0f} s: {line}", file=sys.stderr, flush=True)

    try:
        if options["fresh"]:
            path.unlink(missing_ok=True)
        if options["only_write"]:
            results = Results.read(path, None)
        else:
            results = Results.read(path, f"{size.changes:,} changes, {size.rows:,} rows, {size.seconds:g} s")
            settings = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
            results.tell(**machine(find_binaries(18).version) | {"size": results.size, "settings": settings})
            measure(size, kinds or ("catch-up", "copy", "lag"), results, tell)
    except KeyboardInterrupt:
        tell(f"stopped; the same command goes on from {path}")
        sys.exit(130)
    except (BenchError, EmbeddedError, GdqError, psycopg.Error) as error:
        raise click.ClickException(str(error).strip().splitlines()[0]) from error
    text = page(results)
    if write is None:
        print(text)
    else:
        write.write_text(text, encoding="utf-8")
    tell(f"results: {path}")


if __name__ == "__main__":
    main(prog_name="python -m bench.replica")
