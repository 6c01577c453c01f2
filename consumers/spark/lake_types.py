"""Types on the way through Spark into a lake table: values travel as text and get the table's types last."""

from __future__ import annotations

import pyarrow as pa

from gdq.consumers.lake.types import LakeColumn
from gdq.typed.arrow import ArrowColumn
from gdq.typed.pgtypes import ColumnType, base_type_name

# Start of the workers' error message for a value that the table cannot hold.
NO_VALUE = "gdq cannot hold: "
_YEARS = "^[0-9]{4}-"


def lake_type_as_text(column: LakeColumn, plain: ArrowColumn) -> ArrowColumn:
    """The column as text that both PostgreSQL and Spark can parse, equal for equal values."""
    if column.arrow == pa.timestamp("us", "UTC"):
        text = f"({column.read})::text || '+00:00'"
    elif column.arrow == pa.string() and base_type_name(column.type) != "numeric":
        return plain
    else:
        text = f"({column.read})::text"
    return ArrowColumn(plain.source, ColumnType("string", "string", text))


def lake_type_ddl(column: LakeColumn) -> str:
    """Spark's name of the column's type."""
    kind = column.arrow
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    names = {
        pa.bool_(): "boolean",
        pa.int16(): "smallint",
        pa.int32(): "int",
        pa.int64(): "bigint",
        pa.float32(): "float",
        pa.float64(): "double",
        pa.string(): "string",
        pa.binary(): "binary",
        pa.date32(): "date",
        pa.timestamp("us"): "timestamp_ntz",
        pa.timestamp("us", "UTC"): "timestamp",
    }
    return names[kind]


def lake_type_from_text(column: LakeColumn, name: str) -> str:
    """Expression that turns a text into the table's value; raises an error for a value that the table cannot hold."""
    if column.arrow == pa.string():
        return name
    if column.arrow == pa.binary():
        return f"unhex(substr({name}, 3))"
    value = f"try_cast({name} as {lake_type_ddl(column)})"
    if pa.types.is_date(column.arrow) or pa.types.is_timestamp(column.arrow):
        value = f"if({name} rlike '{_YEARS}', {value}, null)"
    text = f'column "{column.name}" of {column.of} holds a value of {column.type} that a lake table cannot hold'
    said = (NO_VALUE + text + "!").replace("\\", "\\\\").replace("'", "\\'")
    return f"if({name} is null, null, coalesce({value}, raise_error('{said}')))"
