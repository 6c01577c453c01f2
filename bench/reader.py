"""`python -m bench.reader WAY NAME EVENTS`: one consumer that reads what is there, in a process of its own.

Says `ready` once it is connected, starts at a line on its standard input, and prints {"seconds", "cpu"}: its own and
that of its programs. BENCH_CONNINFO and BENCH_PROGRAMS say where; BENCH_END is where the log ends for programs that
stop there.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from bench import processes, spark_reader
from bench.packages import BenchError, Place
from bench.slot_reader import libpq_environment, pgoutput_options, recvlogical
from gdq.consumer import Consumer
from gdq.consumers.slot.source import SlotSource
from gdq.embedded.files import binaries_in
from gdq.source import BatchSource

QUEUE = "reading"
_WAIT_SECONDS = 60.0

Go = Callable[[], None]


def _read(source: BatchSource, table: str | None, wanted: int, go: Go) -> int:
    """The number of events read; as Arrow with a `table`. The position stays where it was, or moves with the slot."""
    go()
    count = 0
    for batch in source.batches(timeout=_WAIT_SECONDS):
        if table is None:
            count += sum(1 for _ in batch.events())
        else:
            count += sum(part.num_rows for part in batch.arrow_batches(table))
        if count >= wanted:
            break
    return count


def _queue(place: Place, name: str, wanted: int, go: Go, *, table: str | None = None) -> int:
    with Consumer(place.conninfo, QUEUE, name) as consumer:
        return _read(consumer, table, wanted, go)


def _slot(place: Place, name: str, wanted: int, go: Go, *, table: str | None = None) -> int:
    # the position of an earlier round would let nothing through
    with psycopg.connect(place.conninfo, autocommit=True) as connection:
        if connection.execute("select to_regclass('gdq_target.slot_position')").fetchone() != (None,):
            connection.execute("delete from gdq_target.slot_position where slot_name = %s", [f"gdq_{QUEUE}_{name}"])
    with SlotSource(place.conninfo, QUEUE, name) as source:
        # and the row that marks the end
        return _read(source, table, wanted + 1, go) - 1


def _pgq(place: Place, name: str, wanted: int, go: Go) -> int:
    """As cheaply as a client can: the rows as COPY sends them, not looked into."""
    del wanted
    with psycopg.connect(place.conninfo, autocommit=True) as connection:
        go()
        batch = connection.execute("select pgq.next_batch(%s, %s)", [QUEUE, name]).fetchone()
        if batch is None or batch[0] is None:
            raise BenchError("PgQ gave no batch")
        query = f"copy (select * from pgq.get_batch_events({int(batch[0])})) to stdout"
        with connection.cursor() as cursor, cursor.copy(query.encode()) as copy:
            return sum(1 for _ in copy)


def _program(options: dict[str, str]) -> Callable[[Place, str, int, Go], int]:
    def read(place: Place, name: str, wanted: int, go: Go) -> int:
        end = f"--endpos={os.environ['BENCH_END']}"
        command = recvlogical(place, f"gdq_{QUEUE}_{name}", options, end, "--no-loop")
        go()
        done = subprocess.run(
            command, env=libpq_environment(place.conninfo), check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise BenchError(f"pg_recvlogical: {done.stderr.strip()}")
        return wanted  # nobody counts what goes to /dev/null

    return read


def _spark(partitions: int) -> Callable[[Place, str, int, Go], int]:
    def read(place: Place, name: str, wanted: int, go: Go) -> int:
        del wanted
        return spark_reader.read(place, QUEUE, name, "app.read_gdq", partitions=partitions, go=go)

    return read


WAYS: dict[str, Callable[[Place, str, int, Go], int]] = {
    "gdq events": _queue,
    "gdq Arrow": lambda *given: _queue(*given, table="app.read_gdq"),
    **{way: _spark(partitions) for way, partitions in spark_reader.PARTITIONS.items()},
    "PgQ get_batch_events": _pgq,
    "pg_recvlogical": _program(pgoutput_options(f"gdq_{QUEUE}")),
    "slot events": _slot,
    "slot Arrow": lambda *given: _slot(*given, table="app.read_slot"),
    "wal2json": _program({"format-version": "2"}),
}


@contextmanager
def _measured(result: dict[str, float]) -> Iterator[Go]:
    """Gives what waits for the start; time and processor time from then to the end."""
    began: list[tuple[float, float]] = []

    def go() -> None:
        print("ready", flush=True)
        sys.stdin.readline()
        cpu = _cpu()
        began.append((time.perf_counter(), cpu))

    yield go
    result["seconds"] = time.perf_counter() - began[0][0]
    result["cpu"] = _cpu() - began[0][1]


def _cpu() -> float:
    """That of this process and of all below it: Spark's stay alive."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used) + processes.seconds_below(os.getpid())


def main(way: str, name: str, events: str) -> None:
    place = Place(binaries_in(Path(os.environ["BENCH_PROGRAMS"])), os.environ["BENCH_CONNINFO"], frozenset())
    if way.endswith("Arrow"):
        for module in ("pyarrow.compute", "adbc_driver_postgresql.dbapi", "gdq.typed.arrow"):
            importlib.import_module(module)  # which a consumer does once
    result: dict[str, float] = {}
    with _measured(result) as go:
        count = WAYS[way](place, name, int(events), go)
    if way in spark_reader.PARTITIONS:
        spark_reader.stop()  # or its end would take part in the next measurement
    if count != int(events):
        raise BenchError(f"{way} read {count} of {events} events")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
