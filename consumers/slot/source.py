"""A logical slot as a BatchSource: whole transactions in the order of their commits, with the queue's events.

A batch is what was committed and has arrived, up to a number of changes. It ends with a commit of the database: what a
handler writes on `connection`, together with the position. Only then is the server told, so that a batch whose reader
dies comes again, and one that was committed does not, though the server may send it once more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from psycopg import Connection

from gdq.call import scalar
from gdq.conninfo import connect, conninfo_of, take_utf8
from gdq.consumers.slot.assembly import Assembly
from gdq.consumers.slot.events import TableNames, events_of
from gdq.consumers.slot.publication import narrowed
from gdq.consumers.slot.replication import WAIT_SECONDS, Data, Keepalive, lsn_number, lsn_text, open_stream
from gdq.consumers.slot.rows import SlotRows
from gdq.consumers.slot.slot import publication_name, slot_name
from gdq.consumers.slot.transaction import Transaction
from gdq.errors import GdqError, ResyncRequired
from gdq.source import MAX_EVENTS, Event, Position
from gdq.typed.pgtypes import Unsupported

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

_WAIT_SECONDS = 0.5
_PUBLICATION_SECONDS = 10.0
_FLUSH_SECONDS = 0.01

# IF NOT EXISTS fails beside another that makes the same.
_POSITION_TABLE = """
    select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq target', 0));
    create schema if not exists gdq_target;
    create table if not exists gdq_target.slot_position (
      slot_name text primary key, lsn pg_lsn not null, updated_at timestamptz not null default now())"""
# Only from where this reader has read on: the commit of one that was killed may still be under way. The commit must be
# on disk before the slot forgets what is applied.
_MOVE = """
    insert into gdq_target.slot_position as p (slot_name, lsn)
    select %s, %s::pg_catalog.pg_lsn
     where case when pg_catalog.current_setting('synchronous_commit') = 'off'
                then pg_catalog.set_config('synchronous_commit', 'local', true) else '' end is not null
    on conflict (slot_name) do update set lsn = excluded.lsn, updated_at = pg_catalog.now()
     where p.lsn = %s::pg_catalog.pg_lsn"""
_SLOT = """
    select s.wal_status is not distinct from 'lost', pg_catalog.to_jsonb(s) ->> 'invalidation_reason'
      from pg_catalog.pg_replication_slots s
     where s.slot_name = %s and s.plugin = 'pgoutput' and s.database = pg_catalog.current_database()"""


def lost_slot(slot: str, reason: str | None) -> ResyncRequired:
    """The error for a slot that the server has given up; `reason` is that of pg_replication_slots."""
    return ResyncRequired(
        f"slot {slot} is lost ({reason or 'wal_removed'}): the server has removed log that was not read",
        hint="Drop it with gdq drop-slot, make it anew with gdq create-slot and load the tables."
        " max_slot_wal_keep_size says how much log slots may keep.",
    )


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
        """Commit the new position, together with everything written in the batch's transaction."""
        if self.finished:
            return
        self._source.move(self.lsn)
        self._transaction.close()
        self.finished = True
        self._source.stored = self.lsn
        self._source.committed(self._transactions)


