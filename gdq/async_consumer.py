"""AsyncConsumer: a consumer for programs on asyncio, on psycopg's async connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection

from gdq.batch_loop import BatchLoop, ConsumerState, listener_on, refuse_transaction
from gdq.batch_state import BatchState, TableVersion, refuse_gap
from gdq.conninfo import connect_async, conninfo_of
from gdq.copy_batch import AsyncCopyBatch, tables_to_copy
from gdq.errors import GdqError
from gdq.event_rows import EventChoice
from gdq.listener import Listener
from gdq.member import DEAD_AFTER, show_alive
from gdq.retry import RETRY_DELAY, RetryOutcome
from gdq.sequence import SequenceValue
from gdq.shown import ShownRows
from gdq.source import MAX_EVENTS, Event, Images, Position
from gdq.steps import called, execute_async, is_left_open, run_async
from gdq.stream import NextBatch, next_batch_statement, next_rows_async, read_events_async
from gdq.table_copy import copy_table


class AsyncBatch(BatchState):
    """The changes of one consumer between two ticks, open in the transaction of `connection`.

    As Batch, but for typed rows (arrow, delta): a Consumer in a thread reads these.
    """

    def __init__(
        self,
        connection: AsyncConnection[Any],
        queue: str,
        consumer: str,
        row: dict[str, Any],
        transaction: AsyncExitStack,
        *,
        events: Iterator[Event] | None = None,
    ) -> None:
        super().__init__(queue, consumer, row)
        self.connection = connection
        self._transaction = transaction
        self._first = events

    async def position(self) -> Position:
        """The consumer's position once the batch is finished."""
        return Position.parse(await execute_async(self.connection, self._position()))

    async def tables(self) -> list[str]:
        """The captured tables whose logs may hold rows of the batch, as `%I.%I`."""
        names: list[str] = await execute_async(self.connection, self._tables())
        return names

    async def versions(self, table: str) -> list[TableVersion]:
        """The versions of a table with rows in the batch, oldest first; several only if DDL divides the batch."""
        return ShownRows(await execute_async(self.connection, self._versions(table)))

    async def events(
        self, *, images: Images = "both", columns: Sequence[str] | None = None
    ) -> AsyncGenerator[Event, None]:
        """All changes in the order of their numbers, with Python's values, streamed; reading again gives the same.

        Arguments as for Batch.events(). Retried events that are due come first. ResyncRequired at a gap in capture.
        """
        choice = EventChoice.of(images, columns)
        first, self._first = (self._first if self.streamed == choice else None), None
        self.streamed = choice
        if first is not None:
            for event in first:
                refuse_gap(event)
                yield event
            return
        async with aclosing(read_events_async(self.connection, self.id, self.token, choice)) as events:
            async for event in events:
                refuse_gap(event)
                yield event

    async def retry(self, event: Event, delay: timedelta = RETRY_DELAY, reason: str | None = None) -> bool:
        """Put an event of this batch aside: it comes again in the first batch that is opened after `delay`.

        It takes effect with commit(). False if the event has had all its retries (set_retry_limit) and became a dead
        letter.
        """
        return bool(await execute_async(self.connection, self._retry(event, delay, reason)))

    async def put_aside(self, outcomes: Sequence[RetryOutcome]) -> int:
        """Put many events aside, each by its Retry or DeadLetter; returns the number that come again."""
        return await run_async(self.connection, self._put_aside(outcomes))

    async def dead_letter(self, event: Event, reason: str | None = None) -> None:
        """Give up an event of this batch and keep it as a dead letter; takes effect with commit()."""
        await execute_async(self.connection, self._dead_letter(event, reason))

    async def sequences(self, *, changed: bool = True) -> list[SequenceValue]:
        """The values of the queue's sequences at the end of the batch; `changed`: only those that the batch changed."""
        return ShownRows(await execute_async(self.connection, self._sequences(changed)))

    async def commit(self) -> None:
        """Move the consumer past the batch, and commit its transaction with all writes in it.

        A second call does nothing. StaleBatch if another worker took the batch over: nothing is committed.
        """
        if self.finished:
            return
        seconds = await execute_async(self.connection, self._finish_statement())
        await self._transaction.aclose()
        self._note_retry(seconds)
        self.finished = True


def _in_thread(leave: Callable[..., bool | None]) -> Callable[..., Coroutine[Any, Any, bool | None]]:
    """The end of a `with` block, which may wait for a server, for an AsyncExitStack."""

    async def leave_in_thread(*raised: Any) -> bool | None:
        return await asyncio.to_thread(leave, *raised)

    return leave_in_thread


