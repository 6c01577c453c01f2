"""Batches opened, and their events: few in the same call, others streamed through the cursors of open_events()."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, DataError, Transaction
from psycopg.rows import TupleRow, dict_row, tuple_row
from psycopg.types.json import set_json_loads

from gdq.call import one_round_trip
from gdq.errors import mapped_errors
from gdq.event_rows import FETCH_ROWS, EventChoice, EventPart, EventParts, decode_events
from gdq.member import DEAD_AFTER
from gdq.qualified_sql import qualified
from gdq.source import Event
from gdq.steps import Statement
from gdq.typed.values import adapt_events, load_json, load_wide_rows

# Cursors get new names, since one that was not read to its end still exists.
_numbers = itertools.count()

_OPEN_EVENTS = "select cursor_name, part, layout from gdq.open_events(%s, %s, %s, %s, %s)"

_OPEN = "select * from gdq.next_batch(%s, %s, max_events => %s, member => %s, dead_after => %s)"

# The columns of a batch, and whether its events are complete. The columns that decode_events() takes follow.
_BATCH = ("batch_id", "token", "tick_from", "tick_to", "snapshot_from", "snapshot_to", "complete")
_NEXT = qualified("""
    select batch_id, token, tick_from, tick_to, snapshot_from::text, snapshot_to::text, complete,
           ev_id, ev_txid, ev_time, op, tbl, key, old, new, message, origin, retries, types
      from gdq.next_events(%s, %s, max_events => %s, after_tick => %s, few => %s)""")

# In psycopg's block of a transaction, which its end closes: the next one begins at once.
_COMMIT = b"commit and chain"


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


@dataclass(frozen=True, slots=True)
class NextBatch:
    """What asks for the next batch of a consumer without members, whose events will be read by `choice`.

    `after_tick`: only if there is a tick after this one.
    """

    queue: str
    consumer: str
    max_events: int
    choice: EventChoice
    after_tick: int | None = None

    def values(self) -> list[Any]:
        """The arguments of gdq.next_events(), which knows no choice."""
        few = FETCH_ROWS if self.choice == EventChoice() else None
        return [self.queue, self.consumer, self.max_events, self.after_tick, few]

    def found(self, rows: Sequence[TupleRow]) -> tuple[dict[str, Any], Iterator[Event] | None] | None:
        """The batch in the rows of gdq.next_events(), and its events, if they came with it; None for no batch."""
        if not rows:
            return None
        batch = dict(zip(_BATCH, rows[-1], strict=False))
        return batch, (self._events(rows[:-1]) if batch["complete"] else None)

    def _events(self, rows: Sequence[TupleRow]) -> Iterator[Event]:
        yield from decode_events(self.choice)([row[len(_BATCH) :] for row in rows])


class Message:
    """One message of a consumer to the server: a batch is finished, a tick is taken, and the next batch is asked for.

    Each in a transaction of its own: a tick is committed before the batch that ends with it. `finish` and `tick`: the
    statements of what is done; None for nothing.
    """

    def __init__(
        self, connection: Connection[Any], finish: Statement | None = None, tick: Statement | None = None
    ) -> None:
        self._connection = connection
        self._finish = finish
        self._tick = tick
        self._finished = connection.cursor(row_factory=tuple_row)
        self._commit = connection.cursor()
        self._ticked = connection.cursor(row_factory=tuple_row)
        self._opened = _cursor(connection)

    def send(self, transaction: ExitStack, ask: NextBatch) -> Sequence[TupleRow]:
        """Send all in one round trip; returns the rows of gdq.next_events().

        The batch's transaction is the block that `transaction` ends. It is begun here if there is no batch to finish,
        and else goes on: so psycopg still keeps a handler from committing.
        """
        with one_round_trip(self._connection):
            if self._finish is None:
                transaction.enter_context(Transaction(self._connection))
            else:
                self._finished.execute(self._finish.query, self._finish.values)
                self._commit.execute(_COMMIT, prepare=False)
            if self._tick is not None:
                self._ticked.execute(self._tick.query, self._tick.values)
                self._connection.cursor().execute(_COMMIT, prepare=False)
            self._opened.execute(_NEXT, ask.values())
        return self._opened.fetchall()

    @property
    def committed(self) -> bool:
        """Whether the batch is finished; also if what came after it failed."""
        return self._commit.statusmessage == "COMMIT"

    def row_of_finish(self) -> TupleRow:
        """What the statement that finishes the batch returned."""
        return self._finished.fetchall()[0]

    def row_of_tick(self) -> TupleRow:
        """What the tick's statement returned."""
        return self._ticked.fetchall()[0]


async def next_rows_async(connection: AsyncConnection[Any], ask: NextBatch) -> list[TupleRow]:
    """The rows of gdq.next_events()."""
    cursor = connection.cursor(row_factory=tuple_row, binary=True)
    _adapt(cursor)
    with mapped_errors():
        await cursor.execute(_NEXT, ask.values())
        return await cursor.fetchall()


def read_events(connection: Connection[Any], batch_id: int, token: object, choice: EventChoice) -> Iterator[Event]:
    """The events of an open batch; the first round trip brings up to 500."""
    name, listed, first = _new_name(), connection.cursor(row_factory=tuple_row), _cursor(connection)
    with one_round_trip(connection):
        listed.execute(_OPEN_EVENTS, [batch_id, token, *choice.values(name)])
        _fetch(first, f"{name}_0", FETCH_ROWS)
    parts = choice.parts(listed.fetchall())
    with mapped_errors():
        if parts.first is not None:
            parts.first.add(_rows(first))
        yield from _read_parts(connection, parts)


def read_other_events(connection: Connection[Any], batch_id: int, token: object) -> Iterator[Event]:
    """The events of an open batch that are not in the logs of tables: TRUNCATE, DDL, gaps and messages, and retries.

    The rows of tables are not read.
    """
    values = [batch_id, token, _new_name(), "none", None]
    with mapped_errors():
        listed = connection.cursor(row_factory=tuple_row).execute(_OPEN_EVENTS, values).fetchall()
        yield from _read_parts(connection, EventChoice("new", ()).parts(listed))


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


def _read_parts(connection: Connection[Any], parts: EventParts) -> Iterator[Event]:
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
    return f"gdq_events_{next(_numbers)}"
