"""Events that a consumer cannot handle: retries, dead letters, and handlers that take one event at a time."""

# ruff: noqa: N818 (Retry and DeadLetter say what becomes of an event; they are no errors)

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Protocol

from psycopg import Connection

from gdq.call import call, rows, scalar
from gdq.errors import GdqError
from gdq.source import Event

DELAY = timedelta(minutes=1)


class Outcome(Exception):
    """The outcome of an event that was not handled: a Retry or a DeadLetter.

    A handler of single events raises it; a handler of batches returns such outcomes, each with its event.
    """

    dead: ClassVar[bool] = False
    delay = timedelta(0)

    def __init__(self, reason: str | None = None, *, event: Event | None = None) -> None:
        super().__init__(reason or type(self).__name__)
        self.reason = reason
        self.event = event


class Retry(Outcome):
    """The event comes again, in the first batch that is opened after `delay`."""

    def __init__(self, reason: str | None = None, *, delay: timedelta = DELAY, event: Event | None = None) -> None:
        super().__init__(reason, event=event)
        self.delay = delay


class DeadLetter(Outcome):
    """The event is given up, and kept among the dead letters."""

    dead = True


class Parking(Protocol):
    """A batch that can put events aside: gdq.Batch."""

    @property
    def connection(self) -> Connection[Any]:
        """The connection of the batch's transaction."""

    def put_aside(self, outcomes: Sequence[Outcome]) -> int:
        """Put events aside, each as its outcome says."""


EventHandler = Callable[[Connection[Any], Event], object]


def settle(batch: Parking, outcomes: Iterable[object]) -> None:
    """Put aside what a batch handler returned; GdqError for anything that is not an outcome with its event."""
    aside: list[Outcome] = []
    for outcome in outcomes:
        if not isinstance(outcome, Outcome) or outcome.event is None:
            raise GdqError(
                f"a handler returned {outcome!r}", hint="Return nothing, or Retry and DeadLetter with event=."
            )
        aside.append(outcome)
    batch.put_aside(aside)


def handle_each(
    batch: Parking, events: Iterator[Event], handler: EventHandler, *, on_error: timedelta | None = None
) -> None:
    """Hand events to `handler` one by one, each in a savepoint, so that what one did can be undone alone.

    When it raises Retry or DeadLetter the event is put aside and the next one follows. Other errors fail the batch, or,
    with `on_error`, put the event aside for that long; gdq's own errors and the loss of the connection always fail it.
    """
    aside: list[Outcome] = []
    for event in events:
        try:
            with batch.connection.transaction():
                handler(batch.connection, event)
        except Outcome as outcome:
            outcome.event = event
            aside.append(outcome.with_traceback(None))
        except Exception as error:
            if on_error is None or isinstance(error, GdqError) or batch.connection.broken:
                raise
            reason = f"{type(error).__name__}: {error}".replace("\0", "")  # which no text of the server's holds
            aside.append(Retry(reason, delay=on_error, event=event))
    batch.put_aside(aside)


@dataclass(frozen=True, slots=True)
class RetryInfo:
    """An event that waits to come again. `batch_id`: the open batch that has it."""

    queue_name: str
    consumer_name: str
    ev_id: int
    op: str
    tbl: str | None
    key: dict[str, Any] | None
    retries: int
    due_at: datetime
    batch_id: int | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class DeadLetterInfo:
    """An event that a consumer gave up, as it was in its batch."""

    dead_letter_id: int
    queue_name: str
    consumer_name: str
    ev_id: int
    ev_txid: int
    ev_time: datetime
    op: str
    tbl: str | None
    key: dict[str, Any] | None
    old: dict[str, Any] | None
    new: dict[str, Any] | None
    origin: str | None
    retries: int
    reason: str | None
    died_at: datetime


def retry_info(connection: Connection[Any], queue: str | None = None, consumer: str | None = None) -> list[RetryInfo]:
    """The events that wait to come again, of all queues, one queue or one consumer."""
    return rows(connection, RetryInfo, "select * from gdq.retry_info(%s, %s)", queue, consumer)


def next_retry(connection: Connection[Any], queue: str, consumer: str) -> float | None:
    """The seconds until the next retry of a consumer is due; None when no event waits."""
    query = "select extract(epoch from gdq.next_retry(%s, %s) - clock_timestamp())::float8"
    seconds: float | None = scalar(connection, query, queue, consumer)
    return seconds


def set_retry_limit(connection: Connection[Any], queue: str, consumer: str, retries: int) -> None:
    """Set how often an event of a consumer is retried before it becomes a dead letter (10 unless set)."""
    call(connection, "set_retry_limit", queue, consumer, retries)


def dead_letters(connection: Connection[Any], queue: str, consumer: str | None = None) -> list[DeadLetterInfo]:
    """The events that the consumers of a queue, or one consumer, gave up, oldest first."""
    return rows(connection, DeadLetterInfo, "select * from gdq.dead_letters(%s, %s)", queue, consumer)


def replay_dead_letters(
    connection: Connection[Any],
    queue: str,
    consumer: str,
    ids: Sequence[int] | None = None,
    *,
    older_than: timedelta | str | None = None,
) -> int:
    """Hand dead letters to their consumer again, in its next batch; how many.

    `ids`: the dead letters, None for all. `older_than`: only those that died at least this long ago.
    """
    return int(call(connection, "replay_dead_letters", queue, consumer, _listed(ids), older_than))


def purge_dead_letters(
    connection: Connection[Any],
    queue: str,
    consumer: str,
    ids: Sequence[int] | None = None,
    *,
    older_than: timedelta | str | None = None,
) -> int:
    """Delete dead letters; how many.

    `ids`: the dead letters, None for all. `older_than`: only those that died at least this long ago.
    """
    return int(call(connection, "purge_dead_letters", queue, consumer, _listed(ids), older_than))


def _listed(ids: Sequence[int] | None) -> list[int] | None:
    return None if ids is None else list(ids)
