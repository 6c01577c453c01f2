"""Makes events of the queue's form from the messages of a slot's transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from gdq.consumers.slot import pgoutput
from gdq.consumers.slot.catalog import CatalogTable, SlotCatalog
from gdq.consumers.slot.transaction import SlotTransaction
from gdq.errors import GdqError
from gdq.event_rows import EventChoice
from gdq.source import Event, Operation, make_event
from gdq.typed.values import value_of_text

_Change = pgoutput.RowMessage | pgoutput.TruncateMessage | pgoutput.LogicalMessage


def slot_events(transaction: SlotTransaction, catalog: SlotCatalog, choice: EventChoice) -> Iterator[Event]:
    """The changes of a transaction as events, with what `choice` names of their images.

    `id`: LSN of the change; rows of one COPY may share it. `xid` has 32 bits. `time`: of the commit. `key`: the columns
    of the replica identity at the time of the change; with identity full, of today's primary key. `old`: the whole row
    with replica identity full, else the old key if it changed, else None. `new` lacks large values that an update left
    unchanged, unless `old` has them: `unchanged` names their columns.
    """
    for lsn, message, table in slot_changes(transaction, catalog):
        if isinstance(message, pgoutput.LogicalMessage):
            yield _other_event(transaction, lsn, "message", None, _message(message, catalog))
        elif table is not None and isinstance(message, pgoutput.RowMessage):
            yield _row_event(transaction, lsn, message, table, choice)
        elif table is not None:
            yield _other_event(transaction, lsn, "truncate", table.name)


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


def _row_event(
    transaction: SlotTransaction, lsn: int, row: pgoutput.RowMessage, table: CatalogTable, choice: EventChoice
) -> Event:
    old = _old(row, table)
    new = None if row.new is None else _image(row.new, table, old)
    held = (old if new is None else new) or {}
    key = {name: held[name] for name in table.key if name in held}
    if row.new is None and row.old_key is not None and len(key) < len(table.key):
        key = held  # the identity of the row's partition is another
    lacks = [c.name for c in table.relation.columns if row.op == "update" and c.name not in held and choice.has(c.name)]
    images = (key or None, choice.old(old), choice.new(new))
    one, more = transaction, (0, transaction.origin, table.value_types, tuple(lacks))
    return make_event(lsn, one.xid, one.time, row.op, table.name, *images, *more)


def _other_event(
    transaction: SlotTransaction, lsn: int, op: Operation, table: str | None, new: dict[str, Any] | None = None
) -> Event:
    return Event(lsn, transaction.xid, transaction.time, op, table, None, None, new, origin=transaction.origin)


def _image(row: pgoutput.TupleData, table: CatalogTable, old: dict[str, Any] | None = None) -> dict[str, Any]:
    image = {}
    for column, value in zip(table.relation.columns, row, strict=True):
        if not value.unchanged:
            image[column.name] = _value(value, table.value_types[column.name])
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


def _value(value: pgoutput.TupleValue, type_: str) -> Any:
    if value.data is None:
        return None
    if value.binary:
        raise GdqError("the slot sends binary values, but events are made from text")
    return value_of_text(value.data.decode(), type_)
