"""Events as lines of JSON in Debezium's envelope: `gdq consume QUEUE CONSUMER --format debezium`."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from psycopg import Connection
from psycopg.rows import tuple_row

from gdq import __version__
from gdq.consumers.debezium.values import DebeziumKind, debezium_value, unavailable_value
from gdq.json_text import json_text
from gdq.qualified_sql import qualified
from gdq.source import Event

_Record = dict[str, Any]
_Image = dict[str, Any]

# By name, not by regclass: a reader needs no right on the table's schema. A domain is its base type.
_COLUMNS = qualified("""
    with recursive c(name, oid, modifier) as (
      select a.attname::text, a.atttypid, a.atttypmod
        from pg_catalog.pg_attribute a join pg_catalog.pg_class r on r.oid = a.attrelid
        join pg_catalog.pg_namespace n on n.oid = r.relnamespace
       where n.nspname = %s and r.relname = %s and a.attnum > 0 and not a.attisdropped
      union all
      select c.name, t.typbasetype, case when t.typtypmod = -1 then c.modifier else t.typtypmod end
        from c join pg_catalog.pg_type t on t.oid = c.oid where t.typbasetype <> 0)
    select c.name, coalesce(e.typname, t.typname)::text, c.modifier, e.oid is not null
      from c join pg_catalog.pg_type t on t.oid = c.oid
      left join pg_catalog.pg_type e on e.oid = t.typelem and t.typcategory = 'A'
     where t.typbasetype = 0""")

_OPS = {"insert": "c", "update": "u", "delete": "d", "truncate": "t", "message": "m", "read": "r"}
_IN_MESSAGE = ("type", "data", "encoding")


def debezium_printer(
    queue: str, *, has_lsn: bool, tombstones: bool = False
) -> Callable[[Connection[Any], Iterator[Event]], None]:
    """A handler that prints events in Debezium's form and flushes the output before the batch is finished.

    `has_lsn`: the events' numbers are LSNs. `tombstones`: print a record without a value after each delete. DDL events
    are left out: Debezium's PostgreSQL connector has none.
    """

    def consume(connection: Connection[Any], events: Iterator[Event]) -> None:
        envelope = Envelope(connection, queue, has_lsn=has_lsn, tombstones=tombstones)
        for event in events:
            for record in envelope.records(event):
                print(json_text(record))
        sys.stdout.flush()

    return consume


class Envelope:
    """Makes Debezium's records from events: a key, a value, and headers if Debezium has them.

    The columns' types are read from the catalog at a table's first event, and again after DDL.
    """

    def __init__(
        self, connection: Connection[Any], queue: str, *, has_lsn: bool = False, tombstones: bool = False
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._has_lsn = has_lsn
        self._tombstones = tombstones
        self._known: dict[tuple[str, str], dict[str, DebeziumKind]] = {}

    def records(self, event: Event) -> Iterator[_Record]:
        """The records of one event: none for DDL, two for an update of the key, one more for each tombstone."""
        if event.op not in _OPS:
            self._known.clear()
        elif event.op == "message":
            yield self._message(event)
        elif event.op == "truncate":
            yield {"key": None, "value": self._value(event, "t", None, None)}
        else:
            yield from self._row(event)

    def _row(self, event: Event) -> Iterator[_Record]:
        event = event.in_json()
        kinds = self._kinds(*table_parts(event.table))
        key, old, new = (_converted(image, kinds) for image in (event.key, event.old, event.new))
        if event.unchanged and new is not None:
            lacking = {name: unavailable_value(kinds.get(name)) for name in event.unchanged}
            # an old image may be a key alone
            old = old | lacking if old is not None and old.keys() == new.keys() else old
            new |= lacking
        if event.op == "delete":
            yield from self._deleted(event, key, _with_key(key, old))
            return
        new = _with_key(key, new)
        before = {name: old[name] for name in key} if key and old and key.keys() <= old.keys() else key
        if event.op == "update" and before != key:
            yield from self._deleted(event, before, old, {"__debezium.newkey": key})
            headers = {"__debezium.oldkey": before}
            yield {"key": key, "value": self._value(event, "c", None, new), "headers": headers}
            return
        yield {"key": key, "value": self._value(event, _OPS[event.op], old, new)}

    def _deleted(
        self, event: Event, key: _Image | None, old: _Image | None, headers: _Record | None = None
    ) -> Iterator[_Record]:
        more = {"headers": headers} if headers else {}
        yield {"key": key, "value": self._value(event, "d", old, None)} | more
        if self._tombstones and key is not None:
            yield {"key": key, "value": None} | more

    def _message(self, event: Event) -> _Record:
        new = event.new or {}
        data = new.get("data")
        text = data if isinstance(data, str) or data is None else json.dumps(data, ensure_ascii=False)
        content = (text or "").encode()
        if new.get("encoding") == "bytea":
            content = bytes.fromhex(content.decode().removeprefix("\\x"))
        shown = None if text is None else base64.b64encode(content).decode()
        message = {"prefix": new.get("type"), "content": shown}
        message |= {name: value for name, value in new.items() if name not in _IN_MESSAGE and value is not None}
        source, now = self._source(event, "", ""), time.time_ns() // 1_000_000
        value = {"op": "m", "ts_ms": now, "source": source, "transaction": None, "message": message}
        return {"key": {"prefix": message["prefix"]}, "value": value}

    def _value(self, event: Event, op: str, before: _Image | None, after: _Image | None) -> _Record:
        source = self._source(event, *table_parts(event.table))
        times = _times(time.time_ns())
        return {"before": before, "after": after, "source": source, "op": op, **times, "transaction": None}

    def _source(self, event: Event, schema: str, table: str) -> _Record:
        # integers throughout: a float has no room for the microseconds of today
        whole = int(event.time.replace(microsecond=0).timestamp())
        return {
            "version": __version__,
            "connector": "postgresql",
            "name": self._queue,
            **_times((whole * 1_000_000 + event.time.microsecond) * 1000),
            "snapshot": "true" if event.op == "read" else "false",
            "db": self._connection.info.dbname,
            "sequence": f'[null,"{event.id}"]',
            "schema": schema,
            "table": table,
            "txId": event.xid or None,
            "lsn": event.id if self._has_lsn else None,
            "xmin": None,
        }

    def _kinds(self, schema: str, table: str) -> dict[str, DebeziumKind]:
        if (schema, table) not in self._known:
            with self._connection.cursor(row_factory=tuple_row) as cursor:
                rows = cursor.execute(_COLUMNS, [schema, table]).fetchall()
            self._known[schema, table] = {name: DebeziumKind(*kind) for name, *kind in rows}
        return self._known[schema, table]


def _converted(image: _Image | None, kinds: dict[str, DebeziumKind]) -> _Image | None:
    return None if image is None else {name: debezium_value(value, kinds.get(name)) for name, value in image.items()}


def _with_key(key: _Image | None, image: _Image | None) -> _Image | None:
    """The image of a row in mode pk: the key and the included columns."""
    return image if key is None or (image is not None and key.keys() <= image.keys()) else key | (image or {})


def _times(nanoseconds: int) -> dict[str, int]:
    return {"ts_ms": nanoseconds // 1_000_000, "ts_us": nanoseconds // 1000, "ts_ns": nanoseconds}


@lru_cache(maxsize=1024)
def table_parts(table: str | None) -> tuple[str, str]:
    """Schema and name of `%I.%I`, without quotes."""
    parts, text = [], table or ""
    while text:
        if text.startswith('"'):
            end = 1
            while text[end] != '"' or text[end + 1 : end + 2] == '"':
                end += 2 if text[end] == '"' else 1
            parts.append(text[1:end].replace('""', '"'))
            text = text[end + 2 :]
        else:
            part, _, text = text.partition(".")
            parts.append(part)
    return (parts[0], parts[1]) if len(parts) == 2 else ("", table or "")
