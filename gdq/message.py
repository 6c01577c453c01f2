"""Messages of the application, in the same stream and order as the changes.

All take a connection and leave the transaction to the caller: a message appears when that commits, like a change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from psycopg import Connection
from psycopg.types.json import Jsonb

from gdq.call import call, scalar
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.source import Event

_EXTRAS = 4


@dataclass(frozen=True, slots=True)
class Message:
    """The content of an event with op "message".

    `data`: a str for text, else the value of the JSON. `extra`: up to four texts.
    """

    type: str | None
    data: Any
    extra: tuple[str | None, ...] = ()

    @classmethod
    def of(cls, event: Event) -> Self:
        """The message of an event; GdqError for any other event."""
        if event.op != "message" or event.new is None:
            raise GdqError(f"event {event.id} is not a message but: {event.op}")
        extra = [event.new.get(f"extra{number + 1}") for number in range(_EXTRAS)]
        while extra and extra[-1] is None:
            extra.pop()
        return cls(event.new["type"], event.new["data"], tuple(extra))


def insert_event(
    connection: Connection[Any],
    queue: str,
    type: str | None,  # noqa: A002 (its name everywhere)
    data: Any,
    *extra: str | None,
) -> int:
    """Put one message into a queue; returns its number. `data`: text as str, or a JSON value, also as psycopg's Jsonb.

    psycopg.errors.UndefinedObject if there is no such queue, ProgramLimitExceeded for more than 100 MB.
    """
    kind = "text" if isinstance(data, str) else "jsonb"
    values = [queue, type, data if kind == "text" else _json(data), *_extras(extra)]
    query = qualified(f"select gdq.insert_event(%s, %s, %s::{kind}, %s, %s, %s, %s)")
    return int(scalar(connection, query, *values))


def insert_events(connection: Connection[Any], queue: str, messages: Iterable[Message]) -> int:
    """Put many messages into a queue by one statement, in this order; returns their number."""
    rows = list(messages)
    types = [message.type for message in rows]
    data = [_json(message.data) for message in rows]
    extras = list(zip(*(_extras(message.extra) for message in rows), strict=True)) or [()] * _EXTRAS
    arrays = [list(extra) if any(value is not None for value in extra) else None for extra in extras]
    query = qualified("""select gdq.insert_events(%s, %s::text[], %s::jsonb[],
                 %s::text[], %s::text[], %s::text[], %s::text[])""")
    return int(scalar(connection, query, queue, types, data, *arrays))


def take_messages(connection: Connection[Any], queue: str, consumer: str) -> bool:
    """Let a consumer of certain tables also take messages, from its next batch on; False if it takes them already.

    psycopg.errors.ObjectInUse while the consumer has an open batch.
    """
    return bool(call(connection, "take_messages", queue, consumer))


def _json(data: Any) -> Jsonb | None:
    return data if data is None or isinstance(data, Jsonb) else Jsonb(data)


def _extras(extra: Iterable[str | None]) -> list[str | None]:
    values = list(extra)
    if len(values) > _EXTRAS:
        raise GdqError(f"a message has at most {_EXTRAS} extras, not {len(values)}")
    return values + [None] * (_EXTRAS - len(values))
