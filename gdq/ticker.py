"""The ticker: ticks and maintenance of all queues of a database. Any number of them may run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg

from gdq import queue as queues
from gdq.errors import ConnectionLost

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.05

# A ticker whose last notification is less old than this is taken to be at work.
TICKER_SECONDS = 1.0

# Maintenance looks at every log, a tick only at what moved.
MAINTENANCE_SECONDS = 1.0

# Bounds how long ticks wait behind a pile of them.
_MAINTENANCE_CALLS_MAX = 100

_BACK_OFF_SECONDS_MAX = 10.0

# How fast the measured cost of a tick follows the last one, and what it is taken for at most.
_AHEAD_SHARE = 0.2
_AHEAD_SECONDS_MAX = 0.05
_LATE_SECONDS_MAX = 0.002  # more than that is no sleep that ended late


def take_tick(connection: psycopg.Connection[Any], queue: str) -> int:
    """Take a tick now, due or not; its id. Needs an idle connection.

    DDL that no event trigger saw is looked for first, in a transaction of its own, or the server refuses the tick.
    """
    with connection.transaction():
        queues.check_tables(connection, queue)
    with connection.transaction():
        return queues.force_tick(connection, queue)


def tick_all(connection: psycopg.Connection[Any], queue: str | None = None) -> int:
    """Take every tick that is due, each in a transaction of its own; how many. Needs an idle connection."""
    made, alone = 0, _may_stand_alone(connection)
    while more := _tick(connection, queue, INTERVAL_SECONDS, 0, alone)[0]:
        made += more
    return made


def _may_stand_alone(connection: psycopg.Connection[Any]) -> bool:
    """Whether a statement by itself is a READ COMMITTED transaction: in one round trip instead of three."""
    if not connection.autocommit:
        return False
    return connection.execute("show default_transaction_isolation").fetchone() == ("read committed",)


def _tick(
    connection: psycopg.Connection[Any], queue: str | None, longest: float, ahead: float, alone: bool
) -> tuple[int, float]:
    """Take a tick that is due, if any; how many, and the seconds until the next may be due."""
    with contextlib.nullcontext() if alone else connection.transaction():
        return queues.tick_and_pause(
            connection, queue, longest=timedelta(seconds=longest), ahead=timedelta(seconds=ahead)
        )


def maintain_all(connection: psycopg.Connection[Any], calls_max: int | None = None) -> None:
    """Rotate and empty logs until nothing is due, each step in a transaction of its own. Needs an idle connection.

    `calls_max` bounds the steps: one of them empties one log segment.
    """
    for _ in itertools.count() if calls_max is None else range(calls_max):
        with connection.transaction():
            if not queues.maintain(connection):
                return


class Housekeeping:
    """The work of a ticker in small portions, for a loop that has other things to do.

    ticker_max_lag is a promise, so each tick is begun early, by the time that ticks take. That time runs from the
    planned moment, which the caller's sleep passes by a little, to the commit.
    """

    def __init__(self, queue: str | None = None, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._queue = queue
        self._interval = interval_seconds
        self._next_at = time.monotonic() + interval_seconds
        self._ahead = 0.0
        self._connection: psycopg.Connection[Any] | None = None
        self._alone = False
        self._maintained_at = float("-inf")

    @property
    def pause(self) -> float:
        """Seconds until the next step should be taken."""
        return max(self._next_at - time.monotonic(), 0)

    def step(self, connection: psycopg.Connection[Any]) -> int:
        """Take the ticks that are due, and maintain when it was a while ago; how many ticks."""
        if connection is not self._connection:
            self._connection, self._alone = connection, _may_stand_alone(connection)
        made = 0
        begun = time.monotonic()
        while True:
            more, pause = _tick(connection, self._queue, self._interval, self._ahead, self._alone)
            if not more:
                break
            if not made:
                late = min(max(begun - self._next_at, 0), _LATE_SECONDS_MAX)
                took = min(late + time.monotonic() - begun, _AHEAD_SECONDS_MAX)
                self._ahead += (took - self._ahead) * _AHEAD_SHARE
            made += more
        self._next_at = time.monotonic() + pause
        if time.monotonic() - self._maintained_at >= MAINTENANCE_SECONDS:
            maintain_all(connection, _MAINTENANCE_CALLS_MAX)
            self._maintained_at = time.monotonic()
        return made


def run(
    connect: Callable[[], psycopg.Connection[Any]],
    *,
    interval_seconds: float = INTERVAL_SECONDS,
    stop: Callable[[float], bool],
) -> None:
    """Tick and maintain until `stop(seconds)`, which sleeps for that long, returns True. Reconnects when cut off.

    Looks every `interval_seconds`, or sooner where a tick is due before.
    """
    housekeeping = Housekeeping(interval_seconds=interval_seconds)

    def work(connection: psycopg.Connection[Any]) -> None:
        while not stop(housekeeping.pause):
            housekeeping.step(connection)

    reconnecting(connect, work, stop)


def reconnecting(
    connect: Callable[[], psycopg.Connection[Any]],
    work: Callable[[psycopg.Connection[Any]], None],
    stop: Callable[[float], bool],
) -> None:
    """Call `work` with a connection until it returns; again with a new one whenever the connection was lost.

    Waits longer from try to try and logs the loss once. The first connection is not retried: a wrong address or
    password is the caller's to hear.
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
    """Do the work; True when it ended because the connection was cut off. Closes the connection."""
    with connection:
        connection.autocommit = True
        try:
            work(connection)
        except psycopg.OperationalError as error:
            if not (connection.broken or isinstance(error, ConnectionLost)):
                raise
            log.warning("connection lost: %s", _first_line(error))
            return True
    return False


def _first_line(error: psycopg.Error) -> str:
    return str(error).partition("\n")[0]
