"""Events that a consumer cannot handle: retries, dead letters, and handlers that take one event at a time."""

# ruff: noqa: N818 (Retry and DeadLetter are outcomes of an event, not errors)

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Protocol

from psycopg import Connection

from gdq.call import call, rows
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.shown import Shown
from gdq.source import Event
from gdq.steps import Statement, execute

RETRY_DELAY = timedelta(minutes=1)


class RetryOutcome(Exception):
    """The outcome of an event that was not handled: a Retry or a DeadLetter.

    A handler of single events raises it; a handler of batches returns such outcomes, each with its event.
    """

    dead: ClassVar[bool] = False
    delay = timedelta(0)
    counted = True

    def __init__(self, reason: str | None = None, *, event: Event | None = None) -> None:
        super().__init__(reason or type(self).__name__)
        self.reason = reason
        self.event = event


class Retry(RetryOutcome):
    """The event comes again, in the first batch that is opened after `delay`.

    `counted`: False for an event that was not tried, since an earlier one has to come before it: it does not come
    nearer to the limit of retries.
    """

    def __init__(
        self,
        reason: str | None = None,
        *,
        delay: timedelta = RETRY_DELAY,
        event: Event | None = None,
        counted: bool = True,
    ) -> None:
        super().__init__(reason, event=event)
        self.delay = delay
        self.counted = counted


class DeadLetter(RetryOutcome):
    """The event is given up, and kept among the dead letters."""

    dead = True


class _Parking(Protocol):
    """A batch that can put events aside: gdq.Batch."""

    @property
    def connection(self) -> Connection[Any]:
        """The connection of the batch's transaction."""

    def put_aside(self, outcomes: Sequence[RetryOutcome]) -> int:
        """Put events aside, each as its outcome says."""


EventHandler = Callable[[Connection[Any], Event], object]


def settle_outcomes(batch: _Parking, outcomes: Iterable[object]) -> None:
    """Put aside the outcomes that a batch handler returned; GdqError for anything but an outcome with its event."""
    aside: list[RetryOutcome] = []
    for outcome in outcomes:
        if not isinstance(outcome, RetryOutcome) or outcome.event is None:
            raise GdqError(
                f"a handler returned {outcome!r}", hint="Return nothing, or Retry and DeadLetter with event=."
            )
        aside.append(outcome)
    batch.put_aside(aside)


def handle_each_event(
    batch: _Parking, events: Iterator[Event], handler: EventHandler, *, on_error: timedelta | None = None
) -> None:
    """Hand events to `handler` one by one, each in a savepoint, so that each can be undone alone.

    If it raises Retry or DeadLetter, the event is put aside and the next one follows. Other errors fail the batch, or
    with `on_error` put the event aside for that time. gdq's own errors and a lost connection always fail the batch.
    """
    aside: list[RetryOutcome] = []
    for event in events:
        try:
            with batch.connection.transaction():
                handler(batch.connection, event)
        except RetryOutcome as outcome:
            outcome.event = event
            aside.append(outcome.with_traceback(None))
        except Exception as error:
            if on_error is None or isinstance(error, GdqError) or batch.connection.broken:
                raise
            reason = f"{type(error).__name__}: {error}".replace("\0", "")  # PostgreSQL's text cannot hold \0
            aside.append(Retry(reason, delay=on_error, event=event))
    batch.put_aside(aside)


@dataclass(frozen=True, slots=True, repr=False)
class RetryInfo(Shown):
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


@dataclass(frozen=True, slots=True, repr=False)
class DeadLetterInfo(Shown):
    """An event that a consumer gave up, with its values in the batch."""

    _shown = "dead_letter_id queue_name consumer_name ev_id op tbl key retries reason died_at"

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
    """The seconds until the next retry of a consumer is due; None if no event waits."""
    seconds: float | None = execute(connection, next_retry_statement(queue, consumer))
    return seconds


def next_retry_statement(queue: str, consumer: str) -> Statement:
    """The statement of next_retry()."""
    query = qualified("select extract(epoch from gdq.next_retry(%s, %s) - clock_timestamp())::float8")
    return Statement(query, [queue, consumer])


def set_retry_limit(connection: Connection[Any], queue: str, consumer: str, retries: int) -> None:
    """Set the number of retries after which an event becomes a dead letter (default 10)."""
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
    """Give dead letters to their consumer again, in its next batch; returns their number.

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
    """Delete dead letters; returns their number.

    `ids`: the dead letters, None for all. `older_than`: only those that died at least this long ago.
    """
    return int(call(connection, "purge_dead_letters", queue, consumer, _listed(ids), older_than))


def _listed(ids: Sequence[int] | None) -> list[int] | None:
    return None if ids is None else list(ids)
