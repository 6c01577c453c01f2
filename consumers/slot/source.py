"""A logical slot as a BatchSource: whole transactions in commit order, as events of the queue's form.

A batch holds the committed transactions that have arrived, up to a number of changes. Finishing a batch commits one
transaction with the handler's writes on `connection` and the position; the server hears of the position only after it.
So a batch whose reader dies comes again, and a committed batch never does: if the server repeats it, it is skipped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Any, Self

from psycopg import Connection

from gdq.call import scalar
from gdq.conninfo import connect, conninfo_of, take_utf8
from gdq.consumers.slot.assembly import Assembly
from gdq.consumers.slot.batch import SlotBatch
from gdq.consumers.slot.catalog import SlotCatalog
from gdq.consumers.slot.publication import narrowed_publication
from gdq.consumers.slot.replication import (
    REPLICATION_WAIT_SECONDS,
    ReplicationData,
    ReplicationKeepalive,
    committed_lsn,
    lsn_number,
    lsn_text,
    open_replication,
    refuse_synchronous,
)
from gdq.consumers.slot.slot import check_primary, publication_name, slot_name
from gdq.consumers.slot.transaction import SlotTransaction
from gdq.consumers.views.own_objects import check_own_tables
from gdq.errors import GdqError, ResyncRequired
from gdq.qualified_sql import qualified
from gdq.source import MAX_EVENTS

log = logging.getLogger(__name__)

_WAIT_SECONDS = 0.5
_PUBLICATION_SECONDS = 10.0
_PASSED_SECONDS = 10.0

# The lock: CREATE IF NOT EXISTS may fail if another session creates the same.
_POSITION_TABLE = """
    select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq target', 0));
    create schema if not exists gdq_target;
    create table if not exists gdq_target.slot_position (
      slot_name pg_catalog.text primary key, lsn pg_catalog.pg_lsn not null,
      updated_at pg_catalog.timestamptz not null default pg_catalog.now())"""
# Only from the position that this reader started at: the commit of a killed reader may still be under way. The commit
# must be on disk before the slot forgets the applied changes. It waits for no standby: the server may take this reader
# for one, which confirms nothing before its commit.
_MOVE = qualified("""
    insert into gdq_target.slot_position as p (slot_name, lsn)
    select %s, %s::pg_catalog.pg_lsn
     where pg_catalog.set_config('synchronous_commit', 'local', true) is not null
    on conflict (slot_name) do update set lsn = excluded.lsn, updated_at = pg_catalog.now()
     where p.lsn = %s::pg_catalog.pg_lsn""")
_NOTE = qualified("""
    insert into gdq_target.slot_position (slot_name, lsn) values (%s, %s::pg_catalog.pg_lsn) on conflict do nothing""")
_SLOT = qualified("""
    select coalesce(s.wal_status = 'lost', false), pg_catalog.to_jsonb(s) ->> 'invalidation_reason'
      from pg_catalog.pg_replication_slots s
     where s.slot_name = %s and s.plugin = 'pgoutput' and s.database = pg_catalog.current_database()""")


def lost_slot_error(slot: str, reason: str | None) -> ResyncRequired:
    """The error for a slot that the server has invalidated; `reason`: its invalidation_reason."""
    return ResyncRequired(
        f"slot {slot} is lost ({reason or 'wal_removed'}): the server has removed log that was not read",
        hint="Drop it with gdq drop-slot, make it anew with gdq create-slot and load the tables."
        " max_slot_wal_keep_size says how much log slots may keep.",
    )


class SlotSource:
    """Reads the slot of one consumer; a BatchSource.

        with SlotSource(dsn, "orders", "mirror") as source:
            for batch in source.batches():
                for event in batch.events():
                    ...

    The batches' transactions run on `connection`, in the slot's database. A given connection must be idle; it is
    switched to autocommit and stays open at the end.
    `max_events`: transactions are joined into batches of at most this many changes; none is ever divided.
    `wait_seconds`: how long to wait for another reader to leave the slot (the server notices a killed one late);
    `pause(seconds)` sleeps meanwhile, and returns True to stop waiting.
    `position`: the caller keeps the position itself and stands at this LSN, so that a batch is no transaction of
    `connection`, where only a note says that the slot has a reader. `passed(lsn)` is then called for log without
    changes, about every ten seconds and at the end: it stores the LSN before it returns.
    `narrowed`: the parts of its tables and operations that the publication does not send; checked every 10 s, a change
    is logged as a warning.

    GdqError if slot or publication is missing, another process reads the slot, or the position is not in this server's
    log; ResyncRequired if the server has removed unread log.
    """

    def __init__(
        self,
        source: Connection[Any] | str | None,
        queue: str,
        consumer: str,
        *,
        max_events: int = MAX_EVENTS,
        wait_seconds: float = REPLICATION_WAIT_SECONDS,
        pause: Callable[[float], bool] | None = None,
        position: int | None = None,
        passed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.slot = slot_name(queue, consumer)
        self._given = position
        self._keeps_position = position is None
        self._passed = passed
        self._passed_at = time.monotonic()
        self._publication = publication_name(queue)
        self.narrowed: list[str] = []
        self._looked_at = float("-inf")
        self._max_events = max_events
        with ExitStack() as opened:
            if isinstance(source, Connection):
                self.connection = source
            else:
                made = connect(source, application_name=f"gdq:slot {self.slot}")
                self.connection = opened.enter_context(closing(made))
            self.connection.autocommit = True
            take_utf8(self.connection)
            self._begin()
            self._replication = open_replication(
                self.connection,
                conninfo_of(self.connection),
                self.slot,
                queue,
                wait_seconds=wait_seconds,
                pause=pause,
            )
            opened.callback(self._replication.close)
            # read again: the reader before may have moved it while we waited for the slot
            self.stored = self._position()
            self._opened = opened.pop_all()
        self.catalog = SlotCatalog(self.connection)
        self._assembly = Assembly(self.slot)
        self._ready: list[SlotTransaction] = []
        self._sent = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()
        self._assembly.close()
        for one in self._ready:
            one.close()

    def batches(
        self, *, once: bool = False, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> Generator[SlotBatch, None, None]:
        """Yield the batches from the reader's position on, each in its own transaction.

        Asking for the next batch finishes and commits the one before (batch.commit() does it earlier). An exception
        rolls back and ends the stream; a new source gives the batch again. `once`: read what is committed now, then
        end. `timeout`: end after this many seconds without a batch. `stop` is called between batches and while waiting.
        """
        goal = committed_lsn(self.connection) if once else None
        waiting_since = time.monotonic()
        while not stop():
            self._look()
            ready = self._gather(goal, None if timeout is None else waiting_since + timeout, stop)
            if not ready:
                self._tell_passed()
                return
            with ExitStack() as kept, ExitStack() as transaction:
                for one in ready:
                    kept.callback(one.close)
                if self._keeps_position:
                    transaction.enter_context(self.connection.transaction())
                batch = SlotBatch(self, ready, transaction)
                yield batch
                batch.commit()
            waiting_since = time.monotonic()

    def move(self, lsn: int) -> None:
        """Store the position in the open transaction; GdqError if another reader has moved it."""
        if not self._keeps_position:
            return
        moved = self.connection.execute(_MOVE, [self.slot, lsn_text(lsn), lsn_text(self.stored)])
        if moved.rowcount != 1:
            raise GdqError(
                f"the position of slot {self.slot} is not {lsn_text(self.stored)} any more: another has moved it",
                hint="Nothing of the batch was committed: start the reader again.",
            )

    def committed(self, transactions: Sequence[SlotTransaction]) -> None:
        """Report the applied position to the server, but none past a PREPARE that waits for its end."""
        self._replication.confirm(self._assembly.confirmable(transactions[-1].end_lsn))

    def _gather(self, goal: int | None, until: float | None, stop: Callable[[], bool]) -> list[SlotTransaction]:
        """The transactions of the next batch: all that have arrived; waits for the first."""
        count = 0
        while count < self._max_events and not stop() and (goal is None or self._sent < goal):
            message = self._replication.receive(0 if self._ready else _WAIT_SECONDS)
            if isinstance(message, ReplicationData):
                count += self._took(self._assembly.take(message))
            elif isinstance(message, ReplicationKeepalive):
                self._sent = max(self._sent, message.lsn)
                if not self._ready and self._assembly.empty:
                    self._saw(self._assembly.confirmable(message.lsn))
                if not self._ready:
                    self._look()  # on a busy server there is never a moment without a message
            elif self._ready:
                break
            else:
                self._look()
            if until is not None and time.monotonic() >= until and not self._ready:
                break
        taken, self._ready = self._ready, []
        return taken

    def _saw(self, lsn: int) -> None:
        """Note log without changes, which the server may forget."""
        if self._keeps_position:
            self._replication.seen(lsn)
        elif time.monotonic() - self._passed_at >= _PASSED_SECONDS:
            self._tell_passed()

    def _tell_passed(self) -> None:
        """Have the keeper of the position store it behind log without changes, then confirm that to the server."""
        self._passed_at = time.monotonic()
        lsn = self._assembly.confirmable(self._sent)
        if not self._keeps_position and self._assembly.empty and lsn > self.stored:
            self._passed(lsn)
            self.stored = lsn
            self._replication.confirm(lsn)

    def _took(self, committed: SlotTransaction | None) -> int:
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
        """Check every 10 s that the publication still sends what it was made for, and log a warning if not.

        GdqError if the server takes the reader for a synchronous standby by now.
        """
        if time.monotonic() - self._looked_at < _PUBLICATION_SECONDS:
            return
        self._looked_at = time.monotonic()
        refuse_synchronous(self.connection, self.slot)
        found = narrowed_publication(self.connection, self._publication)
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
        """Create the table of positions if missing, and check that the slot can be read."""
        check_primary(self.connection, "a reader of a slot")
        self._make_position_table()
        self.system = str(scalar(self.connection, "select system_identifier from pg_catalog.pg_control_system()"))
        slot = self.connection.execute(_SLOT, [self.slot]).fetchone()
        if slot is None:
            raise GdqError(f"there is no slot {self.slot}", hint="Make it with gdq create-slot.")
        if slot[0]:
            raise lost_slot_error(self.slot, slot[1])
        self._position()
        if self._given is not None:
            # a note that the slot has a reader, for gdq doctor
            self.connection.execute(_NOTE, [self.slot, lsn_text(self._given)])
        self._look()

    def _make_position_table(self) -> None:
        made = qualified("select pg_catalog.to_regclass('gdq_target.slot_position')::text")
        if scalar(self.connection, made) is None:
            self.connection.execute(_POSITION_TABLE)
        check_own_tables(self.connection, "slot_position", in_source=True)

    def _position(self) -> int:
        """The position, 0 if there is none yet; GdqError if the server has not written so far."""
        query = qualified("select lsn::text from gdq_target.slot_position where slot_name = %s")
        kept = scalar(self.connection, query, self.slot) if self._given is None else lsn_text(self._given)
        written = qualified("select %s::pg_catalog.pg_lsn <= pg_catalog.pg_current_wal_lsn()")
        if kept and not scalar(self.connection, written, kept):
            raise GdqError(
                f"slot {self.slot} was read to {kept}, which this server has not written yet: diverged",
                hint="The server lost the end of its log, or is another. Create the slot again and load the tables.",
            )
        return lsn_number(kept) if kept else 0
