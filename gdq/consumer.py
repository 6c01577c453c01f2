"""Consumers of a queue: register and move them, and read their batches in a loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from types import TracebackType
from typing import Any, Protocol, Self

import psycopg
from psycopg import Connection

from gdq.batch import Batch
from gdq.batch_loop import BatchLoop, ConsumerState, listener_on, refuse_transaction
from gdq.call import call, rows
from gdq.conninfo import Connectable, connect
from gdq.copy_batch import CopyBatch, tables_to_copy
from gdq.errors import GdqError
from gdq.event_rows import EventChoice
from gdq.member import DEAD_AFTER, member_info, stay_alive
from gdq.retry import RetryOutcome
from gdq.shown import Shown, ShownRows
from gdq.source import MAX_EVENTS, Event
from gdq.steps import execute, run
from gdq.stream import NextBatch
from gdq.table_copy import TableCopy, copy_table, resync, resynced
from gdq.ticker import take_tick
from gdq.typed.arrow import ArrowReader


@dataclass(frozen=True, slots=True, repr=False)
class ConsumerInfo(Shown):
    """One consumer of a queue: its lag, its tables and its owner.

    `lag`: upper bound for the age of its oldest unfinished change. `unread_bytes`: of the logs that it takes.
    `batch_age`: time since its oldest open batch was opened. `resync`: tables that it must copy again, now or at a
    later event; `reason`: why. `tables`: None for all. `pace`: see set_pace(); None: it needs changes at once. Values
    are None while consumer or queue are being dropped.
    """

    _shown = "queue_name consumer_name lag unread_events last_seen batch_age retries dead_letters resync paused"

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
    pace: timedelta | None

    @property
    def tables_resync(self) -> int:
        """Number of tables that the consumer must copy again."""
        return sum(table != "messages" for table in self.resync or [])


class Handler(Protocol):
    """A function that `gdq consume` runs for every batch, in the transaction of the batch. It must not commit."""

    def __call__(self, connection: Connection[Any], events: Iterator[Event], /) -> Iterable[RetryOutcome] | None:
        """Apply the events; an exception rolls the transaction back and the batch comes again.

        Returns the events that it did not apply, as gdq.Retry or gdq.DeadLetter with event=, or None.
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
    """Register a consumer that gets every change after a tick (None: now); False if it was registered already.

    `tables`: the captured tables that it takes; None for all, also later ones. `skip_origin`: origins whose changes it
    does not get. TruncatedPosition if changes after the tick may be gone; WrongIsolation if the transaction has
    written.
    """
    names = None if tables is None else list(tables)
    skipped = None if skip_origin is None else list(skip_origin)
    registered = call(
        connection, "register_consumer", queue, consumer, at_tick=at_tick, tables=names, skip_origin=skipped
    )
    return bool(registered)


def require_copy(connection: Connection[Any], queue: str, consumer: str, tables: Sequence[str] | None = None) -> int:
    """Have a consumer copy tables before it gets another batch; returns the number that it had not to copy already.

    `tables`: None for all that it takes. Until each is copied, batches() raises ResyncRequired. Called in the
    transaction that registers the consumer, it has the consumer begin with the rows that are there.
    """
    return int(call(connection, "require_copy", queue, consumer, None if tables is None else list(tables)))


def unregister_consumer(connection: Connection[Any], queue: str, consumer: str) -> bool:
    """Delete a consumer and its position; False if there was none."""
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
    """Move a consumer to a tick, to the last tick at or before a time, or to one taken now; returns the tick's number.

    TruncatedPosition if changes after the tick are gone. psycopg.errors.LockNotAvailable while a worker holds the
    consumer: nothing is changed, try again.
    """
    return int(call(connection, "seek", queue, consumer, at_tick=tick, at_time=time, to_now=now))


def set_tables(connection: Connection[Any], queue: str, consumer: str, tables: Sequence[str] | None) -> bool:
    """Change the tables that a consumer takes from now on (None: all); False if it takes these already."""
    return bool(call(connection, "set_tables", queue, consumer, None if tables is None else list(tables)))


