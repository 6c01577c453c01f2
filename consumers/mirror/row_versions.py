"""A lake table that has every version of its table's rows (SCD type 2), with the ticks between which it held.

A version holds from the tick `__START_AT`, and no longer from `__END_AT` on, which is NULL while it holds. Changes are
netted for each tick: what comes and goes within one is no version.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Connection

from gdq.consumers.lake.files import ArrowDifference, float_bits, whole_array
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.mirror.batch_changes import TableLog
from gdq.consumers.mirror.state import History
from gdq.consumers.mirror.table import CopiedRows, CopyTarget, MirrorTable, net_images, with_weight
from gdq.consumers.mirror.tick_changes import VERSION, check_names, tick_changes
from gdq.consumers.views.signals import Diverged
from gdq.plan.table import WEIGHT_COLUMN
from gdq.source import Position

START, END = "__START_AT", "__END_AT"
VERSION_FIELDS = (pa.field(START, pa.int64()), pa.field(END, pa.int64()))


@dataclass(frozen=True, slots=True)
class RowVersions:
    """What a lake table gets that has the versions of the rows of a table of `queue`."""

    queue: str
    history: ClassVar[History] = "scd2"
    own: ClassVar[frozenset[str]] = frozenset(field.name for field in VERSION_FIELDS)

    def check(self, table: MirrorTable) -> None:
        """GdqError if the table has a column that the history needs itself."""
        check_names(table, self.own)

    def copied(self, table: MirrorTable, target: CopyTarget, rows: CopiedRows) -> ArrowDifference:
        """All rows, from the copy's tick on; of a history that is there already, those that are others since."""
        tick = Position.parse(target.position).tick
        if target.stored is None:
            schema = pa.schema([*table.schema, *VERSION_FIELDS])
            return table.loaded(rows, schema, lambda batch: _open_rows(batch, tick))
        came = _weighted(pa.Table.from_batches(rows.all(), table.schema), 1)
        held = _held(table, target.lake)
        went = _weighted(held.select(table.schema.names), -1)
        change = _with_version(net_images(pa.concat_tables([came, went])), tick)
        return _signed(table, _difference(table, held, change))

    def changed(
        self, table: MirrorTable, lake: LakeTable, source: Connection[Any], log: TableLog
    ) -> ArrowDifference | None:
        """The versions that end, and those that begin; None if nothing changes."""

        def live() -> pa.Table:
            return _weighted(_held(table, lake).select(table.schema.names), 1)

        changes = tick_changes(table, source, self.queue, log, live)
        netted = net_images(changes.select([*table.schema.names, VERSION, WEIGHT_COLUMN]))
        if not netted.num_rows:
            return None
        gone = netted.filter(pc.less(netted[WEIGHT_COLUMN], 0))
        held = _held(table, lake, gone) if gone.num_rows else _version_schema(table).empty_table()
        return _signed(table, _difference(table, held, netted))


def _version_schema(table: MirrorTable) -> pa.Schema:
    return pa.schema([*table.schema, *table.kept, *VERSION_FIELDS])


def _open_rows(rows: pa.RecordBatch, tick: int) -> pa.RecordBatch:
    """Rows of the table as versions that hold from a tick on."""
    more = [pa.repeat(pa.scalar(tick, pa.int64()), rows.num_rows), pa.nulls(rows.num_rows, pa.int64())]
    return pa.RecordBatch.from_arrays([*rows.columns, *more], schema=pa.schema([*rows.schema, *VERSION_FIELDS]))


def _weighted(rows: pa.Table, weight: int) -> pa.Table:
    return rows.append_column(WEIGHT_COLUMN, pa.repeat(pa.scalar(weight, pa.int64()), rows.num_rows))


def _with_version(images: pa.Table, tick: int) -> pa.Table:
    """Signed images of the table with a tick before their weights."""
    place = images.num_columns - 1
    return images.add_column(place, VERSION, pa.repeat(pa.scalar(tick, pa.int64()), images.num_rows))


def _signed(table: MirrorTable, difference: pa.Table) -> ArrowDifference:
    return table.difference("signed", _version_schema(table), lambda: iter(difference.to_batches()), table.key)


def _held(table: MirrorTable, lake: LakeTable, like: pa.Table | None = None) -> pa.Table:
    """The versions that hold still; with `like` only those that may be among its rows, by one column of the key."""
    schema = _version_schema(table)
    exact = [name for name in table.key if not pa.types.is_floating(schema.field(name).type)]
    found = []
    for batch in lake.scan():
        rows = batch.select(schema.names).filter(pc.is_null(batch.column(END)))
        if like is not None and exact:
            rows = rows.filter(pc.is_in(rows.column(exact[0]), value_set=whole_array(like[exact[0]]).unique()))
        found.append(rows)
    return pa.Table.from_batches(found, schema)


def _difference(table: MirrorTable, held: pa.Table, changes: pa.Table) -> pa.Table:
    """Signed versions that lead from those that hold to those after changes, which are netted for each tick.

    Of equal rows the oldest ends first. What the kept columns have stays with the versions that end. Diverged if a row
    went that was not there.
    """
    names = table.schema.names
    images = pa.concat_tables([held.select(names), changes.select(names)])
    codes = _codes(images)
    holding: defaultdict[tuple[int | None, ...], deque[tuple[int, int]]] = defaultdict(deque)
    for row, start in sorted(enumerate(held[START].to_pylist()), key=lambda one: one[1]):
        holding[codes[row]].append((row, start))
    result: list[tuple[int, int, int | None, int]] = []
    versions, weights = changes[VERSION].to_pylist(), changes[WEIGHT_COLUMN].to_pylist()
    for number in sorted(range(changes.num_rows), key=versions.__getitem__):
        row, tick = held.num_rows + number, versions[number]
        there = holding[codes[row]]
        there.extend([(row, tick)] * weights[number])
        for _ in range(-weights[number]):
            if not there:
                raise Diverged("a row that went was not there")
            ended, start = there.popleft()
            result.append((ended, start, tick, 1))
            if ended < held.num_rows:
                result.append((ended, start, None, -1))
    result += [(row, start, None, 1) for there in holding.values() for row, start in there if row >= held.num_rows]
    rows, starts, ends, signs = zip(*result, strict=True) if result else ((), (), (), ())
    for field in table.kept:
        later = pa.nulls(changes.num_rows, field.type)
        images = images.append_column(field, pa.chunked_array([*held[field.name].chunks, later], field.type))
    taken = images.take(pa.array(rows, pa.int64()))
    columns = [*taken.columns, pa.array(starts, pa.int64()), pa.array(ends, pa.int64()), pa.array(signs, pa.int64())]
    return pa.Table.from_arrays(columns, schema=with_weight(_version_schema(table)))


def _codes(images: pa.Table) -> list[tuple[int | None, ...]]:
    """For each row a value that equal rows share."""
    columns = [float_bits(whole_array(column)).dictionary_encode().indices.to_pylist() for column in images.columns]
    return list(zip(*columns, strict=True))
