"""Columns of an Iceberg table that are added, renamed, dropped and widened without writing its files again."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyiceberg.table import Transaction
from pyiceberg.types import IcebergType

from gdq.consumers.lake.columns import EvolvedColumn

# Under this name a column waits for one that another still has.
_WAITING = "!gdq_"


def can_evolve(there: pa.Schema, columns: Sequence[EvolvedColumn]) -> bool:
    """True if a table with the columns `there` can get others by metadata alone."""
    sources = [one.source for one in columns if one.source is not None]
    order = [field.name for field in there if field.name in sources]
    return sources == order and all(
        _promotes(there.field(one.source).type, one.field.type) for one in columns if one.source is not None
    )


def evolve_columns(transaction: Transaction, there: pa.Schema, columns: Sequence[EvolvedColumn]) -> None:
    """Change the columns of a table, in the open transaction; can_evolve() says that it goes."""
    named = {one.source: one.field.name for one in columns if one.source is not None}
    types = {one.field.name: there.field(one.source).type for one in columns if one.source is not None}
    with transaction.update_schema(allow_incompatible_changes=True) as update:
        for place, field in enumerate(there):
            if field.name not in named:
                update.delete_column(field.name)
            elif field.name != named[field.name]:
                update.rename_column(field.name, f"{_WAITING}{place}")
    with transaction.update_schema() as update:
        for place, field in enumerate(there):
            if field.name in named and field.name != named[field.name]:
                update.rename_column(f"{_WAITING}{place}", named[field.name])
    with transaction.update_schema() as update:
        for one in columns:
            if one.source is None:
                update.add_column(one.field.name, _iceberg_type(one.field))
            elif types[one.field.name] != one.field.type:
                update.update_column(one.field.name, field_type=_iceberg_type(one.field))


def _promotes(old: pa.DataType, new: pa.DataType) -> bool:
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(old.scale == new.scale and old.precision <= new.precision)
    return old == new or (old, new) in ((pa.int32(), pa.int64()), (pa.float32(), pa.float64()))


def _iceberg_type(field: pa.Field) -> IcebergType:
    return pyarrow_to_schema(pa.schema([field.with_metadata({"PARQUET:field_id": "1"})])).fields[0].field_type
