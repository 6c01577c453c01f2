"""`gdq snapshot`: tables copied at one snapshot by several workers, and a consumer that goes on from there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
from psycopg import Connection

from gdq.call import call
from gdq.conninfo import Connectable, connect, conninfo_from
from gdq.consumer import register_consumer, unregister_consumer
from gdq.consumers.copy.leader import CopyLead, lead_copy
from gdq.consumers.copy.pieces import CopyChoice
from gdq.consumers.copy.postgres_target import PostgresTarget
from gdq.consumers.copy.workers import CopyTally, PieceWriter, run_workers
from gdq.errors import GdqError
from gdq.extra import extra_named
from gdq.table_copy import resynced

# What stands before the colon in a target of files.
FILE_FORMATS = ("parquet", "arrow")

# Called with what is copied, the phase, the rows so far, and about how many there will be (None if unknown).
CopyProgress = Callable[[str, str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A copied table: its rows, and the bytes that were sent for them."""

    table_name: str
    rows: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """What copy_tables() has copied.

    `snapshot`: the pg_snapshot of all rows. `tick_id` and `position`: the tick of the queue at that snapshot, and the
    position as text of whoever has read up to there; None without a queue.
    """

    tables: tuple[CopiedTable, ...]
    snapshot: str
    seconds: float
    tick_id: int | None = None
    position: str | None = None


class CopyTarget(Protocol):
    """Where a copy goes; nothing is left of one that fails. `takes_generated`: it stores generated columns."""

    takes_generated: bool

    def prepare(self, lead: CopyLead) -> None:
        """Check that the tables fit, and make the target ready."""

    def writers(self, number: int) -> Sequence[PieceWriter]:
        """The ends of this many workers."""

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """What the target needs while the workers write."""

    def commit(self, lead: CopyLead, tally: CopyTally, position: str | None) -> None:
        """Make all of it durable. `position`: of a queue at the snapshot, if there is one."""

    def undo(self) -> None:
        """Take back what was done, after an error."""


def copy_tables(
    connection: Connectable,
    tables: Sequence[str | CopyChoice],
    target: str | CopyTarget,
    *,
    workers: int = 2,
    create: bool = False,
    truncate: bool = False,
    queue: str | None = None,
    consumer: str | None = None,
    complete: Callable[[Connection[Any], str], None] | None = None,
    progress: CopyProgress | None = None,
) -> SnapshotCopy:
    """Copy tables, named as in SQL with their schema, as one snapshot sees them, into another database or into files.

    `target`: a connection string. The database has tables of the same names, or gets them (`create`); they are empty,
    or are emptied (`truncate`), and after an error they are empty again. Or `target` is "parquet:/folder" or
    "arrow:/folder": a new folder, which is there when all files are. `queue`: a tick is taken at the snapshot.
    `consumer` of that queue gets the changes after the snapshot; it is registered if need be. `complete` is called with
    a connection to the target and the snapshot, in the transaction that commits last. GdqError if tables do not fit;
    UnsupportedValue for a value that a file cannot hold.
    """
    dsn = conninfo_from(connection)
    choices = [one if isinstance(one, CopyChoice) else CopyChoice(one) for one in tables]
    started = time.monotonic()
    if isinstance(target, str):
        target = _named_target(target, choices, create=create, truncate=truncate, complete=complete)
    with (
        _following(dsn, queue, consumer, choices) as follow,
        lead_copy(dsn, choices, workers, generated=target.takes_generated) as lead,
    ):
        tick_id, position = follow.tick(lead.holder.snapshot)
        tally = _copy(lead, target, workers, position, progress)
        follow.settle(lead.holder.snapshot)
    copied = tuple(CopiedTable(choice.table, tally.rows[choice.table], tally.bytes[choice.table]) for choice in choices)
    return SnapshotCopy(copied, lead.holder.snapshot, time.monotonic() - started, tick_id, position)


