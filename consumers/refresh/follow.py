"""Keeps views fresh: refreshes each when a tick of its queue or its slot brought changes (`gdq refresh --follow`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg

from gdq.conninfo import is_pooled
from gdq.consumers.refresh.groups import RefreshGroup, refresh_groups
from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.errors import GdqError
from gdq.listener import Listener
from gdq.steps import run
from gdq.view.view import ViewInfo, view_changed

if TYPE_CHECKING:
    from gdq.consumers.slot.views.watch import SlotWatches

# A view without changes is refreshed after this time too: its old position keeps logs from being dropped.
IDLE_SECONDS = 300.0

_RETRY_SECONDS_MAX = 60.0


@dataclass(slots=True)
class _Watched:
    """State of a followed view or group: its last refresh by this follower, and the failures since."""

    refreshed_at: float = float("-inf")
    failures: int = 0
    retry_at: float = float("-inf")


class Follower:
    """Keeps views fresh: the views in `names` and `groups`, or without both all views, also those created later.

    The follower waits on the refresher's control connection and does the ticker's work there. It checks the views when
    a queue ticks, at most every `interval` seconds. A group is refreshed as soon as one of its views has changes.
    `report` gets every result, `failed` every error; a failed refresh is retried after 1, 2, 4, ... at most 60 s.
    `slot`: read changes from the views' logical slots instead of the queues.
    """

    def __init__(
        self,
        refresher: Refresher,
        names: Sequence[str] = (),
        *,
        groups: Sequence[str] = (),
        interval: float = 1.0,
        slot: bool = False,
        report: Callable[[RefreshResult], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._refresher = refresher
        self._connection = refresher.control
        self._names = names
        self._groups = groups
        self._interval = interval
        self._report = report
        self._failed = failed
        self._listener: Listener
        self._units: dict[tuple[str, ...], _Watched] = {}
        self._woken = False
        self._slots: SlotWatches | None = None
        if slot:
            from gdq.consumers.slot.views.watch import SlotWatches  # noqa: PLC0415

            self._slots = SlotWatches(self._connection, refresher.dsn)

    def run(self, stop: Callable[[], bool]) -> None:
        """Refresh until `stop` returns true; it is called between refreshes and while waiting.

        psycopg.OperationalError if the control connection is lost, psycopg.errors.UndefinedObject if a named view or
        group does not exist at the start.
        """
        refresh_groups(self._connection, self._names, self._groups)
        self._listener = Listener(self._connection, pooled=is_pooled(self._connection))
        try:
            while not stop():
                started = time.monotonic()
                self._listener.notified = self._woken = False
                for unit in self._listed():
                    if stop():
                        return
                    self._look(unit)
                self._wait(started, stop)
        finally:
            self._listener.close()
            if self._slots is not None:
                self._slots.close()

    def _listed(self) -> list[RefreshGroup]:
        """The groups to refresh, in order. Also listens to their queues or slots."""
        listed = [unit for unit in refresh_groups(self._connection) if self._is_wanted(unit)]
        # a group with an added view counts as new: the added view is at another position than the rest
        self._units = {unit.key: self._units.get(unit.key, _Watched()) for unit in listed}
        if self._slots is not None:
            self._slots.keep({name for unit in listed for name in unit.names})
        run(self._connection, self._listener.listen({view.queue_name for unit in listed for view in unit.views}))
        return listed

    def _is_wanted(self, unit: RefreshGroup) -> bool:
        everything = not self._names and not self._groups
        return everything or unit.group_name in self._groups or any(name in self._names for name in unit.names)

    def _look(self, unit: RefreshGroup) -> None:
        """Refresh a view or a group if it has changes, failed before, or was not refreshed for long."""
        watched = self._units[unit.key]
        if time.monotonic() < watched.retry_at:
            return
        try:
            fresh = not watched.failures and time.monotonic() - watched.refreshed_at < IDLE_SECONDS
            if fresh and not any(self._changed(view) for view in unit.views):
                return
            if self._slots is not None:
                self._slots.release(unit.names)
            results = self._refresher.refresh_group(unit, slot=self._slots is not None)
        except (GdqError, psycopg.Error) as error:
            if self._connection.closed:
                raise
            watched.failures += 1
            watched.retry_at = time.monotonic() + min(2.0**watched.failures / 2, _RETRY_SECONDS_MAX)
            self._failed(str(unit), error)
        else:
            self._units[unit.key] = _Watched(time.monotonic())
            # the slot is watched again only from the next look on: look soon
            self._woken = self._slots is not None
            for result in results:
                self._report(result)

    def _changed(self, view: ViewInfo) -> bool:
        if self._slots is not None:
            return self._slots.changed(view)
        return view_changed(self._connection, view.view_name)

    def _wait(self, started: float, stop: Callable[[], bool]) -> None:
        """Wait for a tick, a change in a slot, a due retry or the next regular look."""
        look_after = max(self._interval, self._listener.look_seconds)

        def is_over() -> bool:
            if self._slots is not None and self._slots.arrived():
                self._woken = True
            waited = time.monotonic() - started
            woken = self._woken or (self._slots is None and self._listener.notified)
            return stop() or waited >= look_after or (waited >= self._interval and (woken or self._retry_due()))

        sockets = list if self._slots is None else self._slots.sockets
        while run(self._connection, self._listener.wait(is_over, sockets=sockets)):
            self._connection.execute("select")  # reads the notification

    def _retry_due(self) -> bool:
        now = time.monotonic()
        return any(watched.failures and watched.retry_at <= now for watched in self._units.values())
