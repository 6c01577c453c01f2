"""`python -m bench.mirror`: tables of the lake loaded and kept equal by `gdq mirror`, beside Spark.

    python -m bench.mirror [--rows 6000000] [--partitions 2] [--rounds 3] [--format delta] [--loads-only]

First load: `gdq mirror` into an empty folder; Spark's JDBC read in partitions, written in the same format; and COPY
into nothing, the limit of what reads a whole table. Churn: 0.1 % of the rows change, `gdq mirror` applies it, and
Spark merges the same changes, read by JDBC from a table that has them ready. After each step the lake table is compared
with its source.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import pyarrow.compute as pc
from psycopg.conninfo import conninfo_to_dict

from bench.jars import jar
from bench.lake import Tell, in_turns, lake_options, rounds_of, run
from bench.lake_report import CHURN, COPIED, LOAD, MIRROR, MIRROR_PART, SPARK
from bench.packages import BenchError
from bench.reading import server_cpu, wait_for_sessions
from bench.replica_sides import session
from bench.replica_stage import SETTINGS
from bench.results import Results
from bench.slot_reader import libpq_environment
from bench.steady import one
from gdq.consumers.lake.open import open_lake
from gdq.consumers.mirror.choice import table_lake_name
from gdq.consumers.replica.origin import origin_of
from gdq.embedded.files import PostgresBinaries, find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install
from gdq.ticker import maintain_all
from tests.support.lake_spark import JARS

_QUEUE, _TABLE, _CHURN, _NAME = "bench", "app.big", "app.churn", "lake"
_DRIVER = "org.postgresql:postgresql:42.7.14"
_KINDS = {"Delta": "delta", "Iceberg": "iceberg"}
_WHERE = ("spread", "recent rows")
_SCHEMA = f"""
create schema app;
create table {_TABLE} (id bigint primary key, customer integer not null, amount numeric(12,2) not null,
  changed timestamptz not null, code text not null, name text not null, note text, active boolean not null)
  with (autovacuum_enabled = off);
create table {_CHURN} (like {_TABLE});
alter table {_CHURN} add column op text;
"""
_ROWS = """i, i % 1000, i * 7919 % 10000000 / 100.0, timestamptz '2024-01-01 00:00Z' + i * interval '61 s',
  'C-' || i * 31 % 100000, 'customer ' || md5(i::text), repeat(md5((i + 1)::text), 2) || ' note', i % 3 = 0"""
# Of ten changes eight update a row, one inserts one, and one deletes one; spread over the table, or near its end.
_CHANGE = f"""
with changed as (
  update {_TABLE} set amount = amount + 1, changed = changed + interval '1 s' where id = any (%(updated)s) returning *
), made as (
  insert into {_TABLE} select {_ROWS.replace("%", "%%")} from unnest(%(made)s::bigint[]) i returning *
), gone as (
  delete from {_TABLE} where id = any (%(gone)s) returning *
)
insert into {_CHURN} select *, 'U' from changed union all select *, 'I' from made union all select *, 'D' from gone"""


@dataclass(frozen=True, slots=True)
class Size:
    """Rows of the table, partitions of Spark's read, rounds, and what of a round is done: formats, churn or none."""

    rows: int
    partitions: int
    rounds: int
    formats: tuple[str, ...] = tuple(_KINDS)
    churn: bool = True

    def last(self, name: str) -> str:
        """What is measured last of a format in a round."""
        return CHURN.format(_WHERE[-1], name) if self.churn else LOAD.format(name)


@dataclass(slots=True)
class _Stage:
    """The server with the table, and the folders of the lakes."""

    conninfo: str
    binaries: PostgresBinaries
    folder: Path
    size: Size

    def place(self, kind: str) -> str:
        """The target of the mirror."""
        return f"{kind}:{self.folder}/gdq_{kind}"


def measure(size: Size, results: Results, tell: Tell) -> None:
    """Measure what is missing in `results`, on a server of its own."""
    wanted = [
        (number, name)
        for number in range(1, size.rounds + 1)
        for name in size.formats
        if not all(results.has(MIRROR_PART, size.last(name), who, number) for who in (MIRROR, SPARK))
    ]
    if not wanted:
        return
    with ExitStack() as stack:
        stage = _opened(stack, size)
        tell(f"the table has {size.rows:,} rows")
        spark = stack.enter_context(_spark(stage))
        results.tell(**{"start of Spark": f"{spark.started:.1f} s", "start of gdq": f"{_start_of_gdq():.1f} s"})
        for name in size.formats:
            spark.order("warm", _KINDS[name])
        tell(f"Spark is ready after {spark.started:.1f} s, and warm")
        for number, name in wanted:
            _Round(stage, spark, number, results, tell).run(name)


