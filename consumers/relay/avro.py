"""The form avro: records in Avro's binary form for Kafka, whose schemas are in a registry and follow the tables."""

from __future__ import annotations

import io
import json
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime
from decimal import Decimal
from functools import cached_property
from typing import Any
from urllib.parse import quote
from uuid import UUID

import psycopg
from psycopg import Connection
from psycopg.rows import tuple_row

from gdq.consumers.debezium.envelope import table_parts
from gdq.consumers.relay.order import Keys
from gdq.consumers.relay.registry import Registry
from gdq.consumers.relay.sink import Record
from gdq.errors import GdqError, mapped_errors
from gdq.extra import extra_named
from gdq.json_text import json_text
from gdq.qualified_sql import qualified
from gdq.retry import DeadLetter
from gdq.source import Event
from gdq.typed.pgtypes import column_type
from gdq.typed.values import json_value

_COLUMNS = qualified("select name, type, log_type from gdq.table_columns(%s, %s::pg_catalog.regclass)")

_LONG_MICROS = {"type": "long", "logicalType": "timestamp-micros"}
_STRING = "string"
# Avro's type, and the classes of Python whose values it holds; all other types are text.
_TYPES: dict[str, tuple[Any, tuple[type, ...]]] = {
    "boolean": ("boolean", (bool,)),
    "smallint": ("int", (int,)),
    "integer": ("int", (int,)),
    "bigint": ("long", (int,)),
    "oid": ("long", (int,)),
    "real": ("float", (float, int)),
    "double precision": ("double", (float, int)),
    "bytea": ("bytes", (bytes,)),
    "uuid": ({"type": "string", "logicalType": "uuid"}, (UUID,)),
    "date": ({"type": "int", "logicalType": "date"}, (date,)),
    "timestamp without time zone": ({"type": "long", "logicalType": "local-timestamp-micros"}, (datetime,)),
    "timestamp with time zone": (_LONG_MICROS, (datetime,)),
}
_HEADER = [
    {"name": "id", "type": "long"},
    {"name": "xid", "type": "long"},
    {"name": "time", "type": _LONG_MICROS},
    {"name": "op", "type": "string"},
]
_MESSAGE = {
    "type": "record",
    "name": "Message",
    "namespace": "gdq",
    "fields": [
        *_HEADER,
        {"name": "type", "type": ["null", "string"], "default": None},
        {"name": "data", "type": ["null", "string"], "default": None, "doc": "JSON"},
        {"name": "extra", "type": {"type": "map", "values": "string"}, "default": {}},
    ],
}
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]")
_ZERO_AND_NUMBER = struct.Struct(">bI")


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a table: its field's name and type, and which values of Python that holds."""

    name: str
    field: str
    log_type: str
    avro: Any
    classes: tuple[type, ...]

    def value(self, value: Any) -> Any:
        """A value of an event as fastavro takes it; DeadLetter if the type does not hold it."""
        if value is None:
            return None
        if self.avro == _STRING:
            text = json_value(value, self.log_type)
            return text if isinstance(text, str) else json_text(text)
        if not isinstance(value, self.classes) or (isinstance(value, Decimal) and not self._holds(value)):
            shown = self.avro if isinstance(self.avro, str) else self.avro["logicalType"]
            raise DeadLetter(f'column "{self.name}": {value} does not fit {shown}; --as-text sends the column as text')
        return value

    def _holds(self, value: Decimal) -> bool:
        _, digits, exponent = value.as_tuple()
        if not isinstance(exponent, int):
            return False  # NaN
        scale, precision = self.avro["scale"], self.avro["precision"]
        return exponent >= -scale and (not value or len(digits) + exponent + scale <= precision)


class _Schema:
    """A schema, and how a value is written by it."""

    def __init__(self, schema: Any) -> None:
        from fastavro import parse_schema  # noqa: PLC0415 (of an extra)

        self.text = json.dumps(schema)
        self._parsed = parse_schema(schema)

    def encoded(self, number: int, value: Any) -> bytes:
        """A value as Confluent's clients write it: a zero, the schema's number, the value."""
        from fastavro import schemaless_writer  # noqa: PLC0415 (of an extra)

        out = io.BytesIO()
        out.write(_ZERO_AND_NUMBER.pack(0, number))
        schemaless_writer(out, self._parsed, value)
        return out.getvalue()


