"""The columns of a lake table, and exact reading of a SELECT into them; an error names the column."""

from __future__ import annotations

import codecs
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from gdq.consumers.lake.read_ahead import read_ahead
from gdq.consumers.views.row_copy import copy_blocks
from gdq.errors import UnsupportedValue
from gdq.owner_sql import OwnerSql
from gdq.typed.arrow import arrow_array_of_texts, arrow_type, convert_arrow_array
from gdq.typed.pgtypes import FIRST_USER_OID, READ_AS_TEXT, base_type_name, column_type
from gdq.view.lake_name import LakeKind, check_lake_columns

_BLOCK_BYTES = 8 * 2**20
# A thread receives so many blocks while the ones before are parsed and written.
_BLOCKS_AHEAD = 2

# Types whose values are equal in PostgreSQL exactly if they are equal in a lake table.
_COMPARABLE = {
    *(
        "boolean",
        "smallint",
        "integer",
        "bigint",
        "numeric",
        "oid",
        "real",
        "double precision",
        "text",
        "character varying",
    ),
    *("bytea", "uuid", "date", "timestamp without time zone", "timestamp with time zone", "name", '"char"'),
}


@dataclass(frozen=True, slots=True)
class LakeColumn:
    """A column of a view: its types in PostgreSQL and in the lake table, and the SQL over {c} that is read as text.

    `of` and `cure` are for errors: whose column it is, and what helps if its type cannot hold a value.
    """

    name: str
    type: str
    arrow: pa.DataType
    read: str
    of: str = "the view"
    cure: str = "Cast it to text in the view."


def lake_columns(described: Sequence[tuple[str, int, str]], kind: LakeKind) -> tuple[LakeColumn, ...]:
    """The lake's columns for the view's (name, type oid, type); GdqError for names that the lake cannot have."""
    check_lake_columns(kind, [name for name, _, _ in described])
    return tuple(lake_column(name, oid, pg_type, kind) for name, oid, pg_type in described)


def lake_column(name: str, oid: int, pg_type: str, kind: LakeKind) -> LakeColumn:
    """The lake's column for one name, type oid and type."""
    column = READ_AS_TEXT if oid >= FIRST_USER_OID else column_type(pg_type, unsupported="text")
    arrow, read = arrow_type(column), column.read_sql
    if arrow == pa.timestamp("us", "UTC"):
        # the session's time zone may have an offset with seconds
        read = "({c}) at time zone 'UTC'"
    if arrow == pa.string() and base_type_name(pg_type) == "numeric":
        # 1.0 and 1.00 are equal, so both are written as 1
        read = "pg_catalog.trim_scale({c})::text"
    if kind == "iceberg" and arrow == pa.int16():
        arrow = pa.int32()
    return LakeColumn(name, pg_type, arrow, read)


def lake_columns_as_text(described: Sequence[tuple[str, int, str]]) -> set[str]:
    """Columns of PostgreSQL's own types with values that are equal there but not in a lake: 1 day and 24:00:00."""
    return {
        name for name, oid, pg_type in described if oid < FIRST_USER_OID and base_type_name(pg_type) not in _COMPARABLE
    }


def lake_schema(columns: Sequence[LakeColumn]) -> pa.Schema:
    """The Arrow schema of the lake table."""
    return pa.schema([pa.field(column.name, column.arrow) for column in columns])


def read_lake_rows(
    owned: OwnerSql, rows: str, columns: Sequence[LakeColumn], weight: str | None = None
) -> Generator[pa.RecordBatch, None, None]:
    """Stream the rows of a SELECT of the view's columns, in order, as record batches.

    The session must have READ_SETTINGS. `weight`: the name of a further bigint column. UnsupportedValue for a value
    that the lake's type cannot hold.
    """
    wanted = [*columns, *([LakeColumn(weight, "bigint", pa.int64(), "{c}")] if weight else [])]
    names = ", ".join(f"c{n}" for n in range(len(wanted)))
    values = ", ".join(c.read.format(c=f"r.c{n}::{c.type}") + f" as c{n}" for n, c in enumerate(wanted))
    schema = lake_schema(wanted)
    select = owned.select(f"select {values} from ({rows}) as r({names})")
    query = f"copy ({select}) to stdout (format csv, encoding 'UTF8')"
    with closing(copy_blocks(owned.connection, query, _BLOCK_BYTES)) as blocks:
        first = next(blocks, None)
        if first is None:
            return
        yield _batch(first[0], wanted, schema)
        if len(first[0]) < _BLOCK_BYTES:
            return  # there is no other
        with closing(read_ahead(blocks, _BLOCKS_AHEAD, owned.connection.cancel)) as further:
            for block, _ in further:
                yield _batch(block, wanted, schema)


