"""Where a refresh takes the changes from: the queue's log, or a relation that holds what a logical slot sent."""

from __future__ import annotations

from typing import Any, Protocol

from psycopg import Connection

from gdq.consumers.views.leader import Leader
from gdq.consumers.views.log_sql import changes_of
from gdq.errors import TruncatedPosition, mapped
from gdq.view.target import NeedsFull
from gdq.view.view import ViewInfo


class ChangeSource(Protocol):
    """The changes between two snapshots of the tables of one view, in the order in which a refresh asks for them."""

    def begin(self) -> None:
        """Before the leader's snapshot. GdqError for a view whose changes cannot come from here."""

    def why_full(self, leader: Leader) -> str | None:
        """Why the changes since the stored position are not all here; None when they are."""

    def changed(self, leader: Leader, s0: str | None) -> dict[str, str]:
        """The tables that changed since s0 (None: no matter, all is loaded), and the SELECTs of their log rows.

        NeedsFull when these do not show every change.
        """

    def write(self, connection: Connection[Any]) -> None:
        """Make what the SELECTs read, in the transaction that is to read it."""

    def move(self, connection: Connection[Any]) -> None:
        """Store what belongs to the position: in the transaction that moves it, or after that of a target elsewhere."""

    def applied(self) -> None:
        """The position is committed, and what belongs to it."""

    def close(self) -> None:
        """The refresh is over, or begins again with begin()."""


class QueueChanges:
    """The queue's log: its rows are read where they are, and the position is all that it needs."""

    def __init__(self, view: ViewInfo) -> None:
        self._view = view

    def begin(self) -> None:
        """Nothing."""

    def why_full(self, _leader: Leader) -> str | None:
        """Nothing: check_position() tells."""
        return None

    def changed(self, leader: Leader, s0: str | None) -> dict[str, str]:
        """What the log holds; NeedsFull when no log row shows a change."""
        if s0 is None:
            return {}
        try:
            with mapped():
                return changes_of(leader.connection, self._view.queue_name, self._view.tables, s0, leader.snapshot)
        except TruncatedPosition as error:
            raise NeedsFull("the changes since the target's position are gone") from error

    def write(self, connection: Connection[Any]) -> None:
        """Nothing."""

    def move(self, connection: Connection[Any]) -> None:
        """Nothing."""

    def applied(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
