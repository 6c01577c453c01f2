"""Changes of one table from a slot as Arrow, in the form of the queue's log rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from gdq.consumers.slot.catalog import CatalogTable, SlotCatalog
from gdq.consumers.slot.events import slot_changes
from gdq.consumers.slot.pgoutput import RowMessage, TupleData
from gdq.consumers.slot.transaction import SlotTransaction
from gdq.errors import GdqError, ResyncRequired
from gdq.event_rows import EventChoice
from gdq.log_rows import BATCH_WEIGHT, LOG_HEADER, net_batch_rows
from gdq.typed.arrow import ArrowColumn, arrow_batch_of_texts, arrow_schema
from gdq.typed.pgtypes import READ_AS_TEXT, ColumnType, OnUnsupported, column_type

if TYPE_CHECKING:
    import pyarrow as pa

# Rows of one record batch.
_ROWS = 10_000

_OPS = {"insert": "I", "update": "U", "delete": "D"}
_Texts = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The changes of `table` (`%I.%I`) in some transactions; the other fields as in SourceBatch.arrow()."""

    transactions: Sequence[SlotTransaction]
    catalog: SlotCatalog
    table: str
    unsupported: OnUnsupported = "error"
    as_text: Collection[str] = ()
    choice: EventChoice = field(default_factory=EventChoice)

    def arrow(self) -> pa.Table:
        """All changes as one table."""
        import pyarrow as pa  # noqa: PLC0415

        columns = self._columns()
        return pa.Table.from_batches(self._batches(columns), schema=arrow_schema(columns))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """As arrow(), streamed."""
        return self._batches(self._columns())

    def delta(self) -> pa.Table:
        """The net change: row images with a signed count in BATCH_WEIGHT; GdqError if the slot sends no old images."""
        import pyarrow as pa  # noqa: PLC0415

        newest = self._newest()
        kinds = self._kinds(newest)
        columns = [ArrowColumn(name, kind) for name, kind in kinds.items()]
        images: list[tuple[_Texts, int]] = []
        for _, _, change, table in self._changes(newest):
            if change is None:
                raise ResyncRequired(f"table {self.table} was truncated", hint="Copy the table anew.")
            if not (newest.whole and (change.op == "insert" or (change.old is not None and table.whole))):
                raise GdqError(
                    f"changes of {self.table} have no old rows",
                    hint=f"ALTER TABLE {self.table} REPLICA IDENTITY FULL, and its partitions too; it applies to"
                    " changes from then on.",
                )
            images += [(_texts(change.old, table), -1)] if change.old is not None else []
            images += [(_texts(change.new, table, change.old), 1)] if change.new is not None else []
        rows = [[image.get(name) for image, _ in images] for name in kinds]
        schema = arrow_schema(columns).append(pa.field(BATCH_WEIGHT, pa.int64()))
        batch = arrow_batch_of_texts(rows, columns)
        weights = pa.array([weight for _, weight in images], pa.int64())
        return net_batch_rows(pa.Table.from_arrays([*batch.columns, weights], schema=schema), list(kinds))

    def _newest(self) -> CatalogTable:
        """The table as its last change describes it."""
        found = None
        for one in self.transactions:
            for _, _, table in slot_changes(one, self.catalog):
                found = table if table is not None and table.name == self.table else found
        if found is None:
            raise GdqError(f"the batch has no changes of {self.table}")
        return found

    def _kinds(self, table: CatalogTable, keys: Collection[str] = ()) -> dict[str, ColumnType]:
        """The types of the columns that are read, and of `keys`."""
        names = [column.name for column in table.relation.columns]
        self.choice.check(self.table, names)
        return {
            name: READ_AS_TEXT
            if name in self.as_text
            else column_type(pg_type, column=name, unsupported=self.unsupported)
            for name, pg_type in zip(names, table.types, strict=True)
            if name in keys or self.choice.has(name)
        }

    def _columns(self) -> list[ArrowColumn]:
        newest = self._newest()
        named = dict.fromkeys([*newest.key, *(n for *_, table in self._changes(newest) for n in table.key)])
        kinds = self._kinds(newest, named)
        keys = [name for name in named if name in kinds]
        sides = {"key_": keys, "old_": kinds if self.choice.images == "both" else keys, "new_": kinds}
        return [
            *LOG_HEADER,
            *(ArrowColumn(side + name, kinds[name], column=name) for side, names in sides.items() for name in names),
        ]

    def _changes(self, newest: CatalogTable) -> Iterator[tuple[SlotTransaction, int, RowMessage | None, CatalogTable]]:
        """The table's changes, None for a TRUNCATE; GdqError if a column changed its type."""
        types = dict(zip((c.name for c in newest.relation.columns), newest.types, strict=True))
        for one in self.transactions:
            for lsn, change, table in slot_changes(one, self.catalog):
                if table is None or table.name != self.table:
                    continue
                for column, kind in zip(table.relation.columns, table.types, strict=True):
                    if types.get(column.name, kind) != kind:
                        raise GdqError(f'column "{column.name}" of {self.table} has changed its type in the batch')
                yield one, lsn, change if isinstance(change, RowMessage) else None, table

    def _batches(self, columns: list[ArrowColumn]) -> Iterator[pa.RecordBatch]:
        rows = self._rows()
        while some := list(islice(rows, _ROWS)):
            yield arrow_batch_of_texts([[row.get(column.label) for row in some] for column in columns], columns)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for one, lsn, change, table in self._changes(self._newest()):
            if change is None:
                continue
            old = None if change.old is None and change.old_key is None else change.old or change.old_key
            before = {} if old is None else _texts(old, table)
            after = {} if change.new is None else _texts(change.new, table, change.old, change.old_key)
            key = after if change.new is not None else before
            yield {
                "ev_id": str(lsn),
                "ev_txid": str(one.xid),
                "ev_time": one.time.isoformat(sep=" "),
                "ev_op": _OPS[change.op],
                **{f"key_{name}": key.get(name) for name in table.key},
                **{f"old_{name}": text for name, text in before.items()},
                **{f"new_{name}": text for name, text in after.items()},
            }


def _texts(
    row: TupleData, table: CatalogTable, old: TupleData | None = None, old_key: TupleData | None = None
) -> _Texts:
    """The texts of a row; a large value that was not sent is taken from `old` or `old_key`, or left out."""
    texts: _Texts = {}
    for number, (column, value) in enumerate(zip(table.relation.columns, row, strict=True)):
        before = old_key if old is None and column.identity else old
        held = before[number] if value.unchanged and before is not None else value
        if not held.unchanged:
            texts[column.name] = None if held.data is None else held.data.decode()
    return texts
