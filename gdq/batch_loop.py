"""The loop of a consumer without I/O: how it starts, when it looks for the next batch, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import psycopg
from psycopg.pq import TransactionStatus

from gdq.batch_state import BatchState
from gdq.conninfo import pooled_steps, take_utf8
from gdq.errors import GdqError
from gdq.listener import Listener
from gdq.member import named
from gdq.retry import next_retry_statement
from gdq.steps import AnyConnection, Statement, Steps
from gdq.ticker import tick_steps

# Seconds between two looks for due retries of a paused consumer.
_PAUSED_SECONDS = 0.5


class ConsumerState:
    """What Consumer and AsyncConsumer share: the names, and how they look for batches."""

    def __init__(self, queue: str, consumer: str, member: str | None, max_events: int, dead_after: timedelta) -> None:
        self.queue = queue
        self.consumer = consumer
        self.member = member
        self._max_events = max_events
        self._dead_after = dead_after

    def __repr__(self) -> str:
        name = named(self.queue, self.consumer, self.member)
        return f"<{type(self).__name__} {name}: {_state_of(getattr(self, 'connection', None))}>"

    @property
    def _application_name(self) -> str:
        return application_name(self.queue, self.consumer, self.member)


class BatchLoop:
    """Decides for a consumer, in steps, when it looks for a batch.

    `once`, `timeout` and `stop`: as for Consumer.batches().
    """

    def __init__(
        self,
        listener: Listener,
        queue: str,
        consumer: str,
        *,
        once: bool,
        timeout: float | None,
        stop: Callable[[], bool],
    ) -> None:
        self._listener = listener
        self._queue = queue
        self._consumer = consumer
        self._once = once
        self._timeout = timeout
        self.stopped = stop
        self._last_tick: int | None = None
        self._waiting_since = 0.0

    def begin(self) -> Steps[None]:
        """What comes before the first look."""
        # once per connection, since a crash ends the connection; the first next_batch() that notices it gives no batch
        yield Statement("select gdq.check_logs(%s)", [self._queue], alone=True)
        if self._once:
            self._last_tick = yield from tick_steps(self._queue)
        else:
            yield from self._listener.listen([self._queue])
        self._waiting_since = time.monotonic()
        self._listener.notified = False

    def goes_on(self, batch: BatchState | None) -> Steps[bool]:
        """Wait after a look that gave this batch, now finished, or none; False if the loop is over."""
        if batch is not None:
            self._waiting_since = time.monotonic()
        if self._last_tick is not None and (batch is None or batch.tick_to >= self._last_tick):
            return False
        if batch is None or 0 < self._listener.last_tick <= batch.tick_to:
            if batch is not None:
                self._listener.notified = False  # there was no later tick
            if not (yield from self._wait((yield from self._look_after(batch)))):
                return False
        self._listener.notified = False
        return True

    def _wait(self, look_after: float) -> Steps[bool]:
        """Wait until there may be a batch; False if there is none until the timeout.

        A look for a batch locks, which costs a transaction number. So the consumer looks only after a tick, when a
        retry is due, and `look_after` seconds after the wait began.
        """
        started = time.monotonic()
        until = None if self._timeout is None else self._waiting_since + self._timeout

        def may_have_batch() -> bool:
            return self._listener.notified or self.stopped() or time.monotonic() - started >= look_after

        def is_over() -> bool:
            return may_have_batch() or (until is not None and time.monotonic() >= until)

        # the next command reads the notifications: let it be the command that fetches the batch
        return (yield from self._listener.wait(is_over, pause_seconds=look_after)) or may_have_batch()

    def _look_after(self, finished: BatchState | None) -> Steps[float]:
        """Upper bound, in seconds, before the next look for a batch; `finished`: the batch of the last look."""
        look = self._listener.look_seconds
        if finished is not None:
            return look if finished.retry_at is None else min(max(finished.retry_at - time.monotonic(), 0), look)
        due = yield next_retry_statement(self._queue, self._consumer)
        if due is None:
            return look
        # a paused consumer gets no due retries, so without a pause it would look all the time
        return min(due if due > 0 else _PAUSED_SECONDS, look)


def refuse_transaction(connection: AnyConnection) -> None:
    """GdqError if a connection is in a transaction."""
    if connection.info.transaction_status != TransactionStatus.IDLE:
        raise GdqError("a consumer needs a connection that is not in a transaction")


def listener_on(connection: AnyConnection) -> Steps[Listener]:
    """Make a consumer's connection, in autocommit, ready; the result is its listener. GdqError on a standby."""
    if connection.info.parameter_status("in_hot_standby") == "on":
        # the server would first refuse to read an unlogged table
        raise GdqError("a consumer needs the primary server, this is a standby", hint="Connect to the primary.")
    yield from take_utf8(connection)
    listener = Listener(connection, pooled=(yield from pooled_steps(connection)))
    if listener.pooled:
        connection.prepare_threshold = None
    return listener


def application_name(queue: str, consumer: str, member: str | None = None) -> str:
    """The name of a consumer's connection in pg_stat_activity."""
    return f"gdq:{queue}/{consumer}" if member is None else f"gdq:{queue}/{consumer}/{member}"


def _state_of(connection: psycopg.BaseConnection[object] | None) -> str:
    if connection is None:
        return "not open"
    if connection.closed:
        return "closed"
    return "idle" if connection.info.transaction_status == TransactionStatus.IDLE else "in a batch"
