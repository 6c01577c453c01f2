"""Columns of a lake table that change: what files written before have of them, and rows with the columns that come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

# Where a Parquet file has the number of an Iceberg column.
FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True, slots=True)
class EvolvedColumn:
    """A column that a lake table gets, and the column of its own that it takes the values from; None: NULL."""

    field: pa.Field
    source: str | None


def with_numbers(schema: pa.Schema, numbers: Iterable[int]) -> pa.Schema:
    """A schema of files whose columns a reader finds by their numbers in an Iceberg table."""
    return pa.schema([one.with_metadata({FIELD_ID: str(number)}) for one, number in zip(schema, numbers, strict=True)])


def stored_names(file: pq.ParquetFile, schema: pa.Schema) -> dict[str, str]:
    """For the columns of a table's schema their names in a file, which may lack some.

    By the numbers of the fields where both have them: a column may have had another name, or be another of its name.
    """
    found, written = {}, file.schema_arrow
    numbers = {(field.metadata or {}).get(FIELD_ID): field.name for field in written}
    numbered = numbers.keys() != {None}
    for field in schema:
        number = (field.metadata or {}).get(FIELD_ID)
        if number is not None and numbered:
            if number in numbers:
                found[field.name] = numbers[number]
        elif field.name in written.names:
            found[field.name] = field.name
    return found


def with_columns(rows: pa.Table, schema: pa.Schema, there: Mapping[str, str], count: int) -> pa.Table:
    """Rows of a file with a table's columns; NULL in those that the file lacks. `there`: as stored_names() gives it."""
    columns = [
        rows[there[field.name]] if field.name in there else pa.chunked_array([pa.nulls(count, field.type)])
        for field in schema
    ]
    return pa.Table.from_arrays(columns, names=schema.names).cast(schema)


def evolved_rows(rows: Iterable[pa.RecordBatch], columns: Sequence[EvolvedColumn]) -> Iterator[pa.RecordBatch]:
    """Rows of a table with the columns that it gets."""
    schema = pa.schema([column.field for column in columns])
    for batch in rows:
        arrays = [
            pa.nulls(batch.num_rows, one.field.type)
            if one.source is None
            else batch.column(one.source).cast(one.field.type)
            for one in columns
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
