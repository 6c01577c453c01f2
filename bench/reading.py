"""What reading costs: the same rows from gdq's queue, PgQ's, and logical slots, by one consumer and by many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from bench.contenders import Connection, create_feed
from bench.packages import PGQ, WAL2JSON, BenchError, Place
from bench.processes import seconds_below, seconds_waited_for, stat
from bench.reader import QUEUE, WAYS
from bench.results import Results
from bench.slot_reader import drop_slots, wait_for
from bench.spark_reader import PARTITIONS, SPARK
from gdq.consumers.slot.source import SlotSource
from gdq.installer.install import install

PART = "reading"
_NEEDS = {"PgQ get_batch_events": PGQ, "wal2json": WAL2JSON, **dict.fromkeys(PARTITIONS, SPARK)}
_PLUGINS = {"wal2json": "wal2json", "pg_recvlogical": "pgoutput", "slot events": "pgoutput", "slot Arrow": "pgoutput"}
_TABLES = {"gdq": "read_gdq", "pgq": "read_pgq", "slot": "read_slot"}
# Transactions of {step} rows each: a slot need not spill them, which would be dearer.
_WORKLOAD = """
do $$ begin
  for i in 0..{rows} / {step} - 1 loop
    insert into app.{table} select * from app.feed where id between i * {step} + 1 and (i + 1) * {step}; commit;
    update app.{table} set amount = amount + 1, changed = changed + interval '1 s'; commit;
    delete from app.{table}; commit;
  end loop;
