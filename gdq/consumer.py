"""Consumers of a queue: registering and moving them, and the loop that reads their batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from types import TracebackType
from typing import Any, Protocol, Self

import psycopg
from psycopg import Connection
from psycopg.pq import TransactionStatus

from gdq.batch import Batch
from gdq.call import call, rows
from gdq.conninfo import connect, take_utf8
from gdq.errors import GdqError, mapped
from gdq.listener import Listener
from gdq.member import DEAD_AFTER, member_info
from gdq.retry import Outcome, next_retry
from gdq.source import MAX_EVENTS, Event
from gdq.table_copy import TableCopy, resync, resynced
from gdq.ticker import take_tick
from gdq.typed.arrow import Reader

# How often a paused consumer asks for retries that are due.
_PAUSED_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """One consumer of a queue: how far it is behind, what it takes and whose it is.

    `lag`: how old the oldest change that it has not finished is at most. `unread_bytes`: of the logs that it takes.
    `batch_age`: since its oldest open batch was opened. `resync`: the tables that it must copy anew, now or once it
    comes to the event that says so; `reason`: why. `tables` None: it takes all. A value is None while the consumer or
    its queue is just going.
    """

    queue_name: str
    consumer_name: str
    lag: timedelta | None
    unread_events: int | None
    unread_bytes: int
    last_seen: datetime | None
    batch_age: timedelta | None
    last_tick: int | None
    retries: int
    dead_letters: int
    resync: list[str] | None
    reason: str | None
    tables: list[str] | None
    skip_origin: list[str] | None
    owner_role: str
    paused: bool

    @property
    def tables_resync(self) -> int:
        """How many tables the consumer must copy anew."""
        return sum(table != "messages" for table in self.resync or [])


class Handler(Protocol):
    """A function that `gdq consume` runs for every batch, in the transaction of the batch. It must not commit."""

    def __call__(self, connection: Connection[Any], events: Iterator[Event], /) -> Iterable[Outcome] | None:
        """Apply the events; an exception rolls the transaction back and the batch comes again.

        The result lists the events that were not applied: gdq.Retry and gdq.DeadLetter with event=.
        """


def register_consumer(
    connection: Connection[Any],
    queue: str,
    consumer: str,
    *,
    at_tick: int | None = None,
    tables: Sequence[str] | None = None,
    skip_origin: Sequence[str] | None = None,
) -> bool:
    """Register a consumer that gets every change after a tick (None: now); False when it was registered already.

    `tables`: the captured tables that it takes, None for all, also those added later. `skip_origin`: origins whose
    changes it does not get. TruncatedPosition when changes after the tick may be gone; WrongIsolation when the
    transaction has written.
    """
    names = None if tables is None else list(tables)
    skipped = None if skip_origin is None else list(skip_origin)
    registered = call(
        connection, "register_consumer", queue, consumer, at_tick=at_tick, tables=names, skip_origin=skipped
    )
    return bool(registered)


def unregister_consumer(connection: Connection[Any], queue: str, consumer: str) -> bool:
    """Forget a consumer and its position; False when there was none."""
    return bool(call(connection, "unregister_consumer", queue, consumer))


def seek(
    connection: Connection[Any],
    queue: str,
    consumer: str,
    *,
    tick: int | None = None,
    time: datetime | str | None = None,
    now: bool = False,
) -> int:
    """Move a consumer to a tick, to the last one at or before a time, or to one taken now; its number.

    TruncatedPosition when changes after it are gone. psycopg.errors.LockNotAvailable while a worker holds the
    consumer: nothing is changed, try again.
    """
    return int(call(connection, "seek", queue, consumer, at_tick=tick, at_time=time, to_now=now))


def set_tables(connection: Connection[Any], queue: str, consumer: str, tables: Sequence[str] | None) -> bool:
    """Change which tables a consumer takes from now on (None: all); False when it takes these already."""
    return bool(call(connection, "set_tables", queue, consumer, None if tables is None else list(tables)))


def consumer_info(connection: Connection[Any], queue: str | None = None) -> list[ConsumerInfo]:
    """The consumers of all queues, or of one."""
    return rows(connection, ConsumerInfo, "select * from gdq.consumer_info(%s)", queue, binary=True)


def peek(connection: Connection[Any], queue: str, consumer: str | None = None, *, limit: int) -> list[Event]:
    """The next events of a consumer, at most `limit`, without consuming them; None: the one furthest behind.

    Takes a tick first. Needs an idle autocommit connection. psycopg.errors.LockNotAvailable while a worker holds the
    consumer; GdqError when the queue has none.
    """
    take_tick(connection, queue)
    if consumer is None:
        consumers = consumer_info(connection, queue)
        if not consumers:
            raise GdqError(f'queue "{queue}" has no consumer to look for', hint="Register one first.")
        consumer = max(consumers, key=lambda info: info.unread_events or 0).consumer_name
    # What opens the batch is undone, so a worker's own token stays good.
    with connection.transaction(force_rollback=True):
        connection.execute("set local lock_timeout = '2s'")
        members = member_info(connection, queue, consumer)
        member = members[0].member_name if members else None
        batch = Batch.open(connection, queue, consumer, limit, member=member)
        return list(islice(batch.events(), limit)) if batch else []


class Consumer:
    """Reads the batches of one registered consumer; a BatchSource.

        with Consumer(dsn, "orders", "mirror") as consumer:
            for batch in consumer.batches():
                for event in batch.events():
                    ...

    `source`: a connection string, or a connection. A connection must be idle; it is switched to autocommit, so that
    every batch is a READ COMMITTED transaction of its own, and stays open at the end. While a Consumer waits it does a
    ticker's work too. Behind a pooler no notification arrives, and the Consumer looks every half second instead.
    `max_events`: ticks are joined into one batch of at most this many events; a single tick is never divided.
    `member`: the name of this member, where several members of the consumer work on batches side by side. A batch that
    a member has held for `dead_after` is taken over by another member, so choose a time that no batch takes.
    """

    def __init__(
        self,
        source: Connection[Any] | str | None,
        queue: str,
        consumer: str,
        *,
        max_events: int = MAX_EVENTS,
        member: str | None = None,
        dead_after: timedelta = DEAD_AFTER,
    ) -> None:
        self.queue = queue
        self.consumer = consumer
        self.member = member
        self._max_events = max_events
        self._dead_after = dead_after
        self._owned = not isinstance(source, Connection)
        if isinstance(source, Connection):
            self.connection = source
        else:
            self.connection = connect(source, application_name=application_name(queue, consumer, member))
        if self.connection.info.transaction_status != TransactionStatus.IDLE:
            raise GdqError("a consumer needs a connection that is not in a transaction")
        try:
            self.connection.autocommit = True
            self.connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            take_utf8(self.connection)
            self._listener = Listener(self.connection)
        except BaseException:
            if self._owned:
                self.connection.close()
            raise
        if self._listener.pooled:
            self.connection.prepare_threshold = None
        self._streaming = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._owned:
            self.connection.close()
        else:
            self._listener.close()

    def batches(
        self,
        *,
        once: bool = False,
        timeout: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Batch]:
        """The batches from the consumer's position on, each in a transaction of its own.

        Asking for the next batch finishes the one before and commits (batch.commit() does it earlier); an exception or
        a `break` rolls back, and the batch comes again. `once`: force a tick and end with the batch that holds it.
        `timeout`: end when there was no batch for that many seconds. `stop` is asked between batches and while waiting.
        """
        with closing(Reader(self.connection)) as reader:
            yield from self._batches(reader, once, timeout, stop)

    def _batches(self, reader: Reader, once: bool, timeout: float | None, stop: Callable[[], bool]) -> Iterator[Batch]:
        self._check_logs()
        last_tick = take_tick(self.connection, self.queue) if once else None
        listener = self._listener
        if not once:
            listener.listen([self.queue])
        waiting_since = time.monotonic()
        while not stop():
            listener.notified = False
            with ExitStack() as transaction:
                batch = self._open(transaction, reader)
                if batch is not None:
                    yield batch
                    batch.commit()
                    self._streaming = batch.streamed
                    waiting_since = time.monotonic()
            if last_tick is not None and (batch is None or batch.tick_to >= last_tick):
                return
            if batch is not None:
                if not 0 < listener.last_tick <= batch.tick_to:
                    continue
                listener.notified = False  # there was no later tick
            until = None if timeout is None else waiting_since + timeout
            if not self._wait(self._look_after(batch), until, stop):
                return

    def _wait(self, look_after: float, until: float | None, stop: Callable[[], bool]) -> bool:
        """Wait until there may be a batch; False when there is none by `until`.

        Looking for a batch locks, and so costs a transaction number: the consumer looks only when there is a tick or a
        retry is due, and `look_after` seconds after the wait began.
        """
        started = time.monotonic()

        def may_have_batch() -> bool:
            return self._listener.notified or stop() or time.monotonic() - started >= look_after

        def is_over() -> bool:
            return may_have_batch() or (until is not None and time.monotonic() >= until)

        # what the server has sent is read by the next command, which should be the one that fetches the batch
        return self._listener.wait(is_over, pause_seconds=look_after) or may_have_batch()

    def resync(self, table: str) -> AbstractContextManager[TableCopy]:
        """Copy a table anew after ResyncRequired, outside a batch; the block's writes commit together with the copy.

        with consumer.resync("public.orders") as copy:
            consumer.connection.execute("truncate mirror")
            for row in copy.rows():
                ...
        """
        return resync(self.connection, self.queue, self.consumer, table)

    def resynced(self, table: str, snapshot: str) -> None:
        """Note that the table was copied as of a snapshot, where resync() does not fit; outside a batch."""
        resynced(self.connection, self.queue, self.consumer, table, snapshot)

    def _open(self, transaction: ExitStack, reader: Reader) -> Batch | None:
        """The next batch, in a transaction that `transaction` ends.

        A member opens its batch in a transaction before that one: the lock on the subscription, held while the member
        works, would keep the other members out.
        """
        # whoever has read the events of the last batch will read those of the next
        begin = self._streaming and self.member is None
        with ExitStack() as opening:
            if not begin:
                (transaction if self.member is None else opening).enter_context(self.connection.transaction())
            batch = Batch.open(
                self.connection,
                self.queue,
                self.consumer,
                self._max_events,
                member=self.member,
                dead_after=self._dead_after,
                transaction=transaction,
                begin=begin,
                reader=reader,
            )
        if batch is not None and self.member is not None:
            transaction.enter_context(self.connection.transaction())
        return batch

    def _look_after(self, finished: Batch | None) -> float:
        """Upper bound, in seconds, before the next look for a batch; `finished`: the batch of the last look."""
        look = self._listener.look_seconds
        if finished is not None:
            return look if finished.retry_at is None else min(max(finished.retry_at - time.monotonic(), 0), look)
        due = next_retry(self.connection, self.queue, self.consumer)
        if due is None:
            return look
        # A paused consumer is not handed what is due, and must not ask for it without a pause.
        return min(due if due > 0 else _PAUSED_SECONDS, look)

    def _check_logs(self) -> None:
        # Once for each connection, which a crash ends; next_batch() gives no batch when it is the first to find out.
        with self.connection.transaction(), mapped():
            self.connection.execute("select gdq.check_logs(%s)", [self.queue])


def application_name(queue: str, consumer: str, member: str | None = None) -> str:
    """The name of a consumer's connection in pg_stat_activity."""
    return f"gdq:{queue}/{consumer}" if member is None else f"gdq:{queue}/{consumer}/{member}"
