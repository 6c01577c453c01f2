"""Copies as events: the rows of a table that a consumer must copy, for the code that takes the table's changes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from datetime import UTC, datetime
from typing import Any

from psycopg import AsyncConnection, Connection
from psycopg.types.json import set_json_loads

from gdq.call import call
from gdq.event_rows import EventChoice
from gdq.qualified_sql import qualified
from gdq.source import Event, Images, make_event
from gdq.sql_text import raw
from gdq.steps import Statement, called, execute, execute_async
from gdq.table_copy import TableCopy
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.typed.values import load_json, typed_image

# Events that a thread reads at a time: a row may hold megabytes.
_THREAD_EVENTS = 50

_TYPES = qualified("select name, log_type from gdq.table_columns(%s, %s::pg_catalog.regclass)")


def tables_to_copy(queue: str, consumer: str) -> Statement:
    """The tables that a consumer must copy, now or at a later resync event; messages cannot be copied."""
    return Statement(
        qualified("""
            select coalesce((select array(select t from unnest(c.resync) as t where t <> 'messages')
                               from gdq.consumer_info(%s) c where c.consumer_name = %s), '{}')"""),
        [queue, consumer],
    )


class CopyState:
    """What CopyBatch and AsyncCopyBatch share: one table, as one snapshot has it, for one consumer."""

    def __init__(self, queue: str, consumer: str, copy: TableCopy) -> None:
        self._consumer = consumer
        self._copy = copy
        self.queue = queue
        self.table = copy.table
        self.snapshot = copy.snapshot
        self.finished = False
        self._reading: Generator[Event, None, None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of table {self.table} for consumer {self.queue}/{self._consumer}>"

    def _events(self, choice: EventChoice) -> Generator[Event, None, None]:
        """The copy's events: a truncate, then a read for each row. By COPY, which holds one row, however large."""
        self._end_reading()
        self._reading = self._read(choice)
        return self._reading

    def _read(self, choice: EventChoice) -> Generator[Event, None, None]:
        now = datetime.now(UTC)
        yield Event(0, 0, now, "truncate", self.table, None, None, None)
        reader = self._copy.connection
        types = dict(reader.execute(_TYPES, [self.queue, self.table]).fetchall())
        for name, value in READ_SETTINGS.items():
            reader.execute("select pg_catalog.set_config(%s, %s, true)", [name, value])
        query = call(reader, "copy_sql", self.queue, self.table)
        with reader.cursor() as cursor:
            set_json_loads(load_json, cursor)
            with cursor.copy(raw(f"copy ({query}) to stdout")) as rows:
                rows.set_types(["jsonb", "jsonb"])
                for row in rows.rows():
                    key, new = (typed_image(image, types) for image in (row[0], choice.new(row[1])))
                    yield make_event(0, 0, now, "read", self.table, key, None, new, 0, None, types, ())

    def _end_reading(self) -> None:
        """End a COPY that was not read to its end; the session is idle then."""
        with contextlib.suppress(ValueError):  # a thread of a cancelled task reads: the session's end ends it
            if self._reading is not None:
                self._reading.close()

    def _resynced(self) -> Statement:
        return called("resynced", self.queue, self._consumer, self.table, self.snapshot)


class CopyBatch(CopyState):
    """The rows of one table that a consumer must copy, as events; open in the transaction of `connection`.

    `table`: its name. `snapshot`: the pg_snapshot of the rows; the consumer gets every change after it.
    """

    def __init__(
        self, connection: Connection[Any], queue: str, consumer: str, copy: TableCopy, transaction: ExitStack
    ) -> None:
        super().__init__(queue, consumer, copy)
        self.connection = connection
        self._transaction = transaction
        transaction.callback(self._end_reading)

    def events(self, *, images: Images = "both", columns: Sequence[str] | None = None) -> Iterator[Event]:
        """A truncate event, since what was there before is void, then a read event for each row, streamed.

        They have the number 0 and no order. `key` and `new` are those of an insert of the row; of `new` only `columns`
        are given. There is no old image, whatever `images` says. Rows that the table's row filter leaves out are
        missing.
        """
        return self._events(EventChoice.of(images, columns))

    def commit(self) -> None:
        """Note that the consumer has the table, and commit the transaction with all writes in it.

        A second call does nothing. ResyncRequired if capture has missed changes since the snapshot: copy again.
        """
        if not self.finished:
            execute(self.connection, self._resynced())
            self._transaction.close()
            self.finished = True


class AsyncCopyBatch(CopyState):
    """As CopyBatch, for AsyncConsumer."""

    def __init__(
        self, connection: AsyncConnection[Any], queue: str, consumer: str, copy: TableCopy, transaction: AsyncExitStack
    ) -> None:
        super().__init__(queue, consumer, copy)
        self.connection = connection
        self._transaction = transaction
        transaction.push_async_callback(asyncio.to_thread, self._end_reading)

    async def events(
        self, *, images: Images = "both", columns: Sequence[str] | None = None
    ) -> AsyncGenerator[Event, None]:
        """A truncate event, then a read event for each row, streamed; see CopyBatch."""
        events = self._events(EventChoice.of(images, columns))
        while some := await asyncio.to_thread(list, itertools.islice(events, _THREAD_EVENTS)):
            for event in some:
                yield event

    async def commit(self) -> None:
        """Note that the consumer has the table, and commit the transaction with all writes in it."""
        if not self.finished:
            await execute_async(self.connection, self._resynced())
            await self._transaction.aclose()
            self.finished = True
