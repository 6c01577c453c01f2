"""The events of a batch, streamed through a server-side cursor; the first come together with the batch itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

from psycopg import AsyncConnection, Connection, Cursor, Transaction
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads

from gdq.call import one_round_trip
from gdq.errors import mapped_errors
from gdq.member import DEAD_AFTER
from gdq.qualified_sql import qualified
from gdq.source import Event
from gdq.steps import Statement
from gdq.typed.values import load_json
from gdq.typed_stream import EventChoice, FirstEvents

# Rows fetched from the cursor at a time: a row may hold two images of megabytes.
_FETCH_ROWS = 500

# A message comes as text, so that its numbers stay as they were sent; a row's numbers may be floats.
# Times come as microseconds since 1970: their text would depend on the session's DateStyle.
_DECLARE = """
    declare {name} no scroll cursor for
     select ev_id, ev_txid, (extract(epoch from ev_time) operator(pg_catalog.*) 1000000)::bigint, op, tbl, key, old,
            case when op operator(pg_catalog.<>) 'message' then new end,
            case when op operator(pg_catalog.=) 'message' then new::pg_catalog.text end, retries, origin
       from gdq.get_events({batch})"""
_FETCH = f"fetch {_FETCH_ROWS} from {{name}}"

# Each cursor gets a new name, since one that was not read to its end still exists.
_numbers = itertools.count()

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
    name = _new_name()
    opened, events = connection.cursor(row_factory=dict_row), _cursor(connection)
    typed = FirstEvents(connection, choice) if choice.typed else None
    with one_round_trip(connection):
        transaction.enter_context(Transaction(connection))
        opened.execute(_OPEN_AND_TELL, [queue, consumer, max_events, None, DEAD_AFTER])
        if typed is not None:
            typed.send(_OPENED)
        else:
            connection.execute(_DECLARE.format(name=name, batch=_OPENED).encode(), prepare=False)
            events.execute(_FETCH.format(name=name).encode(), prepare=False)
    return opened.fetchone(), typed.events() if typed is not None else _rest(events, name)


def read_events(connection: Connection[Any], batch_id: int, token: object) -> Iterator[Event]:
    """The events of an open batch; the first round trip brings up to 500."""
    name, cursor = _new_name(), _cursor(connection)
    with mapped_errors():
        cursor.execute(_declare_and_fetch(name, batch_id, token))
    cursor.nextset()
    yield from _rest(cursor, name)


async def read_events_async(
    connection: AsyncConnection[Any], batch_id: int, token: object
) -> AsyncGenerator[Event, None]:
    """As read_events()."""
    name, cursor = _new_name(), connection.cursor(row_factory=_event_row)
    set_json_loads(load_json, cursor)
    with mapped_errors():
        await cursor.execute(_declare_and_fetch(name, batch_id, token))
        cursor.nextset()
        while rows := await cursor.fetchall():
            for event in rows:
                yield event
            if len(rows) < _FETCH_ROWS:
                return
            await cursor.execute(_FETCH.format(name=name).encode())


def _declare_and_fetch(name: str, batch_id: int, token: object) -> bytes:
    declare = _DECLARE.format(name=name, batch=f"{int(batch_id)}, '{token}'")
    return f"{declare}; {_FETCH.format(name=name)}".encode()


def _rest(cursor: Cursor[Event], name: str) -> Iterator[Event]:
    """The fetched rows, then the remaining ones."""
    with mapped_errors(), cursor:
        rows = cursor.fetchall()
        while rows:
            yield from rows
            rows = cursor.execute(_FETCH.format(name=name).encode()).fetchall() if len(rows) == _FETCH_ROWS else []


def _cursor(connection: Connection[Any]) -> Cursor[Event]:
    cursor = connection.cursor(row_factory=_event_row)
    set_json_loads(load_json, cursor)
    return cursor


def _new_name() -> str:
    return f"gdq_events_{next(_numbers)}"


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _event_row(_cursor: Any) -> Callable[[Sequence[Any]], Event]:
    def event(row: Sequence[Any]) -> Event:
        number, xid, microseconds, op, table, key, old, new, message, retries, origin = row
        time = _EPOCH + timedelta(microseconds=microseconds)
        image = new if message is None else json.loads(message)
        return Event(number, xid, time, op, table, key, old, image, retries, origin)

    return event