@dataclass(frozen=True, slots=True)
class _Round:
    """First loads in one format, then changes that are applied to both lake tables."""

    stage: _Stage
    spark: _Spark
    number: int
    results: Results
    tell: Tell

    def run(self, name: str) -> None:
        stage, spark, kind = self.stage, self.spark, _KINDS[name]
        self._measured(
            LOAD.format(name),
            {
                MIRROR: lambda: _mirror(stage, kind),
                SPARK: lambda: _by_spark(stage, spark, "load", kind),
                COPIED: lambda: _copy(stage),
            },
        )
        _check(stage, spark, kind)
        for where in _WHERE if stage.size.churn else ():
            _change(stage, where)
            self._measured(
                CHURN.format(where, name),
                {MIRROR: lambda: _mirror(stage, kind), SPARK: lambda: _by_spark(stage, spark, "merge", kind)},
            )
            _check(stage, spark, kind)
        _gdq(stage, "drop-mirror", _QUEUE, _NAME)
        shutil.rmtree(stage.folder / f"gdq_{kind}")
        spark.order("forget", kind)
        shutil.rmtree(stage.folder / f"{kind}_big", ignore_errors=True)
        with session(stage.conninfo) as connection:
            maintain_all(connection)

    def _measured(self, case: str, ways: dict[str, Callable[[], dict[str, float]]]) -> None:
        for who in in_turns(list(ways), self.number):
            with session(self.stage.conninfo) as connection:
                connection.execute("checkpoint")
            os.sync()
            values = ways[who]() | {"load": os.getloadavg()[0]}
            self.results.add(MIRROR_PART, case, who, self.number, values)
            self.tell(f"round {self.number}, {case}: {who} {values['seconds']:.1f} s")


def _opened(stack: ExitStack, size: Size) -> _Stage:
    binaries = find_binaries(18)
    server = stack.enter_context(EmbeddedServer(binaries=binaries, settings=SETTINGS))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gdq-bench-")))
    install(server.conninfo())
    with session(server.conninfo()) as connection:
        connection.execute(_SCHEMA.encode())
        connection.execute(
            f"insert into {_TABLE} select {_ROWS} from generate_series(1, {size.rows}::bigint) i".encode()
        )
        connection.execute(f"vacuum analyze {_TABLE}".encode())
        connection.execute("select gdq.create_event_triggers()")
        connection.execute("select gdq.create_queue(%s)", [_QUEUE])
        connection.execute("select gdq.add_table(%s, %s)", [_QUEUE, _TABLE])
    return _Stage(server.conninfo(), binaries, folder, size)


