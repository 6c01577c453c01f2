"""The same work at a steady rate for a queue and for a slot on one server, and what each of them keeps on the disk."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from types import TracebackType
from typing import Any, Self

import psycopg

from bench.latency import PATHS, Path
from bench.packages import BenchError
from bench.slot_reader import cpu_seconds, wait_for
from gdq.conninfo import conninfo_of
from gdq.consumer import Consumer
from gdq.consumers.slot.slot import create_slot, slot_info
from gdq.consumers.slot.source import SlotSource
from gdq.installer.install import install

QUEUE = "steady"
TICKER = "ticker of the benchmark"
ROWS = 2
TABLES: dict[Path, str] = {"queue": "app.by_queue", "slot": "app.by_slot"}
_END_SECONDS = 120.0
_TABLE = """
    create table {} (id bigint primary key, at double precision not null,
                     note text not null default 'a note of about the usual length, in small letters')
      with (autovacuum_enabled = off)"""


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds that a consumer is stopped or a snapshot held, transactions a second to each table, rounds of reading.

    A transaction has ROWS rows: an INSERT of them, and in the next an UPDATE of the same.
    """

    seconds: float
    rate: int
    rounds: int

    @property
    def rotation_seconds(self) -> float:
        """So short that logs rotate some twenty times."""
        return self.seconds / 20


@dataclass(frozen=True, slots=True)
class Written:
    """What the writer made: rows and bytes of WAL of each table, and transactions a second to each."""

    rows: dict[Path, int]
    wal: dict[Path, int]
    rate: float


@dataclass(slots=True)
class Kept:
    """Bytes on the disk: the queue's logs, the log that the slots retain, and all of pg_wal."""

    queue: int = 0
    slot: int = 0
    pg_wal: int = 0

    def most(self, other: Kept) -> Kept:
        """The larger of each."""
        return Kept(max(self.queue, other.queue), max(self.slot, other.slot), max(self.pg_wal, other.pg_wal))


def prepare(connection: psycopg.Connection[Any], work: Work, consumers: Sequence[str]) -> None:
    """Install gdq; make a table, captured by a queue, and one like it with slots; `consumers` of both."""
    install(conninfo_of(connection))
    connection.execute("select gdq.create_event_triggers()")
    connection.execute("create schema app")
    connection.execute("create table app.flushed (at timestamptz)")
    for table in TABLES.values():
        connection.execute(_TABLE.format(table).encode())
    connection.execute(
        "select gdq.create_queue(%s, rotation_period => make_interval(secs => %s))", [QUEUE, work.rotation_seconds]
    )
    connection.execute("select gdq.add_table(%s, %s::regclass)", [QUEUE, TABLES["queue"]])
    # so that both tell old rows
    connection.execute(f"alter table {TABLES['slot']} replica identity full".encode())
    for consumer in consumers:
        connection.execute("select gdq.register_consumer(%s, %s)", [QUEUE, consumer])
        create_slot(connection, QUEUE, consumer, [TABLES["slot"]])


def kept(connection: psycopg.Connection[Any]) -> Kept:
    """What is on the disk now."""
    queue, wal = one(
        connection,
        """select (select gdq.queue_bytes(queue_id) from gdq.queue where queue_name = %s),
                  (select sum(size)::bigint from pg_ls_waldir())""",
        QUEUE,
    )
    return Kept(queue, max((info.retained_bytes or 0 for info in slot_info(connection)), default=0), wal)


def flush(connection: psycopg.Connection[Any]) -> None:
    """Wait until all that was committed is in the log on the disk: a slot gives nothing before.

    For the rest of the session synchronous_commit is on.
    """
    connection.execute("set synchronous_commit = on")
    connection.execute("insert into app.flushed values (now())")


def one(connection: psycopg.Connection[Any], query: str, *values: object) -> tuple[Any, ...]:
    """The only row of a query."""
    row: tuple[Any, ...] | None = connection.execute(query.encode(), values).fetchone()
    assert row is not None
    return row


