"""Listener: waits for the ticks of queues on one connection, and takes ticks if no ticker runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from gdq.queue import queue_statement
from gdq.steps import AnyConnection, Statement, Steps, Wait
from gdq.ticker import TICKER_SECONDS, Housekeeping

_PAUSE_SECONDS_MAX = 0.5

# A tick's notification ends a wait at once. These times are for a lost one, and for a pooler, which passes none on.
_LOOK_SECONDS = 5.0
_POOLED_LOOK_SECONDS = 0.5


@dataclass(slots=True)
class _Queue:
    name: str
    housekeeping: Housekeeping
    patience: float  # seconds without a notification after which it is taken that no ticker runs
    heard_at: float = float("-inf")  # when another session notified of a tick


class Listener:
    """Waits for the ticks of queues, and does a ticker's work meanwhile.

    Works on one idle autocommit connection. The caller should look every `look_seconds` without a notification, as
    behind a pooler. `notified`: a tick came since the caller last set it to False. `last_tick`: the highest notified
    tick. `pooled`: the result of is_pooled(). `lag`: seconds between ticks of this session in place of ticker_max_lag,
    set before listen().
    """

    def __init__(self, connection: AnyConnection, *, pooled: bool) -> None:
        self._connection = connection
        self._queues: dict[str, _Queue] = {}
        self.pooled = pooled
        self.look_seconds = _POOLED_LOOK_SECONDS if self.pooled else _LOOK_SECONDS
        self.notified = False
        self.last_tick = 0
        self.lag: float | None = None
        connection.add_notify_handler(self._notice)

    def close(self) -> None:
        """Stop handling the connection's notifications."""
        self._connection.remove_notify_handler(self._notice)

    def listen(self, names: Collection[str]) -> Steps[None]:
        """Listen to these queues and take their ticks, and no longer those of others."""
        self._queues = {channel: queue for channel, queue in self._queues.items() if queue.name in names}
        if len(self._queues) == len(names):
            return
        for queue in (yield queue_statement()):
            channel = f"gdq_{queue.queue_id}"
            if queue.queue_name in names and channel not in self._queues:
                housekeeping = Housekeeping(queue.queue_name, _PAUSE_SECONDS_MAX, lag=self.lag)
                patience = TICKER_SECONDS + queue.tick_lag.total_seconds()
                self._queues[channel] = _Queue(queue.queue_name, housekeeping, patience)
                if not self.pooled:
                    yield Statement(sql.SQL("listen {}").format(sql.Identifier(channel)), result=False)

    def wait(
        self,
        is_over: Callable[[], bool],
        *,
        pause_seconds: float = float("inf"),
        sockets: Callable[[], Sequence[int]] = tuple,
    ) -> Steps[bool]:
        """Wait until `is_over()`, or until the server has sent something; True for the latter.

        The caller's next command reads the server's message; then `notified` may be True. `is_over` is called at least
        every half second, or `pause_seconds`, and whenever one of `sockets()` becomes readable.
        """
        while not is_over():
            # a ticker's notifications that came while the caller was busy are not read yet
            if self._until_due() == 0 and (yield Wait(0)):
                return True
            if (yield from self._take_ticks()):
                self.notified = True  # the notification may not be read yet, and a pooler passes none on
            elif is_over():  # a notification came with the answer
                break
            elif (yield Wait(min(self._until_due(), _PAUSE_SECONDS_MAX, pause_seconds), sockets())):
                return True
        return False

    def due_tick(self) -> Housekeeping | None:
        """What takes the tick of the only queue, if this session takes it and it may be due now."""
        if len(self._queues) != 1:
            return None
        return next((queue.housekeeping for queue in self._own_queues() if queue.housekeeping.pause == 0), None)

    def _until_due(self) -> float:
        """Seconds until this session looks for changes again, or takes a tick."""
        return min((queue.housekeeping.pause for queue in self._own_queues()), default=_PAUSE_SECONDS_MAX)

    def _take_ticks(self) -> Steps[int]:
        """Take the due ticks of queues whose ticker has not notified lately; returns their number."""
        made = 0
        for queue in self._own_queues():
            if queue.housekeeping.pause == 0:
                made += yield from queue.housekeeping.steps(self._connection)
        return made

    def _own_queues(self) -> list[_Queue]:
        """The queues for which no other session has notified of a tick lately."""
        return [queue for queue in self._queues.values() if time.monotonic() - queue.heard_at >= queue.patience]

    def _notice(self, notify: psycopg.Notify) -> None:
        # psycopg may call this during any command
        self.notified = True
        queue = self._queues.get(notify.channel)
        if queue is not None:
            self.last_tick = max(self.last_tick, int(notify.payload))
            if notify.pid != self._connection.info.backend_pid:
                queue.heard_at = time.monotonic()
