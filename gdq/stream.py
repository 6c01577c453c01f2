"""The events of a batch, streamed through the cursors of gdq.open_events(); the first come with the batch itself."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, DataError, Transaction
from psycopg.rows import TupleRow, dict_row, tuple_row
from psycopg.types.json import set_json_loads

from gdq.call import one_round_trip
from gdq.errors import mapped_errors
from gdq.event_rows import FETCH_ROWS, EventChoice, EventPart
from gdq.member import DEAD_AFTER
from gdq.qualified_sql import qualified
from gdq.source import Event
from gdq.steps import Statement
from gdq.typed.values import adapt_events, load_json, load_wide_rows

# Cursors get new names, since one that was not read to its end still exists.
_numbers = itertools.count()

_EVENTS = "select cursor_name, part, layout from gdq.open_events({batch}, %s, %s, %s)"
_OPEN_EVENTS = _EVENTS.format(batch="%s, %s")

# The batch's id and token, passed on inside the server, so that batch and events need one round trip.
_OPENED = qualified("""
    case when current_setting('gdq.batch_id', true) <> '' then current_setting('gdq.batch_id', true)::bigint end,
    case when current_setting('gdq.token', true) <> '' then current_setting('gdq.token', true)::uuid end""")
_OPEN = "select * from gdq.next_batch(%s, %s, max_events => %s, member => %s, dead_after => %s)"
_OPEN_AND_TELL = qualified(f"""
    select b.*, set_config('gdq.batch_id', b.batch_id::text, true), set_config('gdq.token', b.token::text, true)
      from ({_OPEN}) b""")


def next_batch_statement(
    queue: str,
    consumer: str,
    max_events: int,
    *,
    member: str | None = None,
    dead_after: timedelta = DEAD_AFTER,
) -> Statement:
    """The call of gdq.next_batch(), for the rows of batches: there is none, or one."""
    return Statement(_OPEN, [queue, consumer, max_events, member, dead_after], row=dict_row)


def next_batch_with_events(
    connection: Connection[Any],
    queue: str,
    consumer: str,
    max_events: int,
    *,
    transaction: ExitStack,
    choice: EventChoice,
) -> tuple[dict[str, Any] | None, Iterator[Event]]:
    """next_batch() in a transaction that `transaction` ends, and its events, the first in the same round trip."""
    opened, events = connection.cursor(row_factory=dict_row), _FirstEvents(connection, choice)
    with one_round_trip(connection):
        transaction.enter_context(Transaction(connection))
        opened.execute(_OPEN_AND_TELL, [queue, consumer, max_events, None, DEAD_AFTER])
        events.send(_OPENED)
    return opened.fetchone(), events.all()


class _FirstEvents:
    """The events of a batch that is opened in the same round trip: send() in the pipeline, all() after it."""

    def __init__(self, connection: Connection[Any], choice: EventChoice) -> None:
        self._connection = connection
        self._choice = choice
        self._listed = connection.cursor(row_factory=tuple_row)
        self._first = _cursor(connection)

    def send(self, batch: str, values: Sequence[Any] = ()) -> None:
        """Open the cursors and fetch from the first. `batch`: SQL of the batch's id and token, with `values`."""
        name = _new_name()
        self._listed.execute(_EVENTS.format(batch=batch).encode(), [*values, *self._choice.values(name)])
        _fetch(self._first, f"{name}_0", FETCH_ROWS)

    def all(self) -> Iterator[Event]:
        """All events; those fetched, then the others."""
        parts = self._choice.parts(self._listed.fetchall())
        with mapped_errors():
            fetched = _rows(self._first)
            if parts.first is not None:
                parts.first.add(fetched)
            while (wanted := parts.wanted()) or parts.left():
                _fetch_parts(self._connection, wanted)
                yield from parts.take()


def read_events(connection: Connection[Any], batch_id: int, token: object, choice: EventChoice) -> Iterator[Event]:
    """The events of an open batch; the first round trip brings up to 500."""
    first = _FirstEvents(connection, choice)
    with one_round_trip(connection):
        first.send("%s, %s", [batch_id, token])
    yield from first.all()


async def read_events_async(
    connection: AsyncConnection[Any], batch_id: int, token: object, choice: EventChoice
) -> AsyncGenerator[Event, None]:
    """As read_events()."""
    name, cursor = _new_name(), connection.cursor(row_factory=tuple_row, binary=True)
    _adapt(cursor)
    with mapped_errors():
        listed = await connection.cursor(row_factory=tuple_row).execute(
            _OPEN_EVENTS, [batch_id, token, *choice.values(name)]
        )
        parts = choice.parts(await listed.fetchall())
        while (wanted := parts.wanted()) or parts.left():
            for part in wanted:
                await cursor.execute(_fetch_query(part.name, part.rows), prepare=False)
                try:
                    rows = await cursor.fetchall()
                except DataError:
                    rows = load_wide_rows(cursor)
                part.add(rows)
            for event in parts.take():
                yield event


def _fetch_parts(connection: Connection[Any], parts: Sequence[EventPart]) -> None:
    """Fetch the next rows of some parts, in one round trip."""
    cursors = [_cursor(connection) for _ in parts]
    if len(parts) == 1:
        _fetch(cursors[0], parts[0].name, parts[0].rows)
    elif parts:
        with one_round_trip(connection):
            for cursor, part in zip(cursors, parts, strict=True):
                _fetch(cursor, part.name, part.rows)
    for cursor, part in zip(cursors, parts, strict=True):
        part.add(_rows(cursor))


def _fetch(cursor: Cursor[TupleRow], name: str, rows: int) -> None:
    cursor.execute(_fetch_query(name, rows), prepare=False)


def _fetch_query(name: str, rows: int) -> bytes:
    return f"fetch {rows} from {name}".encode()


def _rows(cursor: Cursor[TupleRow]) -> list[TupleRow]:
    try:
        return cursor.fetchall()
    except DataError:  # a date or time that Python cannot hold
        return load_wide_rows(cursor)


def _cursor(connection: Connection[Any]) -> Cursor[TupleRow]:
    cursor = connection.cursor(row_factory=tuple_row, binary=True)
    _adapt(cursor)
    return cursor


def _adapt(cursor: Cursor[TupleRow] | AsyncCursor[TupleRow]) -> None:
    set_json_loads(load_json, cursor)
    adapt_events(cursor.adapters)


def _new_name() -> str:
    return f"gdq_events_{next(_numbers)}"