def lake_rows_sql(rows: str, columns: Sequence[LakeColumn]) -> str:
    """The SELECT by which the Arrow driver reads the rows of a SELECT of a lake's columns, for lake_batch()."""
    names = ", ".join(f"c{n}" for n in range(len(columns)))
    values = ", ".join(_driver_read(c).format(c=f"r.c{n}::{c.type}") + f" as c{n}" for n, c in enumerate(columns))
    return f"select {values} from ({rows}) as r({names})"


def _driver_read(column: LakeColumn) -> str:
    """As column.read, for a driver that knows instants, and small integers where a lake does not."""
    if column.arrow == pa.timestamp("us", "UTC"):
        return "{c}"
    return "({c})::integer" if column.arrow == pa.int32() else column.read


def lake_batch(batch: pa.RecordBatch, columns: Sequence[LakeColumn]) -> pa.RecordBatch:
    """Rows that the Arrow driver has read, as the lake's; UnsupportedValue for a value that its type cannot hold."""
    arrays = [_converted(array, column) for array, column in zip(batch.columns, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=lake_schema(columns))


def _converted(array: pa.Array, column: LakeColumn) -> pa.Array:
    try:
        return convert_arrow_array(array, column.arrow)
    except pa.ArrowInvalid as error:
        raise _unsupported(column, error) from error


def read_lake_column(owned: OwnerSql, rows: str, column: LakeColumn) -> pa.Array:
    """The values of a SELECT of one column of a lake table."""
    batches = list(read_lake_rows(owned, rows, [column]))
    return pa.concat_arrays([batch.column(0) for batch in batches] or [pa.array([], column.arrow)])


def differing_lake_rows(
    expected: Iterable[pa.RecordBatch], found: Iterable[pa.RecordBatch], columns: Sequence[LakeColumn]
) -> tuple[int, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The number of rows found, the expected rows that are missing, and the found rows that were not expected."""
    schema = lake_schema(columns)
    sides = [pa.Table.from_batches(side, schema) for side in (expected, found)]
    names = [f"c{n}" for n in range(len(columns))]
    signed = pa.concat_tables(
        side.rename_columns(names).append_column("w", pa.array([sign] * side.num_rows, pa.int64()))
        for side, sign in zip(sides, (1, -1), strict=True)
    )
    sums = signed.group_by(names).aggregate([("w", "sum")])
    odd = sums.filter(pc.not_equal(sums["w_sum"], 0)).select([*names, "w_sum"])
    rows = list(zip(*(column.to_pylist() for column in odd.columns), strict=True))
    lacking = [row[:-1] for row in rows for _ in range(row[-1])]
    surplus = [row[:-1] for row in rows for _ in range(-row[-1])]
    return sides[1].num_rows, lacking, surplus


def _batch(block: bytes, columns: Sequence[LakeColumn], schema: pa.Schema) -> pa.RecordBatch:
    names = [f"c{n}" for n in range(len(columns))]
    if block.startswith(codecs.BOM_UTF8):
        # the CSV reader drops one mark of the encoding at the start, so add one
        block = codecs.BOM_UTF8 + block
    table = csv.read_csv(
        pa.BufferReader(block),
        # one block, so that no row is cut
        read_options=csv.ReadOptions(use_threads=False, column_names=names, block_size=len(block) + 1),
        parse_options=csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    ).combine_chunks()
    arrays = [
        _array(pa.concat_arrays(text.chunks), column) for text, column in zip(table.columns, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(text: pa.Array, column: LakeColumn) -> pa.Array:
    """PostgreSQL's texts converted to the lake's type."""
    try:
        if column.arrow == pa.timestamp("us", "UTC"):
            return pc.assume_timezone(text.cast(pa.timestamp("us")), "UTC")
        return arrow_array_of_texts(text, column.arrow)
    except pa.ArrowInvalid as error:
        raise _unsupported(column, error) from error


def _unsupported(column: LakeColumn, error: pa.ArrowInvalid) -> UnsupportedValue:
    return UnsupportedValue(
        f'column "{column.name}" of {column.of} holds a value of {column.type} that {column.arrow} cannot hold',
        detail=str(error).splitlines()[0],
        hint=column.cure,
    )
