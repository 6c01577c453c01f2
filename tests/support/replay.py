"""The rows that tables have after some events, for comparing what two paths, or a path and the tables, come to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gdq.errors import GdqError
from gdq.source import Event

Row = dict[str, Any]


class Replay:
    """Applies events to empty tables, or to what other events made; all rows are in memory.

    An update may lack columns and its old image, as those of a slot do; they stay as they were, and so do those
    that DDL drops or renames. Rows of a table without
    a key are found by their whole old image. GdqError for a change of a row that is not there, or that is there
    already: events are missing, or are too many, or a deferred key was held twice for a moment.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._tables: dict[str, dict[str, list[Row]]] = {}
        self.apply(events)

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events of whole transactions, each key's in order."""
        for event in events:
            if event.table is None or event.op in ("ddl", "message"):
                continue
            rows = self._tables.setdefault(event.table, {})
            if event.op == "truncate":
                rows.clear()
                continue
            before = self._take(rows, event) if event.op != "insert" else {}
            if event.new is not None:
                row = {**before, **event.new}
                place = _place(event.key, row)
                if event.key and rows.get(place):
                    raise GdqError(f"an {event.op} of {event.table} comes to a row that is there: {event.key}")
                rows.setdefault(place, []).append(row)

    def rows(self, table: str) -> list[Row]:
        """The rows of a table, in no order."""
        return [row for some in self._tables.get(table, {}).values() for row in some]

    def _take(self, rows: dict[str, list[Row]], event: Event) -> Row:
        old = event.old or {}
        key = {name: old.get(name, value) for name, value in event.key.items()} if event.key else None
        place = _place(key, old)
        found = rows.get(place)
        if not found:
            raise GdqError(f"{event.op} of {event.table}: no such row is there: {key or old}")
        row = found.pop()
        if not found:
            del rows[place]
        return row


def _place(key: Row | None, row: Row) -> str:
    return json.dumps(key or row, sort_keys=True, default=str)