def set_pace(connection: Connection[Any], queue: str, consumer: str, pace: timedelta | float | None) -> bool:
    """Say how often a consumer needs a batch: not more than once in `pace`; None or 0: as soon as there are changes.

    `pace`: a time, or seconds. Ticks come as often as one consumer of the queue needs them, at most once in
    ticker_max_lag. False if it was so already.
    """
    time = pace if pace is None or isinstance(pace, timedelta) else timedelta(seconds=pace)
    return bool(call(connection, "set_pace", queue, consumer, time))


def consumer_info(connection: Connection[Any], queue: str | None = None) -> list[ConsumerInfo]:
    """The consumers of all queues, or of one."""
    return rows(connection, ConsumerInfo, "select * from gdq.consumer_info(%s)", queue)


def peek(connection: Connection[Any], queue: str, consumer: str | None = None, *, limit: int) -> list[Event]:
    """The next events of a consumer, at most `limit`, without consuming them. `consumer` None: the one furthest behind.

    Takes a tick first. Needs an idle autocommit connection. psycopg.errors.LockNotAvailable while a worker holds the
    consumer; GdqError if the queue has no consumer.
    """
    take_tick(connection, queue)
    if consumer is None:
        consumers = consumer_info(connection, queue)
        if not consumers:
            raise GdqError(f'queue "{queue}" has no consumer to look for', hint="Register one first.")
        consumer = max(consumers, key=lambda info: info.unread_events or 0).consumer_name
    # rolled back, so that a worker's own token stays valid
    with connection.transaction(force_rollback=True):
        connection.execute("set local lock_timeout = '2s'")
        members = member_info(connection, queue, consumer)
        member = members[0].member_name if members else None
        batch = Batch.open(connection, queue, consumer, limit, member=member)
        return ShownRows(islice(batch.events(), limit) if batch else ())