def _change(stage: _Stage, where: str) -> None:
    """Change 0.1 % of the rows; the table of the changes has them as they are now."""
    count = max(stage.size.rows // 10_000, 1)
    with session(stage.conninfo) as connection:
        connection.execute(f"truncate {_CHURN}".encode())
        (last,) = one(connection, f"select max(id) from {_TABLE}")
        # every so many rows one, of the whole table or of its last twentieth
        begin = 0 if where == _WHERE[0] else last - last // 20
        step = max((last - begin) // (9 * count), 1)
        places = [[begin + place * step + step // 2 for place in range(9 * count)]]
        query = f"select id from {_TABLE} where id = any (%s) order by id"
        chosen = [number for (number,) in connection.execute(query.encode(), places)]
        values = {"gone": chosen[::9], "updated": [number for place, number in enumerate(chosen) if place % 9]}
        connection.execute(_CHANGE.encode(), values | {"made": list(range(last + 1, last + 1 + count))})
        connection.execute(f"analyze {_CHURN}".encode())


def _gdq(stage: _Stage, *given: str) -> None:
    command = [sys.executable, "-m", "gdq", *given]
    environment = os.environ | {"GDQ_DSN": stage.conninfo}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"gdq {given[0]}: {done.stderr.strip()}")


def _mirror(stage: _Stage, kind: str) -> dict[str, float]:
    """The whole program: it copies an empty lake table, and applies changes to one that is there."""
    with _used(stage) as used:
        _gdq(stage, "mirror", _QUEUE, _TABLE, "--target", stage.place(kind), "--name", _NAME)
    return used


def _copy(stage: _Stage) -> dict[str, float]:
    """Sent by the server as fast as it can, and thrown away."""
    psql = [str(stage.binaries.program("psql")), "--no-psqlrc", "--quiet", "--command"]
    with _used(stage) as used:
        subprocess.run(
            [*psql, f"copy {_TABLE} to stdout (format binary)"],
            env=libpq_environment(stage.conninfo), stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
    return used


def _by_spark(stage: _Stage, spark: _Spark, what: str, kind: str) -> dict[str, float]:
    with _used(stage) as used:
        told = spark.order(what, kind)
    return {"seconds": told["seconds"], "cpu": used["cpu"] + told["cpu"]}


@contextmanager
def _used(stage: _Stage) -> Iterator[dict[str, float]]:
    """Seconds, and processor time of the server and of programs that end in the block."""
    used: dict[str, float] = {}
    with session(stage.conninfo) as connection:
        wait_for_sessions(connection)
        before, started = server_cpu(connection) + _programs_cpu(), time.perf_counter()
        yield used
        used["seconds"] = time.perf_counter() - started
        wait_for_sessions(connection)
        used["cpu"] = server_cpu(connection) + _programs_cpu() - before


def _programs_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _start_of_gdq() -> float:
    """Seconds until a program of gdq has loaded all that a mirror needs."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "import gdq.cli, gdq.consumers.mirror.mirror, deltalake, pyarrow"], check=True
    )
    return time.perf_counter() - started


def _check(stage: _Stage, spark: _Spark, kind: str) -> None:
    """BenchError unless both lake tables are what the source is."""
    with session(stage.conninfo) as connection:
        source = [str(value) for value in one(connection, f"select count(*), sum(id), sum(amount) from {_TABLE}")]
        mark = f"{origin_of(connection)}/{_QUEUE}/{_NAME}"
    theirs = spark.order("sums", kind)["result"]
    count, ids, amounts = 0, 0, Decimal(0)
    for rows in open_lake(table_lake_name(stage.place(kind), _TABLE), "bench", mark).scan():
        count += rows.num_rows
        ids += pc.sum(rows["id"]).as_py() or 0
        amounts += pc.sum(rows["amount"]).as_py() or 0
    mine = [str(value) for value in (count, ids, amounts)]
    if not source == theirs == mine:
        raise BenchError(f"the source has {source}, Spark's table {theirs}, the mirror {mine}")


class _Spark:
    """A session of Spark in a process of its own. `started`: the seconds that its start took."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.started = float(self._hear()["seconds"])

    def order(self, what: str, kind: str) -> dict[str, Any]:
        """Have it do something, one of bench.mirror_spark's; what it says in the end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "kind": kind}) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = [one for one in self._log.read_text(encoding="utf-8").splitlines() if "Error" in one]
            raise BenchError(f"Spark has failed: {said[-1] if said else 'it says nothing'}")
        told: dict[str, Any] = json.loads(line)
        return told


@contextmanager
def _spark(stage: _Stage) -> Iterator[_Spark]:
    """The session; it is ended with the block."""
    given = conninfo_to_dict(stage.conninfo)
    address = f"jdbc:postgresql://{given['host']}:{given['port']}/{given['dbname']}"
    settings = {
        "jdbc": f"{address}?user={given['user']}&password={given['password']}",
        "table": _TABLE,
        "churn": _CHURN,
        "rows": stage.size.rows,
        "partitions": stage.size.partitions,
        "folder": str(stage.folder),
        "jars": ",".join(str(jar(artifact)) for artifact in (*JARS["delta"], *JARS["iceberg"], _DRIVER)),
    }
    log = stage.folder / "spark.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.mirror_spark", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=Path(__file__).parents[1],
        )  # fmt: skip
    try:
        yield _Spark(process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", type=click.IntRange(10_000), default=6_000_000, show_default=True, help="Of the table.")
@click.option("--partitions", type=click.IntRange(1), default=2, show_default=True, help="Of Spark's read by JDBC.")
@click.option("--format", "formats", type=click.Choice([*_KINDS], False), multiple=True, help="Only these formats.")
@click.option("--loads-only", is_flag=True, help="Without the churn.")
@lake_options
def main(rows: int, partitions: int, formats: tuple[str, ...], loads_only: bool, **options: Any) -> None:
    """Measure mirrors: first loads of tables, and changes applied to them, beside Spark."""
    rows = 50_000 if options["quick"] else rows
    size = Size(rows, partitions, rounds_of(options), formats or tuple(_KINDS), churn=not loads_only)
    told = f"{size.rows:,} rows, {partitions} partitions"
    run(MIRROR_PART, told, lambda results, tell: measure(size, results, tell), options)


if __name__ == "__main__":
    main(prog_name="python -m bench.mirror")