def _named_target(
    name: str,
    choices: Sequence[CopyChoice],
    *,
    create: bool,
    truncate: bool,
    complete: Callable[[Connection[Any], str], None] | None,
) -> CopyTarget:
    """The target of a name; GdqError for options that it does not have."""
    if name.partition(":")[0] not in FILE_FORMATS:
        if any(choice.as_text for choice in choices):
            raise GdqError("as_text is for files", hint="A column of type text in the target's table takes any value.")
        return PostgresTarget(name, create=create, truncate=truncate, complete=complete)
    if create or truncate or complete is not None:
        raise GdqError("create, truncate and complete are for databases", hint="Name a new folder for each copy.")
    with extra_named():
        from gdq.consumers.copy.file_target import file_target  # noqa: PLC0415 (an extra, and slow to load)
    return file_target(name)


def _copy(
    lead: CopyLead, target: CopyTarget, workers: int, position: str | None, progress: CopyProgress | None
) -> CopyTally:
    """Copy all pieces, the largest table first, and commit them."""
    largest = sorted(lead.tables, key=lambda table: -table.blocks)
    pieces = [piece for table in largest for piece in table.pieces(lead.block_size)]
    name = lead.tables[0].name if len(lead.tables) == 1 else f"{len(lead.tables)} tables"

    def tell(rows: int, expected: int | None) -> None:
        if progress is not None:
            progress(name, "copying", rows, expected)

    with contextlib.ExitStack() as stack:
        stack.push(lambda kind, *_: _undo(target) if kind is not None else None)
        target.prepare(lead)
        writers = target.writers(workers)
        for writer in writers:
            stack.callback(writer.close)
        with target.writing():
            tally = run_workers(lead.readers, writers, pieces, tell)
        # a leader that is gone may have let somebody rewrite a table: it answers, so its locks are still there
        lead.holder.connection.execute("select")
        target.commit(lead, tally, position)
    return tally


def _undo(target: CopyTarget) -> None:
    """Undo a failed copy; the error of the copy is the one to tell, whatever becomes of it."""
    with contextlib.suppress(psycopg.Error, OSError):
        target.undo()


class _Follow:
    """What a queue notes of a copy: a tick at its snapshot, and a consumer that goes on from there."""

    def __init__(self, connection: Connection[Any] | None, queue: str, consumer: str | None, tables: list[str]) -> None:
        self._connection, self._queue, self._consumer, self._tables = connection, queue, consumer, tables

    def tick(self, snapshot: str) -> tuple[int | None, str | None]:
        """Take a tick at the snapshot; returns its number and position."""
        if self._connection is None:
            return None, None
        row = self._connection.execute(
            "select tick_id from gdq.add_tick(%s, %s::pg_catalog.pg_snapshot)", [self._queue, snapshot]
        ).fetchone()
        assert row is not None
        return row[0], call(self._connection, "tick_position", self._queue, row[0])

    def settle(self, snapshot: str) -> None:
        """Have the consumer go on from the snapshot, in each of the copied tables."""
        if self._connection is None or self._consumer is None:
            return
        with self._connection.transaction():
            for table in self._tables:
                resynced(self._connection, self._queue, self._consumer, table, snapshot)


@contextlib.contextmanager
def _following(
    dsn: str | None, queue: str | None, consumer: str | None, choices: Sequence[CopyChoice]
) -> Iterator[_Follow]:
    """Register the consumer before the snapshot, so that the queue keeps all later changes; not if the block fails."""
    tables = [choice.table for choice in choices]
    if queue is None:
        yield _Follow(None, "", None, tables)
        return
    with contextlib.closing(connect(dsn, application_name="gdq:copy/queue", autocommit=True)) as connection:
        new = consumer is not None and register_consumer(connection, queue, consumer, tables=tables)
        try:
            yield _Follow(connection, queue, consumer, tables)
        except BaseException:
            if new and consumer is not None:
                with contextlib.suppress(psycopg.Error):
                    unregister_consumer(connection, queue, consumer)
            raise