class Consumer(ConsumerState):
    """Reads the batches of one registered consumer; a BatchSource.

        with Consumer(dsn, "orders", "mirror") as consumer:
            for batch in consumer.batches():
                for event in batch.events():
                    ...

    `connection`: a connection string or an idle connection. A given connection is switched to autocommit, so that each
    batch is its own READ COMMITTED transaction, and stays open at the end. While a Consumer waits it also does a
    ticker's work. Behind a pooler no notification arrives; the Consumer looks every half second instead.
    `max_events`: ticks are joined into batches of at most this many events; a single tick is never divided.
    `member`: the name of this member, if several members of the consumer work on batches side by side. While this
    process lives, it shows on a second connection that it does. Another member takes over a batch whose member was not
    heard of for `dead_after`; the first member then gets StaleBatch.
    """

    def __init__(
        self,
        connection: Connectable,
        queue: str,
        consumer: str,
        *,
        max_events: int = MAX_EVENTS,
        member: str | None = None,
        dead_after: timedelta = DEAD_AFTER,
    ) -> None:
        super().__init__(queue, consumer, member, max_events, dead_after)
        self._owned = not isinstance(connection, Connection)
        if isinstance(connection, Connection):
            self.connection = connection
        else:
            self.connection = connect(connection, application_name=self._application_name)
        refuse_transaction(self.connection)
        try:
            self.connection.autocommit = True
            self.connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            self._listener = run(self.connection, listener_on(self.connection))
        except BaseException:
            if self._owned:
                self.connection.close()
            raise
        self._streaming: EventChoice | None = None

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
    ) -> Generator[Batch, None, None]:
        """Yield the batches from the consumer's position on, each in its own transaction.

        Asking for the next batch finishes and commits the one before (batch.commit() does it earlier). An exception or
        a `break` rolls back, and the batch comes again. `once`: force a tick and end with its batch. `timeout`: end
        after this many seconds without a batch. `stop` is called between batches and while waiting.
        """
        with closing(ArrowReader(self.connection)) as reader:
            loop = BatchLoop(self._listener, self.queue, self.consumer, once=once, timeout=timeout, stop=stop)
            yield from self._batches(reader, loop)

    def _batches(self, reader: ArrowReader, loop: BatchLoop) -> Iterator[Batch]:
        run(self.connection, loop.begin())
        while not loop.stopped():
            with ExitStack() as transaction:
                last = batch = self._open(transaction, reader)
                while batch is not None:
                    with self._held(batch):
                        yield batch
                        last, batch = batch, self._end(batch, loop)
            if not run(self.connection, loop.goes_on(last)):
                return

    def copies(self, *, stop: Callable[[], bool] = lambda: False) -> Generator[CopyBatch, None, None]:
        """Yield the tables that the consumer must copy, each as a batch of events in a transaction of its own.

        They are those that consumer_info() names: after require_copy(), or after ResyncRequired from batches(). Asking
        for the next table commits the one before; an exception or a `break` rolls back, and the table comes again from
        its start. `stop` is called between tables.
        """
        for table in execute(self.connection, tables_to_copy(self.queue, self.consumer)):
            if stop():
                return
            with ExitStack() as transaction:
                transaction.enter_context(self.connection.transaction())
                copy = transaction.enter_context(copy_table(self.connection, table))
                batch = CopyBatch(self.connection, self.queue, self.consumer, copy, transaction)
                yield batch
                batch.commit()

    def resync(self, table: str) -> AbstractContextManager[TableCopy]:
        """Copy a table again after ResyncRequired, outside a batch; the block's writes commit together with the copy.

        with consumer.resync("public.orders") as copy:
            consumer.connection.execute("truncate mirror")
            for row in copy.rows():
                ...
        """
        return resync(self.connection, self.queue, self.consumer, table)

    def resynced(self, table: str, snapshot: str) -> None:
        """Record that the table was copied as of a snapshot, without resync(); call it outside a batch."""
        resynced(self.connection, self.queue, self.consumer, table, snapshot)

    def _open(self, transaction: ExitStack, reader: ArrowReader) -> Batch | None:
        """The next batch, in a transaction that `transaction` ends.

        A member opens its batch in an earlier transaction: otherwise its lock on the subscription would keep the other
        members out while it works.
        """
        # a program that has read the events of the last batch will read those of the next
        if self._streaming is not None and self.member is None:
            return Batch.ask(self.connection, self._next(self._streaming), transaction=transaction, reader=reader)
        with ExitStack() as opening:
            (transaction if self.member is None else opening).enter_context(self.connection.transaction())
            batch = Batch.open(
                self.connection,
                self.queue,
                self.consumer,
                self._max_events,
                member=self.member,
                dead_after=self._dead_after,
                transaction=transaction,
                reader=reader,
            )
        if batch is not None and self.member is not None:
            transaction.enter_context(self.connection.transaction())
        return batch

    def _end(self, batch: Batch, loop: BatchLoop) -> Batch | None:
        """Finish a batch, unless it is; returns the next one, if the message that finishes this one has brought it."""
        self._streaming = batch.streamed
        asks = not batch.finished and self.member is None
        if not loop.follows(batch, asks=asks and batch.streamed is not None) or batch.streamed is None:
            batch.commit()
            return None
        ticker = loop.due_tick()
        ask = self._next(batch.streamed, after_tick=batch.tick_to)
        following, ticked = batch.follow(ask, None if ticker is None else ticker.statement())
        if ticker is not None and ticked is not None:
            ticker.take(ticked)
        return following

    def _next(self, choice: EventChoice, *, after_tick: int | None = None) -> NextBatch:
        return NextBatch(self.queue, self.consumer, self._max_events, choice, after_tick)

    def _held(self, batch: Batch) -> AbstractContextManager[None]:
        """While a member works on a batch, the others know that it is alive."""
        if self.member is None:
            return nullcontext()
        return stay_alive(self.connection, batch.id, batch.token, self._dead_after)