end $$"""


@dataclass(frozen=True, slots=True)
class Work:
    """Rows that are inserted, updated and deleted, `step` in a transaction; numbers of consumers; rounds.

    `partitions`: those of Spark, which is one consumer only.
    """

    rows: int
    step: int
    consumers: Sequence[int]
    rounds: int
    partitions: Sequence[int] = (1, 2, 4)

    @property
    def events(self) -> int:
        return 3 * self.rows

    def ways(self, consumers: int, missing: Container[str]) -> list[str]:
        """What is read by so many, of what is not missing: a JVM for each of many would show what memory there is."""
        chosen = self.partitions if consumers == 1 else ()
        return [
            way
            for way in WAYS
            if _NEEDS.get(way) not in missing and (way not in PARTITIONS or PARTITIONS[way] in chosen)
        ]


@dataclass(frozen=True, slots=True)
class _End:
    """Where the log ends that is to be read, and the number of events up to there."""

    lsn: str
    events: int


SIZES = {
    "tiny": Work(200, 100, (1, 2), 1, (2,)),
    "quick": Work(10_000, 1000, (1, 4), 1, (1, 2)),
    "usual": Work(40_000, 1000, (1, 4), 2),
    "long": Work(60_000, 1000, (1, 4, 16), 2),
}


def run(place: Place, work: Work, results: Results, progress: Callable[[str], None]) -> None:
    """Write the rows, and read in each way what `results` does not hold yet."""
    ways = {many: work.ways(many, place.missing) for many in work.consumers}
    wanted = [(number, many) for number in range(1, work.rounds + 1) for many in work.consumers]
    if all(results.has(PART, case_name(many), way, number) for number, many in wanted for way in ways[many]):
        return
    results.tell(events_read=work.events)
    install(place.conninfo)
    with psycopg.connect(place.conninfo, autocommit=True) as connection:
        end = _prepare(connection, work, place)
        try:
            for number, many in wanted:
                start = number % len(ways[many])
                for way in [*ways[many][start:], *ways[many][:start]]:
                    if not results.has(PART, case_name(many), way, number):
                        values = _read(connection, place, way, many, end)
                        results.add(PART, case_name(many), way, number, values)
                progress(f"reading: {many} at once, round {number} of {work.rounds}")
        finally:
            drop_slots(connection, "bench_%")


def case_name(consumers: int) -> str:
    """The name of a number of consumers in the results."""
    return f"{consumers} consumer{'' if consumers == 1 else 's'}"


def _prepare(connection: Connection, work: Work, place: Place) -> _End:
    """Tables, queues, consumers, slots and the changes.

    Slots are made after the queues were written: they would have to pass over rows that the others do not have.
    """
    connection.execute("create schema if not exists app")
    create_feed(connection, work.rows)
    for table in _TABLES.values():
        connection.execute(
            sql.SQL("create table app.{} (like app.feed including all) with (autovacuum_enabled = off)").format(
                sql.Identifier(table)
            )
        )
    consumers = [f"c{number}" for number in range(max(work.consumers))]
    connection.execute("select gdq.create_queue(%s)", [QUEUE])
    connection.execute("select gdq.add_table(%s, 'app.read_gdq')", [QUEUE])
    for consumer in consumers:
        connection.execute("select gdq.register_consumer(%s, %s)", [QUEUE, consumer])
    _write(connection, "read_gdq", work)
    connection.execute("select gdq.force_tick(%s)", [QUEUE])
    if PGQ not in place.missing:
        _prepare_pgq(connection, consumers, work)
    connection.execute("alter table app.read_slot replica identity full")
    connection.execute(f"create publication gdq_{QUEUE} for table app.read_slot".encode())
    for plugin in {plugin for way, plugin in _PLUGINS.items() if _NEEDS.get(way) not in place.missing}:
        connection.execute("select pg_create_logical_replication_slot(%s, %s)", [f"bench_{plugin}", plugin])
    # readers that begin at the same moment would all make the table of positions
    connection.execute("select pg_copy_logical_replication_slot('bench_pgoutput', %s)", [f"gdq_{QUEUE}_c0"])
    with SlotSource(place.conninfo, QUEUE, "c0"):
        pass
    drop_slots(connection, f"gdq_{QUEUE}_%")
    _write(connection, "read_slot", work)
    row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    # A program that is to stop at the end sees it when something later comes.
    connection.execute("insert into app.read_slot select * from app.feed limit 1")
    assert row is not None
    return _End(str(row[0]), work.events)


def _prepare_pgq(connection: Connection, consumers: Sequence[str], work: Work) -> None:
    connection.execute("create extension if not exists pgq")
    connection.execute("select pgq.create_queue(%s)", [QUEUE])
    for consumer in consumers:
        connection.execute("select pgq.register_consumer(%s, %s)", [QUEUE, consumer])
    connection.execute(
        "create trigger capture after insert or update or delete on app.read_pgq"
        f" for each row execute function pgq.logutriga('{QUEUE}', 'backup')".encode()
    )
    _write(connection, "read_pgq", work)
    connection.execute("select pgq.force_tick(%s)", [QUEUE])
    connection.execute("select pgq.ticker(%s)", [QUEUE])


def _write(connection: Connection, table: str, work: Work) -> None:
    connection.execute(_WORKLOAD.format(table=table, rows=work.rows, step=work.step).encode())


def _read(connection: Connection, place: Place, way: str, many: int, end: _End) -> dict[str, float]:
    """Events a second of the slowest consumer, and microseconds of processor time an event and consumer."""
    if plugin := _PLUGINS.get(way):
        for number in range(many):
            given = [f"bench_{plugin}", f"gdq_{QUEUE}_c{number}"]
            connection.execute("select pg_copy_logical_replication_slot(%s, %s)", given)
    environment = os.environ | {
        "BENCH_CONNINFO": place.conninfo, "BENCH_PROGRAMS": str(place.binaries.folder), "BENCH_END": end.lsn,
    }  # fmt: skip
    readers = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.reader", way, f"c{number}", str(end.events)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(many)
    ]  # fmt: skip
    try:
        for reader in readers:
            assert reader.stdout is not None
            if reader.stdout.readline() != "ready\n":
                raise BenchError(f"{way}: {_complaint(reader)}")
        before = server_cpu(connection)
        for reader in readers:
            assert reader.stdin is not None
            reader.stdin.write("go\n")
            reader.stdin.flush()
        told = [_result(way, reader) for reader in readers]
        wait_for_sessions(connection)
        server = server_cpu(connection) - before
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
        if plugin:
            drop_slots(connection, f"gdq_{QUEUE}_%")
    return {
        "rate": end.events / max(one["seconds"] for one in told),
        "client_us": sum(one["cpu"] for one in told) * 1e6 / end.events / many,
        "server_us": server * 1e6 / end.events / many,
    }


def _result(way: str, reader: subprocess.Popen[str]) -> dict[str, float]:
    assert reader.stdout is not None
    line = reader.stdout.readline()
    if not line:
        raise BenchError(f"{way}: {_complaint(reader)}")
    result: dict[str, float] = json.loads(line)
    return result


def _complaint(reader: subprocess.Popen[str]) -> str:
    _, said = reader.communicate()
    return (said.strip() or "ended without a word").splitlines()[-1]


def wait_for_sessions(connection: Connection) -> None:
    """Wait until no other session is left: what it used is known to the server's first process then."""
    wait_for(
        "sessions to end",
        "select 1 where not exists (select from pg_stat_activity"
        " where backend_type in ('client backend', 'walsender') and pid <> pg_backend_pid())",
        connection,
    )


def server_cpu(connection: psycopg.Connection[Any]) -> float:
    """Processor time of all processes of the server so far, in seconds: those that have ended too."""
    postmaster = int(stat(connection.info.backend_pid)[1])
    while True:
        ended = seconds_waited_for(postmaster)
        used = ended + seconds_below(postmaster)
        if seconds_waited_for(postmaster) == ended:  # else one that ended in between is counted twice, or not at all
            return used
