"""Events of the queue's form, made of the messages of a transaction that came through a slot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection

from gdq.consumers.slot.pgoutput import LogicalMessage, Relation, Row, Truncate, Tuple, Value
from gdq.consumers.slot.transaction import Transaction
from gdq.errors import GdqError
from gdq.source import Event
from gdq.stream import json_integer

_BOOL, _INTEGERS, _FLOATS = 16, (21, 23), (700, 701)
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "-0")

_DESCRIBE = """
    select pg_catalog.format('%%I.%%I', %s::text, %s::text),
           array(select a.attname::text from pg_catalog.pg_index i
                   join pg_catalog.pg_attribute a on a.attrelid = i.indrelid
                    and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1])
                  where i.indrelid = %s::oid and i.indisprimary)"""
# A domain is its base type, with the modifier that the domain gives it.
_BASE_TYPES = """
    with recursive b(number, oid, modifier) as (
      select number, oid, modifier from unnest(%s::oid[], %s::int[]) with ordinality as u(oid, modifier, number)
      union all
      select b.number, t.typbasetype, t.typtypmod
        from b join pg_catalog.pg_type t on t.oid = b.oid where t.typbasetype <> 0)
    select b.oid::bigint, pg_catalog.format_type(b.oid, b.modifier) from b
     where not exists (select from pg_catalog.pg_type t where t.oid = b.oid and t.typbasetype <> 0) order by number"""


@dataclass(frozen=True, slots=True)
class Described:
    """A table as the slot told it, with what the catalog knows: its quoted name, its key's columns, its base types.

    `key` is the primary key of today, without one the replica identity. `types` are the base types' names, "-" for one
    that is gone.
    """

    name: str
    relation: Relation
    key: tuple[str, ...]
    base_types: tuple[int, ...]
    types: tuple[str, ...]


class TableNames:
    """Looks tables up in the catalog, each version once; knows the encoding of messages, too."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection
        self._encoding = connection.info.parameter_status("server_encoding")
        self._known: dict[Relation, Described] = {}

    def text(self, content: bytes) -> str:
        """Text in the database's encoding, in which the server leaves the content of messages alone.

        UnicodeDecodeError or psycopg.DataError when it is none.
        """
        if content.isascii() or self._encoding in ("UTF8", "SQL_ASCII"):
            return content.decode()
        with self._connection.transaction():
            query = "select pg_catalog.convert(%s, pg_catalog.getdatabaseencoding(), 'UTF8')"
            row = self._connection.execute(query, [content]).fetchone()
        return bytes(row[0] if row else b"").decode()

    def describe(self, relation: Relation) -> Described:
        """What is known of a table."""
        if relation not in self._known:
            values = [relation.schema, relation.name, relation.oid]
            name, primary = self._connection.execute(_DESCRIBE, values).fetchone() or ("", [])
            given = [[c.type_oid for c in relation.columns], [c.type_modifier for c in relation.columns]]
            with self._connection.transaction(force_rollback=True):
                self._connection.execute("set local search_path = pg_catalog")
                bases = self._connection.execute(_BASE_TYPES, given).fetchall()
            columns = {column.name for column in relation.columns}
            identity = [column.name for column in relation.columns if column.identity]
            key = primary if primary and columns >= set(primary) else identity if relation.identity != "f" else []
            oids, types = zip(*bases, strict=True) if bases else ((), ())
            self._known[relation] = Described(name, relation, tuple(key), oids, types)
        return self._known[relation]


def events_of(transaction: Transaction, names: TableNames) -> Iterator[Event]:
    """The changes of a transaction.

    `id` is the place of the change in the write-ahead log: rows of one COPY may share it. `xid` has 32 bits, `time` is
    that of the commit. `old` is what the replica identity gives: the whole row with `full`, else the old key where it
    changed, or nothing; `new` lacks large values that an update left as they were, unless `old` has them.
    """
    for lsn, message, table in changes_of(transaction, names):
        if isinstance(message, LogicalMessage):
            yield _event(transaction, lsn, "message", None, new=_message(message, names))
        elif table is not None and isinstance(message, Row):
            yield _row_event(transaction, lsn, message, table)
        elif table is not None:
            yield _event(transaction, lsn, "truncate", table.name)


def _message(message: LogicalMessage, names: TableNames) -> dict[str, Any]:
    """Prefix and content; content that is no text comes as PostgreSQL writes a bytea, with `encoding` saying so."""
    try:
        return {"type": message.prefix, "data": names.text(message.content)}
    except (UnicodeDecodeError, psycopg.DataError):
        return {"type": message.prefix, "data": f"\\x{message.content.hex()}", "encoding": "bytea"}


def changes_of(
    transaction: Transaction, names: TableNames
) -> Iterator[tuple[int, Row | Truncate | LogicalMessage, Described | None]]:
    """The messages that are changes, each with its LSN and its table; a TRUNCATE once for each of its tables."""
    relations = dict(transaction.relations)
    for lsn, message in transaction.messages():
        if isinstance(message, Relation):
            relations[message.oid] = message
        elif isinstance(message, LogicalMessage):
            yield lsn, message, None
        elif isinstance(message, Row | Truncate):
            for oid in message.oids if isinstance(message, Truncate) else (message.oid,):
                yield lsn, message, names.describe(_known(relations, oid))


def _known(relations: dict[int, Relation], oid: int) -> Relation:
    if oid not in relations:
        raise GdqError(f"the slot sent a change of table {oid}, which it did not describe")
    return relations[oid]


def _row_event(transaction: Transaction, lsn: int, row: Row, table: Described) -> Event:
    old = _image(row.old, table) if row.old is not None else _identity(row.old_key, table)
    new = None if row.new is None else _image(row.new, table, old)
    held = (old if new is None else new) or {}
    key = {name: held[name] for name in table.key if name in held}
    return _event(transaction, lsn, row.op, table.name, key=key or None, old=old, new=new)


def _event(
    transaction: Transaction,
    lsn: int,
    op: str,
    table: str | None,
    *,
    key: dict[str, Any] | None = None,
    old: dict[str, Any] | None = None,
    new: dict[str, Any] | None = None,
) -> Event:
    return Event(lsn, transaction.xid, transaction.time, op, table, key, old, new, origin=transaction.origin)


def _image(row: Tuple, table: Described, old: dict[str, Any] | None = None) -> dict[str, Any]:
    image = {}
    for column, base_type, value in zip(table.relation.columns, table.base_types, row, strict=True):
        if not value.unchanged:
            image[column.name] = _json(value, base_type)
        elif old is not None and column.name in old:
            image[column.name] = old[column.name]
    return image


def _identity(row: Tuple | None, table: Described) -> dict[str, Any] | None:
    if row is None:
        return None
    image = _image(row, table)
    return {column.name: image[column.name] for column in table.relation.columns if column.identity}


def _json(value: Value, base_type: int) -> Any:
    """What docs/types.md makes of a value's text."""
    if value.data is None:
        return None
    if value.binary:
        raise GdqError("the slot sends binary values, events are made of text")
    text = value.data.decode()
    if base_type == _BOOL:
        return text == "t"
    if base_type in _INTEGERS:
        return int(text)
    if base_type in _FLOATS and text not in _NO_NUMBERS:
        return json_integer(text) if text.lstrip("-").isdecimal() else float(text)
    return text