class Child:
    """A function at work in a process of its own: it is called with a pipe to this one, and then `given`.

    At the end of the block the process is ended, done or not.
    """

    def __init__(self, function: Callable[..., None], *given: object) -> None:
        self._name = function.__name__.strip("_")
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=function, args=(theirs, *given), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()

    def said(self, seconds: float) -> bool:
        """Whether it says something within so many seconds."""
        return self._pipe.poll(seconds)

    def hear(self, seconds: float = _END_SECONDS) -> Any:
        """What it says next. BenchError when it says nothing for so long, or has died."""
        if not self.said(seconds):
            raise BenchError(f"waited {seconds:.0f} s for the process that is to {self._name}")
        try:
            return self._pipe.recv()
        except EOFError:
            raise BenchError(f"the process that is to {self._name} has failed") from None


@contextmanager
def ticker(conninfo: str) -> Iterator[None]:
    """`gdq ticker` at work, in a session that is named TICKER."""
    environment = os.environ | {"GDQ_DSN": conninfo, "PGAPPNAME": TICKER}
    program = subprocess.Popen([sys.executable, "-m", "gdq", "ticker"], env=environment)
    try:
        yield
    finally:
        program.terminate()
        program.wait()


def write(told: Pipe, conninfo: str, work: Work) -> None:
    """Write for as long as the work says, in turns to both tables; then tell what was written.

    The slot retains the log of all that is written on the server: what belongs to one table is told by its turns.
    """
    block = max(work.rate // 10, 1)
    rows, wal = dict.fromkeys(PATHS, 0), dict.fromkeys(PATHS, 0)
    made = 0
    with psycopg.connect(conninfo, autocommit=True) as connection:
        place = _wal_bytes(connection)
        started = due = time.monotonic()
        while due < started + work.seconds:
            for path in PATHS:
                for number in range(made, made + block):
                    connection.execute(*_transaction(TABLES[path], number), prepare=True)
                    due += 1 / (2 * work.rate)
                    time.sleep(max(due - time.monotonic(), 0))
                before, place = place, _wal_bytes(connection)
                wal[path] += place - before
                rows[path] += block * ROWS
            made += block
        told.send(Written(rows, wal, made / (time.monotonic() - started)))


def watch(connection: psycopg.Connection[Any], writer: Child, work: Work) -> Iterator[Kept]:
    """What is on the disk, each second until the writer tells what it wrote, or should have long ago."""
    end = time.monotonic() + 2 * work.seconds + _END_SECONDS
    while not writer.said(1) and time.monotonic() < end:
        yield kept(connection)


def _transaction(table: str, number: int) -> tuple[bytes, list[object]]:
    """A statement of the writer, with the moment at which it begins in its rows: an INSERT, then an UPDATE of those."""
    first = number // 2 * ROWS + 1
    if number % 2:
        changed = f"update {table} set at = %s, note = reverse(note) where id between %s and %s"
        return changed.encode(), [time.monotonic(), first, first + ROWS - 1]
    inserted = f"insert into {table} select i, %s from generate_series(%s::bigint, %s) i"
    return inserted.encode(), [time.monotonic(), first, first + ROWS - 1]


def _wal_bytes(connection: psycopg.Connection[Any]) -> int:
    return int(one(connection, "select (pg_current_wal_insert_lsn() - '0/0')::bigint")[0])


@dataclass(slots=True)
class SteadyReader:
    """A consumer that reads a queue or a slot, and the server processes that work for it."""

    source: Consumer | SlotSource
    pids: Sequence[int]

    def server_cpu(self) -> float:
        """Seconds of processor time of its server processes since the reader was made."""
        return sum(map(cpu_seconds, self.pids))


@contextmanager
def reader(path: Path, conninfo: str, consumer: str) -> Iterator[SteadyReader]:
    """The consumer of that name, of the queue or of its slot: then it has a sender beside its own session."""
    if path == "queue":
        with Consumer(conninfo, QUEUE, consumer) as queue:
            yield SteadyReader(queue, [queue.connection.info.backend_pid])
        return
    with SlotSource(conninfo, QUEUE, consumer) as slot:
        query = "select active_pid from pg_replication_slots where slot_name = %s"
        with psycopg.connect(conninfo, autocommit=True) as connection:
            sender = wait_for("the slot's sender", query, connection, slot.slot)
        yield SteadyReader(slot, [slot.connection.info.backend_pid, int(sender)])