class SlotSource:
    """Reads the slot of one consumer; a BatchSource.

        with SlotSource(dsn, "orders", "mirror") as source:
            for batch in source.batches():
                for event in batch.events():
                    ...

    The batches' transactions are those of `connection`, in the database of the slot. Given a connection it takes that
    over: switched to autocommit; it must be idle and stays open at the end.
    `max_events`: transactions are joined into one batch of at most this many changes; none is ever divided.
    `wait_seconds`: how long to wait for another reader to leave the slot, as that of a killed program does after a
    while; `pause(seconds)` sleeps meanwhile, and returns True to end that. `narrowed`: what the publication does not
    send of what it was made for; looked at every 10 s, and logged as a warning when it changes.

    GdqError where there is no such slot or publication, another reads it, or its position is not of this server's log;
    ResyncRequired where the server has removed log that was not read.
    """

    def __init__(
        self,
        source: Connection[Any] | str | None,
        queue: str,
        consumer: str,
        *,
        max_events: int = MAX_EVENTS,
        wait_seconds: float = WAIT_SECONDS,
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        self.slot = slot_name(queue, consumer)
        self._publication = publication_name(queue)
        self.narrowed: list[str] = []
        self._looked_at = float("-inf")
        self._max_events = max_events
        self._owned = not isinstance(source, Connection)
        self.connection = (
            source if isinstance(source, Connection) else connect(source, application_name=f"gdq:slot {self.slot}")
        )
        try:
            self.connection.autocommit = True
            take_utf8(self.connection)
            self._begin()
            self._replication = open_stream(
                self.connection,
                conninfo_of(self.connection),
                self.slot,
                queue,
                wait_seconds=wait_seconds,
                pause=pause,
            )
            try:
                # the reader before may have moved it while we waited for its slot
                self.stored = self._position()
            except BaseException:
                self._replication.close()
                raise
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
        now, then end. `timeout`: end after this many seconds without a batch. `stop` is asked between batches and
        while waiting.
        """
        goal = self._written() if once else None
        waiting_since = time.monotonic()
        while not stop():
            self._look()
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
        """Store the position in the transaction at hand. GdqError when another reader has moved it."""
        moved = self.connection.execute(_MOVE, [self.slot, lsn_text(lsn), lsn_text(self.stored)])
        if moved.rowcount != 1:
            raise GdqError(
                f"the position of slot {self.slot} is not {lsn_text(self.stored)} any more: another has moved it",
                hint="Nothing of the batch was committed: start the reader again.",
            )

    def committed(self, transactions: Sequence[Transaction]) -> None:
        """Report the applied position to the server, unless a prepared transaction is open."""
        if not self._assembly.prepared:
            self._replication.confirm(transactions[-1].end_lsn)

    def _gather(self, goal: int | None, until: float | None, stop: Callable[[], bool]) -> list[Transaction]:
        """The transactions of the next batch: all that have arrived; waits for the first."""
        count = 0
        while count < self._max_events and not stop() and (goal is None or self._sent < goal):
            message = self._replication.receive(0 if self._ready else _WAIT_SECONDS)
            if isinstance(message, Data):
                count += self._took(self._assembly.take(message))
            elif isinstance(message, Keepalive):
                self._sent = max(self._sent, message.lsn)
                if not self._ready and self._assembly.empty:
                    self._replication.seen(message.lsn)
                if not self._ready:
                    self._look()  # where others write all the time there is never a moment without a message
            elif self._ready:
                break
            else:
                self._look()
            if until is not None and time.monotonic() >= until and not self._ready:
                break
        taken, self._ready = self._ready, []
        return taken

    def _took(self, committed: Transaction | None) -> int:
        """Keep a transaction for the next batch unless it was applied before; returns the number of its changes."""
        if committed is None:
            return 0
        self._sent = max(self._sent, committed.end_lsn)
        if committed.end_lsn <= self.stored or not committed.rows:
            committed.close()
            return 0
        self._ready.append(committed)
        return committed.rows

    def _look(self) -> None:
        """Check every 10 s that the publication still sends what it was made for, and log a warning if not."""
        if time.monotonic() - self._looked_at < _PUBLICATION_SECONDS:
            return
        self._looked_at = time.monotonic()
        found = narrowed(self.connection, self._publication)
        if found is None:
            raise GdqError(
                f"there is no publication {self._publication} any more: slot {self.slot} sends nothing without it",
                hint="Drop the slot with gdq drop-slot, make it anew with gdq create-slot and load the tables.",
            )
        if found and found != self.narrowed:
            log.warning(
                "publication %s does not send everything: %s. Changes are missing; gdq drop-slot and gdq create-slot"
                " begin anew",
                self._publication,
                "; ".join(found),
            )
        self.narrowed = found

    def _begin(self) -> None:
        """Make the table of positions, and see whether the slot can be read."""
        if scalar(self.connection, "select pg_catalog.to_regclass('gdq_target.slot_position')::text") is None:
            self.connection.execute(_POSITION_TABLE)
        self.system = str(scalar(self.connection, "select system_identifier from pg_catalog.pg_control_system()"))
        slot = self.connection.execute(_SLOT, [self.slot]).fetchone()
        if slot is None:
            raise GdqError(f"there is no slot {self.slot}", hint="Make it with gdq create-slot.")
        if slot[0]:
            raise lost_slot(self.slot, slot[1])
        self._position()
        self._look()

    def _written(self) -> int:
        """The end of the log as committed now.

        Only what is on disk is sent: commits with synchronous_commit off are there after three wal_writer_delay.
        """
        query = "select extract(epoch from 3 * pg_catalog.current_setting('wal_writer_delay')::interval)::float8"
        end = scalar(self.connection, "select pg_catalog.pg_current_wal_insert_lsn()::text")
        until = time.monotonic() + scalar(self.connection, query)
        flushed = "select pg_catalog.pg_current_wal_flush_lsn() >= %s::pg_catalog.pg_lsn"
        while not scalar(self.connection, flushed, end) and time.monotonic() < until:
            time.sleep(_FLUSH_SECONDS)
        return lsn_number(scalar(self.connection, "select pg_catalog.pg_current_wal_flush_lsn()::text"))

    def _position(self) -> int:
        """The position that is stored for this slot, 0 when there is none."""
        query = "select lsn::text from gdq_target.slot_position where slot_name = %s"
        stored = scalar(self.connection, query, self.slot)
        if stored and scalar(self.connection, "select %s::pg_catalog.pg_lsn > pg_catalog.pg_current_wal_lsn()", stored):
            raise GdqError(
                f"slot {self.slot} was read to {stored}, which this server has not written yet: diverged",
                hint="The server has lost its tail or is another: drop the slot, make it anew and load the tables.",
            )
        return lsn_number(stored) if stored else 0
