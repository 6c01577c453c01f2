"""A logical slot as a BatchSource: whole transactions in the order of their commits, with the queue's events.

A batch is what was committed and has arrived, up to a number of changes. It ends with a commit of the database: what a
handler writes on `connection`, together with the position. Only then is the server told, so that a batch whose reader
dies comes again, and one that was committed does not, though the server may send it once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from psycopg import Connection
from psycopg.rows import scalar_row

from gdq.conninfo import connect, conninfo_of
from gdq.consumers.slot.assembly import Assembly
from gdq.consumers.slot.events import TableNames, events_of
from gdq.consumers.slot.replication import Data, Keepalive, Replication
from gdq.consumers.slot.rows import SlotRows
from gdq.consumers.slot.slot import publication_name, slot_name
from gdq.consumers.slot.transaction import Transaction
from gdq.errors import GdqError
from gdq.pgtypes import Unsupported
from gdq.source import Event, Position

if TYPE_CHECKING:
    import pyarrow as pa

MAX_EVENTS = 50_000

_WAIT_SECONDS = 0.5

# IF NOT EXISTS fails beside another that makes the same.
_POSITION_TABLE = """
    select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq target', 0));
    create schema if not exists gdq_target;
    create table if not exists gdq_target.slot_position (
      slot_name text primary key, lsn pg_lsn not null, updated_at timestamptz not null default now())"""
_MOVE = """
    insert into gdq_target.slot_position as p (slot_name, lsn) values (%s, %s::pg_catalog.pg_lsn)
    on conflict (slot_name) do update set lsn = excluded.lsn, updated_at = pg_catalog.now()"""


def lsn_text(lsn: int) -> str:
    """A place in the write-ahead log as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_number(text: str) -> int:
    """The number of a place that is written as PostgreSQL writes it."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) + int(low, 16)


def open_stream(connection: Connection[Any], dsn: str, slot: str, queue: str, *, messages: bool = True) -> Replication:
    """Start the stream of a slot of the queue's publication, with `messages` those of pg_logical_emit_message() too.

    `connection` tells what the server and the slot can do; errors as of Replication.
    """
    query = "select two_phase from pg_catalog.pg_replication_slots where slot_name = %s"
    two_phase = connection.execute(query, [slot]).fetchone()
    options = {"proto_version": "4" if connection.info.server_version >= 160000 else "3"}
    options |= {"publication_names": f'"{publication_name(queue)}"', "streaming": "on"}
    options |= {"messages": "true"} if messages else {}
    options |= {"two_phase": "on"} if two_phase and two_phase[0] else {}
    return Replication(dsn, slot, options)


class SlotBatch:
    """Some committed transactions, whole; reading again gives the same."""

    def __init__(self, source: SlotSource, transactions: Sequence[Transaction], transaction: ExitStack) -> None:
        self._source = source
        self._transactions = transactions
        self._transaction = transaction
        self.lsn = transactions[-1].end_lsn
        self.finished = False

    @property
    def position(self) -> Position:
        """Where the reader stands once the batch is finished: its `tick` and its snapshot are the LSN."""
        return Position("slot", self._source.system, self.lsn, self._source.slot, lsn_text(self.lsn))

    @property
    def size(self) -> int:
        """How many changes there are."""
        return sum(one.rows for one in self._transactions)

    def tables(self) -> list[str]:
        """The tables that have rows in the batch, as `%I.%I`."""
        return sorted({event.table for event in self.events() if event.table is not None})

    def events(self) -> Iterator[Event]:
        """All changes: transactions in the order of their commits, changes as they were made, streamed."""
        for one in self._transactions:
            yield from events_of(one, self._source.names)

    def arrow(self, table: str, *, unsupported: Unsupported = "error", as_text: Collection[str] = ()) -> pa.Table:
        """The changes of one table, typed, in the columns of the queue's log rows.

        `old_` are NULL where the replica identity gives no old value, `new_` for large values that an update left as
        they were. GdqError when a column has changed its type in the batch.
        """
        return SlotRows(self._transactions, self._source.names, table, unsupported, as_text).arrow()

    def arrow_batches(
        self, table: str, *, unsupported: Unsupported = "error", as_text: Collection[str] = ()
    ) -> Iterator[pa.RecordBatch]:
        """The same, streamed."""
        return SlotRows(self._transactions, self._source.names, table, unsupported, as_text).batches()

    def delta(self, table: str, *, unsupported: Unsupported = "error", as_text: Collection[str] = ()) -> pa.Table:
        """The net change of one table: row images with a signed count in `_weight`, zeros left out.

        GdqError without REPLICA IDENTITY FULL, ResyncRequired after a TRUNCATE.
        """
        return SlotRows(self._transactions, self._source.names, table, unsupported, as_text).delta()

    def commit(self) -> None:
        """Move the reader past the batch, and commit this with all that was done in its transaction."""
        if self.finished:
            return
        self._source.move(self.lsn)
        self._transaction.close()
        self.finished = True
        self._source.committed(self._transactions)


class SlotSource:
    """Reads the slot of one consumer; a BatchSource.

        with SlotSource(dsn, "orders", "mirror") as source:
            for batch in source.batches():
                for event in batch.events():
                    ...

    The batches' transactions are those of `connection`, in the database of the slot. Given a connection it takes that
    over: switched to autocommit; it must be idle and stays open at the end.
    `max_events`: transactions are joined into one batch up to so many changes; one transaction is never divided.
    """

    def __init__(
        self, source: Connection[Any] | str | None, queue: str, consumer: str, *, max_events: int = MAX_EVENTS
    ) -> None:
        self.slot = slot_name(queue, consumer)
        self._max_events = max_events
        self._owned = not isinstance(source, Connection)
        self.connection = (
            source if isinstance(source, Connection) else connect(source, application_name=f"gdq:slot {self.slot}")
        )
        try:
            self.connection.autocommit = True
            self._stored = self._begin()
            self._replication = open_stream(self.connection, conninfo_of(self.connection), self.slot, queue)
        except BaseException:
            if self._owned:
                self.connection.close()
            raise
        self.names = TableNames(self.connection)
        self._assembly = Assembly(self.slot)
        self._ready: list[Transaction] = []
        self._sent = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._replication.close()
        self._assembly.close()
        for one in self._ready:
            one.close()
        if self._owned:
            self.connection.close()

    def batches(
        self, *, once: bool = False, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[SlotBatch]:
        """The batches from the reader's position on, each in a transaction of its own.

        Asking for the next batch finishes the one before and commits (batch.commit() does it earlier); an exception
        rolls back and ends the stream: a new source brings the batch again. `once`: those that were committed up to
        now, then end. `timeout`: end when there was none for so many seconds. `stop` is asked between batches and
        while waiting.
        """
        goal = lsn_number(self._scalar("select pg_catalog.pg_current_wal_lsn()::text")) if once else None
        waiting_since = time.monotonic()
        while not stop():
            ready = self._gather(goal, None if timeout is None else waiting_since + timeout, stop)
            if not ready:
                return
            with ExitStack() as kept, ExitStack() as transaction:
                for one in ready:
                    kept.callback(one.close)
                transaction.enter_context(self.connection.transaction())
                batch = SlotBatch(self, ready, transaction)
                yield batch
                batch.commit()
            waiting_since = time.monotonic()

    def move(self, lsn: int) -> None:
        """Store the position in the transaction at hand."""
        self.connection.execute(_MOVE, [self.slot, lsn_text(lsn)])

    def committed(self, transactions: Sequence[Transaction]) -> None:
        """Tell the server what is applied; it stays where a prepared transaction has begun."""
        self._stored = max(self._stored, transactions[-1].end_lsn)
        if not self._assembly.prepared:
            self._replication.confirm(self._stored)

    def _gather(self, goal: int | None, until: float | None, stop: Callable[[], bool]) -> list[Transaction]:
        """The transactions of the next batch: those that have arrived; waits while there are none."""
        count = 0
        while count < self._max_events and not stop() and (goal is None or self._sent < goal):
            message = self._replication.receive(0 if self._ready else _WAIT_SECONDS)
            if isinstance(message, Data):
                count += self._took(self._assembly.take(message))
            elif isinstance(message, Keepalive):
                self._sent = max(self._sent, message.lsn)
                if not self._ready and self._assembly.empty:
                    self._replication.seen(message.lsn)
            elif self._ready:
                break
            if until is not None and time.monotonic() >= until and not self._ready:
                break
        taken, self._ready = self._ready, []
        return taken

    def _took(self, committed: Transaction | None) -> int:
        """Keep a transaction for the next batch unless it was applied before; its changes."""
        if committed is None:
            return 0
        self._sent = max(self._sent, committed.end_lsn)
        if committed.end_lsn <= self._stored or not committed.rows:
            committed.close()
            return 0
        self._ready.append(committed)
        return committed.rows

    def _begin(self) -> int:
        """Make the table of positions; the position of this slot, 0 when it has none."""
        if self._scalar("select pg_catalog.to_regclass('gdq_target.slot_position')::text") is None:
            self.connection.execute(_POSITION_TABLE)
        self.system = str(self._scalar("select system_identifier from pg_catalog.pg_control_system()"))
        there = self._scalar("select plugin::text from pg_catalog.pg_replication_slots where slot_name = %s", self.slot)
        if there is None:
            raise GdqError(f"there is no slot {self.slot}", hint="Make it with gdq create-slot.")
        stored = self._scalar("select lsn::text from gdq_target.slot_position where slot_name = %s", self.slot)
        if stored and self._scalar("select %s::pg_catalog.pg_lsn > pg_catalog.pg_current_wal_lsn()", stored):
            raise GdqError(
                f"slot {self.slot} was read to {stored}, which this server has not written yet: diverged",
                hint="The server has lost its tail or is another: drop the slot, make it anew and load the tables.",
            )
        return lsn_number(stored) if stored else 0

    def _scalar(self, query: str, *values: object) -> Any:
        with self.connection.cursor(row_factory=scalar_row) as cursor:
            return cursor.execute(query, values).fetchone()
