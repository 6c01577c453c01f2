"""`python -m bench.messages`: the cost of a message, gdq.insert_event() beside PgQ's C pgq.insert_event()."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import click
import psycopg
from psycopg.conninfo import make_conninfo
from rich import box
from rich.console import Console
from rich.table import Table

from bench import packages
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError, GdqError
from gdq.installer.install import install

MISSED = 3

# 100 bytes, the usual size of a job.
_DATA = '{"order": 4711, "customer": "0123456789abcdef0123456789abcdef", "amount": 12.50, "note": "0123456789"}'

_MANY = "select gdq.insert_events('q', array_agg('paid'::text), "

# One message a call, {rows} calls in one statement or as many transactions; many in one call.
_CALLS = {
    "PgQ insert_event": ("each", "select pgq.insert_event('q', 'paid', '{data}')"),
    "gdq insert_event, text": ("each", "select gdq.insert_event('q', 'paid', '{data}')"),
    "gdq insert_event, jsonb": ("each", "select gdq.insert_event('q', 'paid', '{data}'::jsonb)"),
    "gdq insert_events, text": ("bulk", _MANY + "array_agg('{data}'::text))"),
    "gdq insert_events, jsonb": ("bulk", _MANY + "array_agg('{data}'::jsonb))"),
}
PGQ, SINGLE, BULK = "PgQ insert_event", "gdq insert_event, text", "gdq insert_events, text"


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds a message: in one statement of many, and in a transaction of its own; bytes of WAL in the first."""

    name: str
    statement: float
    transaction: float | None
    wal: int


def measure(conninfo: str, rows: int, rounds: int, progress: Callable[[str], None]) -> list[Cost]:
    """`rounds` interleaved rounds after one that warms up; medians."""
    seconds: dict[tuple[str, str], list[float]] = {}
    wal: dict[str, list[int]] = {}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for number in range(rounds + 1):
            for name, (kind, template) in _CALLS.items():
                call = template.format(data=_DATA)
                one = call.removeprefix("select ")
                many = f"select count({one})" if kind == "each" else call
                connection.execute("checkpoint")
                before = _one(connection, "select pg_current_wal_insert_lsn() - '0/0'")
                taken = _timed(connection, f"{many} from generate_series(1, {rows})")
                after = _one(connection, "select pg_current_wal_insert_lsn() - '0/0'")
                if number:
                    seconds.setdefault((name, "statement"), []).append(taken / rows)
                    wal.setdefault(name, []).append(int(after - before) // rows)
                if kind == "each":
                    loop = f"do $$ begin for i in 1..{rows // 10} loop perform {one}; commit; end loop; end $$"
                    taken = _timed(connection, loop)
                    if number:
                        seconds.setdefault((name, "transaction"), []).append(taken / (rows // 10))
            progress(f"round {number} of {rounds}")
    return [
        Cost(
            name,
            median(seconds[name, "statement"]) * 1e6,
            median(seconds[name, "transaction"]) * 1e6 if (name, "transaction") in seconds else None,
            int(median(wal[name])),
        )
        for name in _CALLS
    ]


def prepare(server: EmbeddedServer) -> str:
    """gdq, PgQ and a queue `q` of each; the conninfo."""
    conninfo = make_conninfo(server.conninfo(), host=str(server.socket_folder))
    install(conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("create extension pgq")
        connection.execute("select pgq.create_queue('q')")
        connection.execute("select gdq.create_queue('q')")
    return conninfo


def show(costs: list[Cost], console: Console) -> None:
    base = next(cost for cost in costs if cost.name == PGQ)
    table = Table(box=box.SIMPLE_HEAD, title="microseconds a message (and over PgQ's)", title_justify="left")
    for name in ("", "in one statement", "in a transaction each", "WAL bytes"):
        table.add_column(name, justify="right" if name else "left")
    for cost in costs:
        single = "" if cost.transaction is None else _beside(cost.transaction, base.transaction or 0)
        table.add_row(cost.name, _beside(cost.statement, base.statement), single, str(cost.wal))
    console.print(table)
    console.print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")


def _beside(value: float, base: float) -> str:
    return f"{value:.1f} ({value / base:.2f})"


def _timed(connection: psycopg.Connection[Any], statement: str) -> float:
    start = time.perf_counter()
    connection.execute(statement.encode())
    return time.perf_counter() - start


def _one(connection: psycopg.Connection[Any], query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", type=click.IntRange(10), default=20_000, show_default=True, help="Messages of each statement.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds over all contenders.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(rows: int, rounds: int, as_json: bool) -> None:
    """Measure what a message costs in gdq and in PgQ.

    Times depend on the machine: read them as ratios. Exit code 3 when a single message costs more than PgQ's, or one of
    many as much.
    """
    try:
        with packages.start(packages.provide(_progress)) as server:
            costs = measure(prepare(server), rows, rounds, _progress)
    except (packages.BenchError, EmbeddedError, GdqError, psycopg.Error) as error:
        raise click.ClickException(str(error).strip().splitlines()[0]) from error
    if as_json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
    else:
        show(costs, Console())
    by_name = {cost.name: cost for cost in costs}
    single = (by_name[SINGLE].transaction or 0) <= (by_name[PGQ].transaction or 0)
    if not (single and by_name[BULK].statement < by_name[PGQ].statement):
        sys.exit(MISSED)


if __name__ == "__main__":
    main(prog_name="python -m bench.messages")