class _Table:
    """The schemas of a table's events with one set of columns. `chosen`: the columns of a key that is not its own."""

    def __init__(self, table: str, columns: list[_Column], chosen: Iterable[str] | None) -> None:
        self._namespace = ".".join(_name(part) for part in table_parts(table))
        self._columns = columns
        self._chosen = chosen
        self._keys: dict[tuple[str, ...], _Schema] = {}

    @cached_property
    def schema(self) -> _Schema:
        """The schema of the values."""
        fields = [self._field(column, ["null", column.avro], default=None) for column in self._columns]
        row = {"type": "record", "name": "Row", "fields": fields}
        return _Schema(
            {
                "type": "record",
                "name": "Event",
                "namespace": self._namespace,
                "fields": [
                    *_HEADER,
                    {"name": "table", "type": "string"},
                    {"name": "old", "type": ["null", row], "default": None},
                    {"name": "new", "type": ["null", "Row"], "default": None},
                    {"name": "unchanged", "type": {"type": "array", "items": "string"}, "default": []},
                ],
            }
        )

    def value(self, event: Event) -> dict[str, Any]:
        """The value of an event."""
        made = {"id": event.id, "xid": event.xid, "time": event.time, "op": event.op, "table": event.table}
        return made | {"old": self._row(event.old), "new": self._row(event.new), "unchanged": list(event.unchanged)}

    def key(self, event: Event) -> tuple[_Schema, dict[str, Any]] | None:
        """The schema of an event's key, and the key."""
        image = event.key if self._chosen is None else event.old if event.op == "delete" else event.new
        if not image:
            return None
        return self._key(image, tuple(image if self._chosen is None else self._chosen))

    def gone_key(self, event: Event) -> tuple[_Schema, dict[str, Any]] | None:
        """As key(), of the row that an event took away, or gave another key; None for keys that are not its own."""
        own, old = event.key, event.old
        if not own or self._chosen is not None:
            return None
        if event.op == "delete":
            return self.key(event)
        if event.op != "update" or not old or not own.keys() <= old.keys():
            return None
        before = {name: old[name] for name in own}
        return None if before == own else self._key(before, tuple(own))

    def _key(self, image: Mapping[str, Any], names: tuple[str, ...]) -> tuple[_Schema, dict[str, Any]]:
        columns = [column for column in self._columns if column.name in names]
        if names not in self._keys:
            fields = [
                self._field(column, column.avro)
                if self._chosen is None
                else self._field(column, ["null", column.avro], default=None)
                for column in columns
            ]
            key = {"type": "record", "name": "Key", "namespace": self._namespace, "fields": fields}
            self._keys[names] = _Schema(key)
        return self._keys[names], {column.field: column.value(image[column.name]) for column in columns}

    def _row(self, image: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if image is None:
            return None
        return {column.field: column.value(image[column.name]) for column in self._columns if column.name in image}

    @staticmethod
    def _field(column: _Column, type_: Any, **more: Any) -> dict[str, Any]:
        doc = {} if column.field == column.name else {"doc": column.name}
        return {"name": column.field, "type": type_} | more | doc


class AvroForm:
    """Makes records in Avro's form. `topic`: that of a record. `as_text`: columns that are sent as text.

    `tombstones`: a record without a value for each key that a row had and has no longer. DDL has no record: what
    follows it has other schemas.
    """

    takes_json = False

    def __init__(
        self,
        connection: Connection[Any],
        queue: str,
        era: str,
        *,
        topic: Callable[[Record], str],
        registry: Registry,
        keys: Keys,
        as_text: Collection[str],
        tombstones: bool = False,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._era = era
        self._topic = topic
        self._registry = registry
        self._chosen_keys = keys
        self._as_text = frozenset(as_text)
        self._tombstones = tombstones
        self._message = _Schema(_MESSAGE)
        self._text_key = _Schema("string")
        self._catalog: dict[str, dict[str, tuple[str, str]]] = {}
        self._last: dict[str, Mapping[str, str]] = {}
        self._tables: dict[tuple[str, tuple[tuple[str, str], ...]], _Table] = {}

    def __call__(self, event: Event, key: str | None, number: str) -> Iterator[Record]:
        if event.op == "ddl":
            self._catalog.clear()
            self._tables.clear()
            return
        id_ = f"{quote(self._queue, safe='')}/{self._era}/{number}/{event.op}"
        record = Record(id_, self._queue, key, None, "application/avro", event)
        topic = self._topic(record)
        made_key: tuple[_Schema, Any] | None
        gone = None
        if event.op == "message":
            value = self._encoded(topic, "value", self._message, _message_value(event))
            made_key = None if key is None else (self._text_key, key)
        else:
            table = self._table(event)
            value = self._encoded(topic, "value", table.schema, table.value(event))
            made_key = table.key(event)
            gone = table.gone_key(event) if self._tombstones else None
        encoded_key = None if made_key is None else self._encoded(topic, "key", *made_key)
        yield replace(record, value=value, encoded_key=encoded_key)
        if gone is not None:
            yield replace(record, id=f"{id_}/tombstone", encoded_key=self._encoded(topic, "key", *gone))

    def _encoded(self, topic: str, part: str, schema: _Schema, value: Any) -> bytes:
        return schema.encoded(self._registry.number(f"{topic}-{part}", schema.text), value)

    def _table(self, event: Event) -> _Table:
        """The schemas for an event: of the columns that it has, in the order in which the table has them now."""
        name = event.table or ""
        types = event.types
        if types is None:  # a truncate, or an event of a table that is no longer captured
            types = self._last.get(name) or {column: found[1] for column, found in self._columns(name).items()}
        self._last[name] = types
        known = name, tuple(sorted(types.items()))
        if known not in self._tables:
            self._tables[known] = _Table(name, self._typed(name, types), self._chosen_keys.chosen(name))
        return self._tables[known]

    def _typed(self, table: str, types: Mapping[str, str]) -> list[_Column]:
        catalog = self._columns(table)
        places = {name: place for place, name in enumerate(catalog)}
        fields: dict[str, _Column] = {}
        for name in sorted(types, key=lambda name: (places.get(name, len(places)), name)):
            field = _name(name)
            while field in fields:
                field += "_"
            declared, log_type = catalog.get(name, (types[name], types[name]))
            avro, classes = self._type(name, declared if log_type == types[name] else types[name], types[name])
            fields[field] = _Column(name, field, types[name], avro, classes)
        return list(fields.values())

    def _type(self, name: str, declared: str, log_type: str) -> tuple[Any, tuple[type, ...]]:
        if name in self._as_text:
            return _STRING, ()
        if log_type == "numeric" and (decimal := column_type(declared, log_type=log_type, unsupported="text").decimal):
            precision, scale = decimal
            return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}, (Decimal,)
        return _TYPES.get(log_type, (_STRING, ()))

    def _columns(self, table: str) -> dict[str, tuple[str, str]]:
        """The declared type and the type in the log of each captured column; none of a table that is gone."""
        if table not in self._catalog:
            found: list[tuple[str, str, str]] = []
            try:
                with mapped_errors(), self._connection.transaction():
                    cursor = self._connection.cursor(row_factory=tuple_row)
                    found = cursor.execute(_COLUMNS, [self._queue, table]).fetchall()
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedObject, psycopg.errors.InvalidSchemaName):
                pass
            self._catalog[table] = {name: (declared, log_type) for name, declared, log_type in found}
        return self._catalog[table]


@extra_named()
def avro_topic(sink: object) -> Callable[[Record], str]:
    """What names the topic of a record in the form avro; GdqError if a sink has no topics."""
    import fastavro  # noqa: F401, PLC0415 (of an extra: missed here, not at the first record)

    topic: Callable[[Record], str] | None = getattr(sink, "topic", None)
    if topic is None:
        raise GdqError("the form avro needs a receiver with topics", hint="Such as kafka://host:9092/shop.{table}.")
    return topic


def _message_value(event: Event) -> dict[str, Any]:
    new = {name: value for name, value in (event.new or {}).items() if value is not None}
    kind, data = new.pop("type", None), new.pop("data", None)
    made = {"id": event.id, "xid": event.xid, "time": event.time, "op": event.op, "type": kind}
    return made | {"data": None if data is None else json_text(data), "extra": {n: str(v) for n, v in new.items()}}


def _name(text: str) -> str:
    """A name as Avro allows it."""
    name = _NOT_IN_NAMES.sub("_", text)
    return f"_{name}" if not name or name[0].isdigit() else name
