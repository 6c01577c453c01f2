"""The ticker: ticks and maintenance of all queues of a database. Several tickers may run side by side."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from gdq.call import call
from gdq.errors import ConnectionLost
from gdq.steps import AnyConnection, Statement, Steps, run

log = logging.getLogger(__name__)

_STEP = "select made, due, longest, seen, snapshot, guarded from gdq.tick_step(%s, %s, %s, %s, %s)"

# The most between two looks for changes, whatever ticker_max_lag is.
TICK_INTERVAL_SECONDS = 1.0

# A ticker counts as running if its last notification is younger than this.
TICKER_SECONDS = 1.0

# Maintenance checks all logs, so it runs less often than ticks; while nothing happens, after this share of the time
# since the event numbers moved.
_MAINTENANCE_SECONDS, _MAINTENANCE_IDLE_SECONDS, _MAINTENANCE_SHARE = 1.0, 10.0, 0.25

# After this long without a pause maintenance goes on in the next step: ticks wait meanwhile.
_MAINTENANCE_SECONDS_MAX = 1.0

_BACK_OFF_SECONDS_MAX = 10.0

# Commands that run for ever go on after these: a timeout that a connection string names or a pooler's sessions have, an
# administrator who cancels a statement.
TRANSIENT_ERRORS = (psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)

# While nothing happens, the event numbers are looked at after this share of the time since they moved, and a least
# pause. A step asks for everything at least so often.
_LOOK_SHARE = 0.05
_LOOK_SECONDS_MIN = 0.001
_ALL_SECONDS = 1.0

# The estimated cost of a tick: weight of the last tick in the average, and upper bound.
_AHEAD_SHARE = 0.2
_AHEAD_SECONDS_MAX = 0.05
_LATE_SECONDS_MAX = 0.002  # a longer delay is not due to a sleep that ended late


def force_tick(connection: psycopg.Connection[Any], queue: str) -> int:
    """Take a tick now, due or not; returns its number. WrongIsolation if the transaction has written already.

    Without event triggers the server refuses a tick after DDL that check_tables() has not seen; take_tick() calls both.
    """
    return int(call(connection, "force_tick", queue))


def take_tick(connection: psycopg.Connection[Any], queue: str) -> int:
    """Take a tick now, due or not; returns its number. Needs an idle connection.

    First checks for DDL that no event trigger saw, in a separate transaction; else the server may refuse the tick.
    """
    return run(connection, tick_steps(queue))


def tick_steps(queue: str) -> Steps[int]:
    """The steps of take_tick()."""
    yield Statement("select gdq.check_tables(%s)", [queue], alone=True)
    return int((yield Statement("select gdq.force_tick(%s)", [queue], alone=True)))


def tick_all(connection: psycopg.Connection[Any], queue: str | None = None) -> int:
    """Take all due ticks, each in its own transaction; returns their number. Needs an idle connection."""
    return run(connection, _tick_all(connection, queue))


def _tick_all(connection: AnyConnection, queue: str | None) -> Steps[int]:
    made = 0
    single = yield from _may_be_single(connection)
    while more := (yield Statement("select gdq.ticker(%s)", [queue], alone=not single)):
        made += more
    return made


def _may_be_single(connection: AnyConnection) -> Steps[bool]:
    """True if a single statement is a READ COMMITTED transaction: that saves two of three round trips."""
    if not connection.autocommit:
        return False
    return bool((yield Statement("show default_transaction_isolation")) == "read committed")


def maintain(connection: psycopg.Connection[Any]) -> bool:
    """Rotate and truncate logs, in a separate transaction; True if more is due: call again."""
    return bool(call(connection, "maintain"))


def maintain_all(connection: psycopg.Connection[Any], *, stop: Callable[[], bool] = lambda: False) -> bool:
    """Rotate and truncate logs until nothing is due, each step in its own transaction. Needs an idle connection.

    `stop` is called after each step, which truncates one log segment at most. True if it returned True before the end.
    """
    return run(connection, _maintain_all(stop))


def _maintain_all(stop: Callable[[], bool]) -> Steps[bool]:
    while (yield Statement("select gdq.maintain()", alone=True)):
        if stop():
            return True
    return False


class Housekeeping:
    """The work of a ticker in small steps, for a loop with other tasks.

    While nothing happens, a step is a look at the event numbers, after a part of the time since they moved: at most
    the queue's tick_lag, and `interval_seconds`. A change after a quiet time has its tick at once. While changes come,
    ticks are tick_lag apart, and each is begun early, by the average time that ticks take. That time is measured from
    the planned moment, which the caller's sleep passes a little, to the commit. tick_lag is ticker_max_lag, or longer
    if all consumers have a longer pace. `lag`: seconds between two ticks in its place, if they are fewer, for a caller
    who waits for changes.
    """

    def __init__(
        self, queue: str | None = None, interval_seconds: float = TICK_INTERVAL_SECONDS, *, lag: float | None = None
    ) -> None:
        self._queue = queue
        self._lag = None if lag is None else timedelta(seconds=lag)
        self._interval = interval_seconds
        self._ahead = 0.0
        self._connection: AnyConnection | None = None
        self._single = False
        self._maintained_at = float("-inf")
        # what the last step that asked for everything returned, see gdq.tick_step()
        self._seen: str | None = None
        self._snapshot: str | None = None
        self._longest: float | None = None
        self._guarded = False
        # by time.monotonic(): when the numbers moved, and when the next step is due, must ask for everything, or must
        # look for transactions that committed late
        self._moved_at = self._next_at = self._all_at = self._snapshot_at = time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds until the next step."""
        return max(self._next_at - time.monotonic(), 0)

    def step(self, connection: psycopg.Connection[Any], stop: Callable[[], bool] = lambda: False) -> int:
        """Take the due ticks, and maintain the logs once a second, rarer while idle; returns the number of ticks.

        `stop` is called during the work: True ends the step early.
        """
        return run(connection, self.steps(connection, stop))

    def steps(self, connection: AnyConnection, stop: Callable[[], bool] = lambda: False) -> Steps[int]:
        """The steps of step()."""
        if connection is not self._connection:
            self._connection, self._single = connection, (yield from _may_be_single(connection))
            self._seen = None
        made = 0
        begun = time.monotonic()
        while True:
            planned_at = self._next_at
            [row] = yield replace(self.statement(), alone=not self._single)
            more = self.take(row)
            if more and not made:
                late = min(max(begun - planned_at, 0), _LATE_SECONDS_MAX)
                took = min(late + time.monotonic() - begun, _AHEAD_SECONDS_MAX)
                self._ahead += (took - self._ahead) * _AHEAD_SHARE
            made += more
            if not more or self._queue is not None or self.pause > 0:
                break
            if stop():
                return made
        started = time.monotonic()
        if started - self._maintained_at >= self._maintenance_pause(started):
            more_due = yield from _maintain_all(
                lambda: stop() or time.monotonic() - started >= _MAINTENANCE_SECONDS_MAX
            )
            if not more_due:
                self._maintained_at = time.monotonic()
        return made

    def _maintenance_pause(self, now: float) -> float:
        """Seconds between two maintenances."""
        # what event triggers would have seen, maintenance sees
        pause = (now - self._moved_at) * _MAINTENANCE_SHARE if self._guarded else 0
        return min(max(pause, _MAINTENANCE_SECONDS), _MAINTENANCE_IDLE_SECONDS)

    def statement(self) -> Statement:
        """The statement of the next step, to be run in a transaction of its own; its row is for take()."""
        now = time.monotonic()
        seen, snapshot = self._seen, None
        if now >= self._snapshot_at:
            snapshot = self._snapshot
        if now >= self._all_at or (now >= self._snapshot_at and snapshot is None):
            seen = None
        return Statement(_STEP, [self._queue, timedelta(seconds=self._ahead), self._lag, seen, snapshot], row=tuple_row)

    def take(self, row: Sequence[Any]) -> int:
        """Note what a step has brought; returns the number of ticks."""
        made, due, longest, seen, snapshot, guarded = row
        now = time.monotonic()
        if made is not None:
            if made or seen != self._seen:
                self._moved_at = now
            self._guarded = guarded
            self._seen, self._snapshot, self._longest = seen, snapshot, longest
            self._all_at = now + (_ALL_SECONDS if due is None else min(due, _ALL_SECONDS))
        if made and due is not None and (due <= 0 or (self._queue is not None and longest is None)):
            # a tick of another queue is due, or none of the only queue may be before that time
            self._next_at = self._all_at = now + due
            return int(made)
        most = self._interval if self._longest is None else min(self._longest, self._interval)
        if made is not None or snapshot is not None:
            self._snapshot_at = now + most
        pause = most if self._longest is None else min((now - self._moved_at) * _LOOK_SHARE, most)
        least = 0 if made and self._queue is not None else _LOOK_SECONDS_MIN
        self._next_at = max(min(now + pause, self._all_at), now + least)
        return int(made or 0)


