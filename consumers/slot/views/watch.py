"""Waits on the slots of views for changes of their tables: what wakes `gdq refresh --follow --source slot`.

A stream is open only while nothing is to be done: a refresh opens the slot itself, and what woke it is sent again.
Nothing is confirmed to the slot here, only by the refresh that has applied it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection

from gdq.consumers.slot.assembly import Assembly
from gdq.consumers.slot.pgoutput import Row, Truncate
from gdq.consumers.slot.replication import Data, open_stream
from gdq.consumers.slot.slot import slot_name
from gdq.consumers.slot.snapshot import Snapshot
from gdq.consumers.slot.transaction import Transaction
from gdq.consumers.slot.views.change_source import SlotState, slot_state
from gdq.consumers.slot.views.tables import published_tables
from gdq.errors import GdqError
from gdq.view.view import ViewInfo

if TYPE_CHECKING:
    from gdq.consumers.slot.replication import Replication

# So long others' changes are read at most before somebody is asked whether to go on.
_READ_SECONDS = 0.5


class SlotWatch:
    """The slot of one view. `control` and `dsn` as of SlotChangeSource."""

    def __init__(self, control: Connection[Any], dsn: str, view: ViewInfo) -> None:
        self._control = control
        self._dsn = dsn
        self._view = view
        self._slot = slot_name(view.queue_name, view.view_name)
        self._stream: Replication | None = None
        self._assembly = Assembly(self._slot)
        self._applied: Snapshot | None = None
        self._oids: frozenset[int] = frozenset()
        self._woken = False

    def changed(self) -> bool:
        """Whether a refresh has something to do, or to say; while it has not, the slot is listened to.

        GdqError for tables whose changes do not come from a slot, psycopg.Error when the slot cannot be read.
        """
        if self._woken:
            return True
        state = slot_state(self._control, self._view)
        if state is None:
            return True
        if state.lost:
            # the refresh that found out has forgotten the position
            return state.stored is not None
        if not state.known or self._is_altered(state):
            return True
        if state.mark is None:
            return False
        self._applied = state.snapshot
        if self._stream is None:
            # the other views that are followed do not wait for it
            queue = self._view.queue_name
            self._stream = open_stream(self._control, self._dsn, self._slot, queue, messages=False, wait_seconds=0)
        return self.arrived()

    def arrived(self) -> bool:
        """Read what the server has sent; whether changes of the view's tables are among it, or the stream is over."""
        until = time.monotonic() + _READ_SECONDS
        try:
            while self._stream is not None and time.monotonic() < until:
                message = self._stream.receive(0)
                if message is None:
                    break
                one = self._assembly.take(message) if isinstance(message, Data) else None
                if one is not None and self._counts(one):
                    self._woken = True
                    self._listen_no_more()
        except (GdqError, psycopg.Error):
            # the refresh meets the same, and says so
            self._woken = True
            self._listen_no_more()
        return self._woken

    @property
    def socket(self) -> int | None:
        """Readable when the server has sent something; None while the slot is not listened to."""
        return None if self._stream is None else self._stream.fileno()

    def close(self) -> None:
        """Leave the slot to a refresh; changed() listens again."""
        self._woken = False
        self._listen_no_more()

    def _listen_no_more(self) -> None:
        stream, self._stream = self._stream, None
        self._assembly.close()
        self._assembly = Assembly(self._slot)
        if stream is not None:
            stream.close()

    def _is_altered(self, state: SlotState) -> bool:
        """Whether rows do not show all that was done to the tables; not while a load would not change that."""
        row = self._control.execute("select pg_catalog.pg_current_snapshot()::text").fetchone()
        now = Snapshot.parse(row[0] if row else "")
        tables = published_tables(self._control, self._view.queue_name, self._view.tables, now)
        self._oids = frozenset(tables.tables)
        if state.mark is None:
            return not any(xid < tables.published for xid in now.running)
        return state.mark != tables.mark

    def _counts(self, one: Transaction) -> bool:
        """Whether a transaction has changed a table of the view, and is not in the target yet."""
        try:
            if self._applied is not None and self._applied.sees(self._applied.full(one.xid)):
                return False
            return any(
                (isinstance(message, Row) and message.oid in self._oids)
                or (isinstance(message, Truncate) and not self._oids.isdisjoint(message.oids))
                for _, message in one.messages()
            )
        finally:
            one.close()


class SlotWatches:
    """The slots of all views that are followed."""

    def __init__(self, control: Connection[Any], dsn: str) -> None:
        self._control = control
        self._dsn = dsn
        self._watches: dict[str, SlotWatch] = {}

    def changed(self, view: ViewInfo) -> bool:
        """SlotWatch.changed() of a view."""
        if view.view_name not in self._watches:
            self._watches[view.view_name] = SlotWatch(self._control, self._dsn, view)
        return self._watches[view.view_name].changed()

    def arrived(self) -> bool:
        """SlotWatch.arrived() of all that are listened to; whether one has changes."""
        # all of them are read, or those that wait behind one with changes would fill the server's buffers
        return sum(watch.arrived() for watch in self._watches.values()) > 0

    def sockets(self) -> list[int]:
        """The sockets of the slots that are read now."""
        return [socket for watch in self._watches.values() if (socket := watch.socket) is not None]

    def release(self, names: Iterable[str]) -> None:
        """Leave the slots of these views to a refresh."""
        for name in names:
            if name in self._watches:
                self._watches.pop(name).close()

    def keep(self, names: Collection[str]) -> None:
        """Forget all other views."""
        self.release([name for name in self._watches if name not in names])

    def close(self) -> None:
        """Forget all views."""
        self.keep(())
