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
from gdq.ticker import Housekeeping, tick_steps

# Seconds between two looks for due retries of a paused consumer.
_PAUSED_SECONDS = 0.5

# A session that ends each batch with the message that opens the next one is always in a transaction: it hears of no
# tick, does no maintenance, and keeps the server from forgetting notifications. So it rests after this time.
_UNINTERRUPTED_SECONDS = 0.5


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
        self._rested_at = 0.0
        self._looked = False

    def begin(self) -> Steps[None]:
        """What comes before the first look."""
        # once per connection, since a crash ends the connection; the first next_batch() that notices it gives no batch
        yield Statement("select gdq.check_logs(%s)", [self._queue], alone=True)
        if self._once:
            self._last_tick = yield from tick_steps(self._queue)
        else:
            yield from self._listener.listen([self._queue])
        self._waiting_since = self._rested_at = time.monotonic()
        self._listener.notified = False

    def follows(self, batch: BatchState, *, asks: bool) -> bool:
        """Whether to ask for the next batch in the message that finishes this one, with the tick of due_tick().

        `asks`: whether the caller would. If the answer is True, the next goes_on() counts this as a look.
        """
        self._looked = (
            asks
            and not self._is_last(batch)
            and time.monotonic() - self._rested_at < _UNINTERRUPTED_SECONDS
            and (not self._has_heard_all(batch) or self.due_tick() is not None)
            and not self.stopped()
        )
        return self._looked

    def due_tick(self) -> Housekeeping | None:
        """What takes the queue's tick, if this session takes it and it may be due now."""
        return self._listener.due_tick()

    def goes_on(self, batch: BatchState | None) -> Steps[bool]:
        """Wait after a look that gave this batch, now finished, or none; False if the loop is over."""
        self._rested_at = time.monotonic()
        # the message that finished the batch has found no other one
        looked, self._looked = self._looked, False
        if batch is not None:
            self._waiting_since = self._rested_at
        if self._last_tick is not None and (batch is None or looked or self._is_last(batch)):
            return False
        if batch is None or looked or self._has_heard_all(batch):
            if batch is not None and self._has_heard_all(batch):
                self._listener.notified = False  # there was no later tick
            if not (yield from self._wait((yield from self._look_after(batch)))):
                return False
        self._listener.notified = False
        return True

    def _is_last(self, batch: BatchState) -> bool:
        return self._last_tick is not None and batch.tick_to >= self._last_tick

    def _has_heard_all(self, batch: BatchState) -> bool:
        """True if the last tick that was heard of is in this batch."""
        return 0 < self._listener.last_tick <= batch.tick_to

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
