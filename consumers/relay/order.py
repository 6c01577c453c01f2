"""The order of keys: which events have to stay in order with each other, and which of them wait."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from psycopg import Connection

from gdq.call import rows
from gdq.errors import GdqError
from gdq.json_text import json_text
from gdq.source import Event

# What stands for the table of messages.
_MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class Place:
    """An event's place in the order: its table and its keys, old and new.

    No keys: it stays in order with all events of its table, as TRUNCATE does. `text`: the key as the record shows it.
    """

    table: str
    keys: tuple[str, ...]
    text: str | None


class Keys:
    """Finds the keys of events. `columns`: for tables, by `schema.table`, the columns in place of the primary key.

    Keys of chosen columns are common to all tables: an order and its items with one customer's number are in order.
    """

    def __init__(self, columns: Mapping[str, Sequence[str]]) -> None:
        self._columns = columns

    def chosen(self, table: str) -> Sequence[str] | None:
        """The columns that were chosen for a table's key."""
        return self._columns.get(table)

    def place(self, event: Event) -> Place:
        """The place of an event; GdqError if it lacks a chosen column."""
        event = event.in_json()
        if event.op == "message":
            key = (event.new or {}).get("extra1")
            # as a chosen key, so that a message about an order and its rows can be kept in order
            return Place(_MESSAGES, (json_text([_MESSAGES, None] if key is None else [key]),), key)
        table = event.table or ""
        if event.op not in ("insert", "update", "delete", "read"):
            return Place(table, (), None)
        columns = self._columns.get(table)
        if columns is None:
            return self._own(event, table)
        image = event.old if event.op == "delete" else event.new
        now = _chosen(event, image, columns)
        keys = [json_text(now)]
        if event.op == "update":
            keys.append(json_text(_chosen(event, event.old, columns)))
        return Place(table, tuple(dict.fromkeys(keys)), _text(now))

    def _own(self, event: Event, table: str) -> Place:
        key = event.key
        if not key:
            return Place(table, (json_text([table, None]),), None)
        keys = [json_text([table, key])]
        if event.op == "update" and event.old is not None and key.keys() <= event.old.keys():
            keys.append(json_text([table, {name: event.old[name] for name in key}]))
        return Place(table, tuple(dict.fromkeys(keys)), _text(list(key.values())))


class Waiting:
    """The events that wait, by key and table: of each the first, and the seconds until it is due."""

    def __init__(self) -> None:
        self._of_key: dict[str, tuple[int, float]] = {}
        self._of_table: dict[str, tuple[int, float]] = {}
        self._whole: dict[str, tuple[int, float]] = {}

    @classmethod
    def read(cls, connection: Connection[Any], queue: str, consumer: str, keys: Keys) -> Waiting:
        """The events of a consumer that wait for a retry, but those that the open batch brings again."""
        waiting = cls()
        query = "select * from gdq.waiting_events(%s, %s)"
        for row in rows(connection, _WaitingRow, query, queue, consumer):
            event: Any = Event(row.ev_id, row.ev_txid, row.ev_time, row.op, row.tbl, row.key, row.old, row.new)  # type: ignore[arg-type]
            waiting.add(row.ev_id, keys.place(event), row.due_in)
        return waiting

    def add(self, number: int, place: Place, due_in: float) -> None:
        """An event waits."""
        found = (number, due_in)
        for key in place.keys:
            self._of_key[key] = min(found, self._of_key.get(key, found))
        self._of_table[place.table] = min(found, self._of_table.get(place.table, found))
        if not place.keys:
            self._whole[place.table] = min(found, self._whole.get(place.table, found))

    def before(self, number: int, place: Place) -> tuple[int, timedelta] | None:
        """The first event that has to come before this one and waits, and when to try this one; None: nothing waits."""
        found = [self._of_key.get(key) for key in place.keys]
        found.append(self._whole.get(place.table) if place.keys else self._of_table.get(place.table))
        earlier = [one for one in found if one is not None and one[0] < number]
        if not earlier:
            return None
        first, due_in = min(earlier)
        # a little later than that event, so that it comes along; in whole seconds, to put many aside at once
        return first, timedelta(seconds=math.ceil(max(due_in, 0)) + 1)


@dataclass(frozen=True, slots=True)
class _WaitingRow:
    ev_id: int
    ev_txid: int
    ev_time: datetime
    op: str
    tbl: str | None
    key: dict[str, Any] | None
    old: dict[str, Any] | None
    new: dict[str, Any] | None
    due_in: float


def _chosen(event: Event, image: dict[str, Any] | None, columns: Sequence[str]) -> list[Any]:
    missing = [name for name in columns if name not in (image or {})]
    if image is None or missing:
        raise GdqError(
            f"event {event.id} of table {event.table} has no value of {', '.join(missing)} for its key",
            hint="A key of other columns needs these in both images: capture the table in mode full, with them.",
        )
    return [image[name] for name in columns]


def _text(values: Sequence[Any]) -> str:
    return ",".join(value if isinstance(value, str) else json_text(value) for value in values)