def run_ticker(
    connect: Callable[[], psycopg.Connection[Any]],
    *,
    interval_seconds: float = TICK_INTERVAL_SECONDS,
    stop: Callable[[float], bool],
) -> None:
    """Tick and maintain until `stop(seconds)`, which sleeps for that time, returns True; reconnects when cut off.

    Looks for changes at least every `interval_seconds`, see Housekeeping.
    """
    housekeeping = Housekeeping(interval_seconds=interval_seconds)

    def work(connection: psycopg.Connection[Any]) -> None:
        while not stop(housekeeping.pause):
            housekeeping.step(connection, lambda: stop(0))

    reconnecting(connect, work, stop)


def reconnecting(
    connect: Callable[[], psycopg.Connection[Any]],
    work: Callable[[psycopg.Connection[Any]], None],
    stop: Callable[[float], bool],
) -> None:
    """Call `work` with a connection; call it again with a new one if the connection was lost, until it returns.

    The pauses between attempts grow; the loss is logged once. The first connection is not retried, so that the caller
    gets the error of a wrong address or password. TRANSIENT_ERRORS are answered as a lost connection is.
    """
    connection = connect()
    while _lost(connection, work):
        delay = 0.0
        while True:
            delay = min(max(delay * 2, 0.1), _BACK_OFF_SECONDS_MAX)
            if stop(delay):
                return
            try:
                connection = connect()
            except psycopg.OperationalError:
                continue
            log.warning("connected again")
            break


def _lost(connection: psycopg.Connection[Any], work: Callable[[psycopg.Connection[Any]], None]) -> bool:
    """Do the work and close the connection; True if the connection was lost, or after a transient error."""
    with connection:
        connection.autocommit = True
        try:
            work(connection)
        except psycopg.Error as error:
            # a session that the server ends for its timeout fails with another class than OperationalError
            if not (connection.broken or isinstance(error, (ConnectionLost, *TRANSIENT_ERRORS))):
                raise
            what = "connection lost" if connection.broken or isinstance(error, ConnectionLost) else "trying again"
            log.warning("%s: %s", what, str(error).partition("\n")[0])
            return True
    return False
