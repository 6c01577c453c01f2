"""Typed events of a batch, streamed through the cursors of gdq.open_events()."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, DataError
from psycopg.rows import TupleRow, tuple_row
from psycopg.types.json import set_json_loads

from gdq.call import one_round_trip
from gdq.errors import mapped_errors
from gdq.event_rows import FETCH_ROWS, EventPart, EventParts, Images
from gdq.source import Event
from gdq.typed.values import adapt_events, load_json, load_wide_rows

# Cursors get new names, since one that was not read to its end still exists.
_numbers = itertools.count()

_EVENTS = "select cursor_name, part, layout from gdq.open_events({batch}, %s, %s, %s)"
_OPEN_EVENTS = _EVENTS.format(batch="%s, %s")


@dataclass(frozen=True, slots=True)
class EventChoice:
    """What is read of events.

    `typed`: Python's values, else JSON's. `images`: both, or new for those without old images. `columns` of the images;
    None: all.
    """

    typed: bool = False
    images: Images = "both"
    columns: tuple[str, ...] | None = None

    def values(self, name: str) -> list[Any]:
        """The last arguments of open_events()."""
        return [name, self.images, None if self.columns is None else list(self.columns)]

    def parts(self, listed: Sequence[TupleRow]) -> EventParts:
        """The parts that open_events() has listed."""
        return EventParts(listed, self.images, self.columns)


class FirstEvents:
    """The typed events of a batch that is opened in the same round trip: send() in the pipeline, events() after it."""

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

    def events(self) -> Iterator[Event]:
        """All events; those fetched, then the others."""
        parts = self._choice.parts(self._listed.fetchall())
        return _rest(self._connection, parts, self._first)


def read_typed_events(
    connection: Connection[Any], batch_id: int, token: object, choice: EventChoice
) -> Iterator[Event]:
    """The events of an open batch; the first round trip brings up to 500."""
    first = FirstEvents(connection, choice)
    with one_round_trip(connection):
        first.send("%s, %s", [batch_id, token])
    yield from first.events()


async def read_typed_events_async(
    connection: AsyncConnection[Any], batch_id: int, token: object, choice: EventChoice
) -> AsyncGenerator[Event, None]:
    """As read_typed_events()."""
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


def _rest(connection: Connection[Any], parts: EventParts, first: Cursor[TupleRow]) -> Iterator[Event]:
    """The fetched rows of the first part, then all others."""
    with mapped_errors():
        fetched = _rows(first)
        if parts.first is not None:
            parts.first.add(fetched)
        while (wanted := parts.wanted()) or parts.left():
            _fetch_parts(connection, wanted)
            yield from parts.take()


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
    return f"gdq_typed_{next(_numbers)}"
