"""The changes of one table that came through a slot as Arrow, in the form of the queue's log rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from gdq.batch import HEADER, WEIGHT, net_rows
from gdq.consumers.slot.events import Described, TableNames, changes_of
from gdq.consumers.slot.pgoutput import Row, Tuple
from gdq.consumers.slot.transaction import Transaction
from gdq.errors import GdqError, ResyncRequired
from gdq.typed.arrow import Column, from_texts, schema_of
from gdq.typed.pgtypes import AS_TEXT, ColumnType, Unsupported, column_type

if TYPE_CHECKING:
    import pyarrow as pa

# Rows of one record batch.
_ROWS = 10_000

_OPS = {"insert": "I", "update": "U", "delete": "D"}
_SIDES = ("key_", "old_", "new_")

Texts = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The changes of `table` (`%I.%I`) in some transactions; `unsupported` and `as_text` as in SourceBatch.arrow()."""

    transactions: Sequence[Transaction]
    names: TableNames
    table: str
    unsupported: Unsupported = "error"
    as_text: Collection[str] = ()

    def arrow(self) -> pa.Table:
        """All of them as one table."""
        import pyarrow as pa  # noqa: PLC0415

        columns = self._columns()
        return pa.Table.from_batches(self._batches(columns), schema=schema_of(columns))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The same, streamed."""
        return self._batches(self._columns())

    def delta(self) -> pa.Table:
        """The net change: row images with a signed count in WEIGHT. GdqError where the slot sends no old images."""
        import pyarrow as pa  # noqa: PLC0415

        newest = self._newest()
        if newest.relation.identity != "f":
            raise GdqError(
                f"changes of {self.table} have no old rows",
                hint=f"ALTER TABLE {self.table} REPLICA IDENTITY FULL; it counts for changes from then on.",
            )
        kinds = self._kinds(newest)
        columns = [Column(name, kind) for name, kind in kinds.items()]
        images: list[tuple[Texts, int]] = []
        for _, _, change, table in self._changes(newest):
            if change is None:
                raise ResyncRequired(f"table {self.table} was truncated", hint="Copy the table anew.")
            images += [(_texts(change.old, table), -1)] if change.old is not None else []
            images += [(_texts(change.new, table, change.old), 1)] if change.new is not None else []
        rows = [[image.get(name) for image, _ in images] for name in kinds]
        schema = schema_of(columns).append(pa.field(WEIGHT, pa.int64()))
        batch = from_texts(rows, columns)
        weights = pa.array([weight for _, weight in images], pa.int64())
        return net_rows(pa.Table.from_arrays([*batch.columns, weights], schema=schema), list(kinds))

    def _newest(self) -> Described:
        """The table as its last change has it."""
        found = None
        for one in self.transactions:
            for _, _, table in changes_of(one, self.names):
                found = table if table is not None and table.name == self.table else found
        if found is None:
            raise GdqError(f"the batch has no changes of {self.table}")
        return found

    def _kinds(self, table: Described) -> dict[str, ColumnType]:
        return {
            column.name: self._kind(column.name, kind)
            for column, kind in zip(table.relation.columns, table.types, strict=True)
        }

    def _kind(self, name: str, pg_type: str) -> ColumnType:
        chosen = name in self.as_text
        kind = column_type(pg_type, column=name, unsupported="text" if chosen else self.unsupported)
        return AS_TEXT if chosen else kind

    def _columns(self) -> list[Column]:
        newest = self._newest()
        kinds = self._kinds(newest)
        keys = [Column(f"key_{name}", kinds[name], column=name) for name in newest.key]
        return [
            *HEADER,
            *keys,
            *(Column(side + name, kind, column=name) for side in _SIDES[1:] for name, kind in kinds.items()),
        ]

    def _changes(self, newest: Described) -> Iterator[tuple[Transaction, int, Row | None, Described]]:
        """The changes of the table, None for a TRUNCATE. GdqError when a column had another type before."""
        types = dict(zip((c.name for c in newest.relation.columns), newest.types, strict=True))
        for one in self.transactions:
            for lsn, change, table in changes_of(one, self.names):
                if table is None or table.name != self.table:
                    continue
                for column, kind in zip(table.relation.columns, table.types, strict=True):
                    if types.get(column.name, kind) != kind:
                        raise GdqError(f'column "{column.name}" of {self.table} has changed its type in the batch')
                yield one, lsn, change if isinstance(change, Row) else None, table

    def _batches(self, columns: list[Column]) -> Iterator[pa.RecordBatch]:
        rows = self._rows()
        while some := list(islice(rows, _ROWS)):
            yield from_texts([[row.get(column.label) for row in some] for column in columns], columns)

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


def _texts(row: Tuple, table: Described, old: Tuple | None = None, old_key: Tuple | None = None) -> Texts:
    """The texts of a row; a large value that was not sent again is that of `old` or `old_key`, missing without it."""
    texts: Texts = {}
    for number, (column, value) in enumerate(zip(table.relation.columns, row, strict=True)):
        before = old_key if old is None and column.identity else old
        held = before[number] if value.unchanged and before is not None else value
        if not held.unchanged:
            texts[column.name] = None if held.data is None else held.data.decode()
    return texts
