"""Makes events of the queue's form from the messages of a slot's transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from gdq.consumers.slot import pgoutput
from gdq.consumers.slot.catalog import CatalogTable, SlotCatalog
from gdq.consumers.slot.transaction import SlotTransaction
from gdq.errors import GdqError
from gdq.source import Event, Operation
from gdq.typed.values import json_integer

_BOOL, _INTEGERS, _FLOATS = 16, (21, 23), (700, 701)
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "-0")

_Change = pgoutput.RowMessage | pgoutput.TruncateMessage | pgoutput.LogicalMessage


def slot_events(transaction: SlotTransaction, catalog: SlotCatalog) -> Iterator[Event]:
    """The changes of a transaction as events.

    `id`: LSN of the change; rows of one COPY may share it. `xid` has 32 bits. `time`: of the commit. `key`: the columns
    of the replica identity at the time of the change; with identity full, of today's primary key. `old`: the whole row
    with replica identity full, else the old key if it changed, else None. `new` lacks large values that an update left
    unchanged, unless `old` has them.
    """
    for lsn, message, table in slot_changes(transaction, catalog):
        if isinstance(message, pgoutput.LogicalMessage):
            yield _event(transaction, lsn, "message", None, new=_message(message, catalog))
        elif table is not None and isinstance(message, pgoutput.RowMessage):
            yield _row_event(transaction, lsn, message, table)
        elif table is not None:
            yield _event(transaction, lsn, "truncate", table.name)


def _message(message: pgoutput.LogicalMessage, catalog: SlotCatalog) -> dict[str, Any]:
    """Prefix and content of a message; content that is not text is written like a bytea, with "encoding": "bytea"."""
    try:
        return {"type": message.prefix, "data": catalog.text(message.content)}
    except (UnicodeDecodeError, psycopg.DataError):
        return {"type": message.prefix, "data": f"\\x{message.content.hex()}", "encoding": "bytea"}


def slot_changes(
    transaction: SlotTransaction, catalog: SlotCatalog
) -> Iterator[tuple[int, _Change, CatalogTable | None]]:
    """The messages that are changes, each with LSN and table; a TRUNCATE once per table."""
    relations = dict(transaction.relations)
    for lsn, message in transaction.messages():
        if isinstance(message, pgoutput.RelationMessage):
            relations[message.oid] = message
            catalog.forget(message)
        elif isinstance(message, pgoutput.LogicalMessage):
            yield lsn, message, None
        elif isinstance(message, pgoutput.RowMessage | pgoutput.TruncateMessage):
            for oid in message.oids if isinstance(message, pgoutput.TruncateMessage) else (message.oid,):
                yield lsn, message, catalog.describe(_known(relations, oid))


def _known(relations: dict[int, pgoutput.RelationMessage], oid: int) -> pgoutput.RelationMessage:
    if oid not in relations:
        raise GdqError(f"the slot sent a change of table {oid}, which it did not describe")
    return relations[oid]


def _row_event(transaction: SlotTransaction, lsn: int, row: pgoutput.RowMessage, table: CatalogTable) -> Event:
    old = _old(row, table)
    new = None if row.new is None else _image(row.new, table, old)
    held = (old if new is None else new) or {}
    key = {name: held[name] for name in table.key if name in held}
    if row.new is None and row.old_key is not None and len(key) < len(table.key):
        key = held  # the identity of the row's partition is another
    return _event(transaction, lsn, row.op, table.name, key=key or None, old=old, new=new)


def _event(
    transaction: SlotTransaction,
    lsn: int,
    op: Operation,
    table: str | None,
    *,
    key: dict[str, Any] | None = None,
    old: dict[str, Any] | None = None,
    new: dict[str, Any] | None = None,
) -> Event:
    return Event(lsn, transaction.xid, transaction.time, op, table, key, old, new, origin=transaction.origin)


def _image(row: pgoutput.TupleData, table: CatalogTable, old: dict[str, Any] | None = None) -> dict[str, Any]:
    image = {}
    for column, base_type, value in zip(table.relation.columns, table.base_types, row, strict=True):
        if not value.unchanged:
            image[column.name] = _json(value, base_type)
        elif old is not None and column.name in old:
            image[column.name] = old[column.name]
    return image


def _old(row: pgoutput.RowMessage, table: CatalogTable) -> dict[str, Any] | None:
    """The values of the old row that the server sent: a column that it did not send comes as NULL.

    No column of a key is NULL. If one is, the key is that of a partition with another replica identity than its root.
    """
    if row.old is not None and table.whole:
        return _image(row.old, table)
    sent = row.old or row.old_key
    if sent is None:
        return None
    values = {name: value for name, value in _image(sent, table).items() if value is not None}
    named = [column.name for column in table.relation.columns if column.identity]
    return {name: values[name] for name in named} if row.old is None and values.keys() >= set(named) else values


def _json(value: pgoutput.TupleValue, base_type: int) -> Any:
    """A value's text as JSON, as docs/types.md describes."""
    if value.data is None:
        return None
    if value.binary:
        raise GdqError("the slot sends binary values, but events are made from text")
    text = value.data.decode()
    if base_type == _BOOL:
        return text == "t"
    if base_type in _INTEGERS:
        return int(text)
    if base_type in _FLOATS and text not in _NO_NUMBERS:
        return json_integer(text) if text.lstrip("-").isdecimal() else float(text)
    return text