class AsyncConsumer(ConsumerState):
    """Reads the batches of one registered consumer on asyncio; otherwise as Consumer.

        async with AsyncConsumer(dsn, "orders", "mirror") as consumer:
            async for batch in consumer:
                async for event in batch.events():
                    ...

    Arguments as for Consumer; a given connection is an idle psycopg.AsyncConnection. A task that is cancelled, while it
    waits, reads, handles a batch or finishes one, leaves the batch as an exception does: rolled back, to come again.
    Only if the COMMIT had already reached the server may the batch be finished, with all writes of its transaction.
    """

    connection: AsyncConnection[Any]

    def __init__(
        self,
        connection: AsyncConnection[Any] | str | None,
        queue: str,
        consumer: str,
        *,
        max_events: int = MAX_EVENTS,
        member: str | None = None,
        dead_after: timedelta = DEAD_AFTER,
    ) -> None:
        super().__init__(queue, consumer, member, max_events, dead_after)
        self._given = connection
        self._listener: Listener
        self._iterator: AsyncGenerator[AsyncBatch, None] | None = None
        self._streaming: EventChoice | None = None

    async def __aenter__(self) -> Self:
        owned = not isinstance(self._given, AsyncConnection)
        if isinstance(self._given, AsyncConnection):
            refuse_transaction(self._given)
            self.connection = self._given
        else:
            self.connection = await connect_async(self._given, application_name=self._application_name)
        try:
            await self.connection.set_autocommit(True)
            await self.connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            self._listener = await run_async(self.connection, listener_on(self.connection))
        except BaseException:
            if owned:
                await self.connection.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._end_iteration()
        finally:
            self._listener.close()
            # one that a second cancellation kept from rolling back is of no use to its owner either
            if not isinstance(self._given, AsyncConnection) or is_left_open(self.connection):
                await self.connection.close()

    def __aiter__(self) -> AsyncIterator[AsyncBatch]:
        return self.batches()

    def batches(
        self,
        *,
        once: bool = False,
        timeout: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> AsyncIterator[AsyncBatch]:
        """Yield the batches from the consumer's position on, each in its own transaction.

        Asking for the next batch finishes and commits the one before (batch.commit() does it earlier). After an
        exception, a cancellation or a `break` the batch is rolled back when batches() is iterated again, or at the end
        of `async with`, and comes again. `once`: force a tick and end with its batch. `timeout`: end after this many
        seconds without a batch. `stop` is called between batches and while waiting.
        """
        if not hasattr(self, "_listener"):
            raise GdqError("the consumer has no connection yet", hint="Write `async with AsyncConsumer(...)`.")
        loop = BatchLoop(self._listener, self.queue, self.consumer, once=once, timeout=timeout, stop=stop)

        async def iterate() -> AsyncGenerator[AsyncBatch, None]:
            await self._end_iteration()
            self._iterator = iterator
            await run_async(self.connection, loop.begin())
            while not stop():
                async with AsyncExitStack() as transaction:
                    batch = await self._open(transaction)
                    if batch is not None:
                        async with self._held(batch):
                            yield batch
                            await batch.commit()
                        self._streaming = batch.streamed
                if not await run_async(self.connection, loop.goes_on(batch)):
                    return

        iterator = iterate()
        return iterator

    async def _end_iteration(self) -> None:
        """Roll back the batch of an iteration that was left: a `break` does not close an async generator."""
        left, self._iterator = self._iterator, None
        if left is not None:
            await left.aclose()

    async def copies(self) -> AsyncGenerator[AsyncCopyBatch, None]:
        """Yield the tables that the consumer must copy, each as a batch of events, as Consumer.copies() does.

        The rows are read on a connection of their own, in a thread. Close the iterator (contextlib.aclosing) when you
        leave it before its end.
        """
        for table in await execute_async(self.connection, tables_to_copy(self.queue, self.consumer)):
            async with AsyncExitStack() as transaction:
                await transaction.enter_async_context(self.connection.transaction())
                opened = copy_table(conninfo_of(self.connection), table)
                copy = await asyncio.to_thread(opened.__enter__)
                transaction.push_async_exit(_in_thread(opened.__exit__))
                batch = AsyncCopyBatch(self.connection, self.queue, self.consumer, copy, transaction)
                yield batch
                await batch.commit()

    async def resynced(self, table: str, snapshot: str) -> None:
        """Record that the table was copied as of a snapshot, after ResyncRequired; call it outside a batch.

        copy_table() in a thread gives a copy and its snapshot.
        """
        await execute_async(self.connection, called("resynced", self.queue, self.consumer, table, snapshot))

    async def _open(self, transaction: AsyncExitStack) -> AsyncBatch | None:
        """The next batch, in a transaction that `transaction` ends; a member's is opened in an earlier one."""
        # a program that has read the events of the last batch will read those of the next
        if self._streaming is not None and self.member is None:
            return await self._ask(transaction, self._streaming)
        statement = next_batch_statement(
            self.queue, self.consumer, self._max_events, member=self.member, dead_after=self._dead_after
        )
        async with AsyncExitStack() as opening:
            begun = transaction if self.member is None else opening
            await begun.enter_async_context(self.connection.transaction())
            found = await execute_async(self.connection, statement)
        if not found:
            return None
        if self.member is not None:
            await transaction.enter_async_context(self.connection.transaction())
        return AsyncBatch(self.connection, self.queue, self.consumer, found[0], transaction)

    async def _ask(self, transaction: AsyncExitStack, choice: EventChoice) -> AsyncBatch | None:
        """The next batch, with its events if they are few."""
        ask = NextBatch(self.queue, self.consumer, self._max_events, choice)
        await transaction.enter_async_context(self.connection.transaction())
        if (found := ask.found(await next_rows_async(self.connection, ask))) is None:
            return None
        row, events = found
        batch = AsyncBatch(self.connection, self.queue, self.consumer, row, transaction, events=events)
        batch.streamed = choice
        return batch

    @asynccontextmanager
    async def _held(self, batch: AsyncBatch) -> AsyncIterator[None]:
        """While a member works on a batch, the others know that it is alive."""
        if self.member is None:
            yield
            return
        end = show_alive(self.connection, batch.id, batch.token, self._dead_after)
        try:
            yield
        finally:
            await asyncio.to_thread(end)
