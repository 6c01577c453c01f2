"""Watches views' slots for changes of their tables, to wake `gdq refresh --follow --source slot`.

A watch closes its stream before a refresh, which opens the slot itself and gets the same changes again. Only the
refresh confirms changes to the slot, never the watch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.slot.assembly import Assembly
from gdq.consumers.slot.pgoutput import RowMessage, TruncateMessage
from gdq.consumers.slot.replication import ReplicationData, open_replication
from gdq.consumers.slot.slot import slot_name
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.consumers.slot.transaction import SlotTransaction
from gdq.consumers.slot.views.change_source import SlotViewState, slot_view_state
from gdq.consumers.slot.views.tables import published_tables
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.view.view import ViewInfo

if TYPE_CHECKING:
    from gdq.consumers.slot.replication import Replication

# At most this long is read in one go: then the caller may stop.
_READ_SECONDS = 0.5


class SlotWatch:
    """Watch on one view's slot. `control` and `dsn` as for SlotChangeSource."""

    def __init__(self, control: Connection[Any], dsn: str, view: ViewInfo) -> None:
        self._control = control
        self._dsn = dsn
        self._view = view
        self._slot = slot_name(view.queue_name, view.view_name)
        self._stream: Replication | None = None
        self._assembly = Assembly(self._slot)
        self._applied: PgSnapshot | None = None
        self._oids: frozenset[int] = frozenset()
        self._woken = False

    def changed(self) -> bool:
        """True if a refresh has changes to apply or an error to report; else the slot's stream is opened.

        GdqError for tables whose changes a slot does not send, psycopg.Error if the slot cannot be read.
        """
        if self._woken:
            return True
        state = slot_view_state(self._control, self._view)
        if state is None:
            return True
        if state.lost:
            # a refresh that found the slot lost has deleted the stored position
            return state.stored is not None
        if not state.known or self._is_altered(state):
            return True
        if state.mark is None:
            return False
        self._applied = state.snapshot
        if self._stream is None:
            # no waiting: the other followed views would wait too
            queue = self._view.queue_name
            self._stream = open_replication(self._control, self._dsn, self._slot, queue, messages=False, wait_seconds=0)
        return self.arrived()

    def arrived(self) -> bool:
        """Read the messages that have arrived; True if one changes the view's tables, or the stream is over."""
        until = time.monotonic() + _READ_SECONDS
        try:
            while self._stream is not None and time.monotonic() < until:
                message = self._stream.receive(0)
                if message is None:
                    break
                one = self._assembly.take(message) if isinstance(message, ReplicationData) else None
                if one is not None and self._counts(one):
                    self._woken = True
                    self._listen_no_more()
        except (GdqError, psycopg.Error):
            # the refresh will meet and report the same error
            self._woken = True
            self._listen_no_more()
        return self._woken

    @property
    def socket(self) -> int | None:
        """The stream's socket, readable when the server has sent something; None while no stream is open."""
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

    def _is_altered(self, state: SlotViewState) -> bool:
        """True if the tables changed in a way that rows do not show, and a full load can now catch up with it."""
        now = PgSnapshot.parse(scalar(self._control, qualified("select pg_catalog.pg_current_snapshot()::text")))
        tables = published_tables(self._control, self._view.queue_name, self._view.tables, now)
        self._oids = frozenset(tables.tables)
        if state.mark is None:
            return not any(xid < tables.published for xid in now.running)
        return state.mark != tables.mark

    def _counts(self, one: SlotTransaction) -> bool:
        """True if a transaction has changed a table of the view and is not in the target yet."""
        try:
            if self._applied is not None and self._applied.sees(self._applied.full(one.xid)):
                return False
            return any(
                (isinstance(message, RowMessage) and message.oid in self._oids)
                or (isinstance(message, TruncateMessage) and not self._oids.isdisjoint(message.oids))
                for _, message in one.messages()
            )
        finally:
            one.close()


class SlotWatches:
    """Watches on the slots of all followed views."""

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
        """True if SlotWatch.arrived() is true for one of the views."""
        # sum() reads all streams, not only up to the first with changes: an unread one would fill the server's buffers
        return sum(watch.arrived() for watch in self._watches.values()) > 0

    def sockets(self) -> list[int]:
        """The sockets of the open streams."""
        return [socket for watch in self._watches.values() if (socket := watch.socket) is not None]

    def release(self, names: Iterable[str]) -> None:
        """Close the streams of these views, so that a refresh can read the slots."""
        for name in names:
            if name in self._watches:
                self._watches.pop(name).close()

    def keep(self, names: Collection[str]) -> None:
        """Stop watching all other views."""
        self.release([name for name in self._watches if name not in names])

    def close(self) -> None:
        """Stop watching."""
        self.keep(())
