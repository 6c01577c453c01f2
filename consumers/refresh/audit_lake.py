"""Audits of lake tables: their rows are read once, and those with the keys of a probe are compared in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from gdq.consumers.lake.sample import lake_key_names
from gdq.consumers.lake.types import (
    LakeColumn,
    differing_lake_rows,
    lake_columns,
    read_lake_column,
    read_lake_rows,
)
from gdq.consumers.refresh.audit_rows import ROWS_MAX, TooDear, report_difference, restricted_query
from gdq.consumers.refresh.audit_sample import Probe
from gdq.consumers.refresh.comparison import float_columns, rows_unlike
from gdq.consumers.refresh.view_refresh import ViewRefresh
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.owner_sql import OwnerSql


def differing_lake(work: ViewRefresh, holder: SnapshotHolder, probe: Probe, seconds: float) -> tuple[int, str | None]:
    """As differing_rows(), for a lake table after its commit; TooDear if reading the table takes longer than it may."""
    assert work.lake is not None
    assert work.view.lake is not None
    columns = lake_columns(work.columns, work.view.lake.kind)
    compared, query = restricted_query(work, holder, probe, seconds)
    settled = work.plan.settled
    left_out = set(settled.open_columns)
    if settled.loose:
        exact = lake_key_names(work.columns)
        left_out |= {number for number, column in enumerate(columns) if column.name not in exact}
    shown = [column for number, column in enumerate(columns) if number not in left_out]
    owned = OwnerSql(holder.connection, work.view.acts_as)
    expected = [_named(batch, shown) for batch in read_lake_rows(owned, query, columns)]
    keys = {name: _key_array(owned, compared, name, columns) for name in compared.values}
    found, deadline = [], time.monotonic() + seconds
    for batch in work.lake.scan():
        if time.monotonic() > deadline:
            raise TooDear("reading the table took too long")
        rows = batch
        for name, values in keys.items():
            if rows.num_rows:
                rows = rows.filter(pc.is_in(rows.column(name).cast(values.type), value_set=values))
        found += [_named(rows, shown)] if rows.num_rows else []
        if sum(one.num_rows for one in found) > ROWS_MAX:
            raise TooDear("too many rows")
    size = compared.size if compared.values else sum(one.num_rows for one in expected)
    _, lacking, surplus = differing_lake_rows(expected, found, shown)
    floats = float_columns(work, [work.types[columns.index(column)] for column in shown])
    missing, unexpected = rows_unlike(lacking, surplus, floats)
    names = [column.name for column in shown]
    return size, report_difference(names, compared, missing, unexpected) if missing or unexpected else None


def _named(batch: pa.RecordBatch, columns: Sequence[LakeColumn]) -> pa.RecordBatch:
    arrays = [batch.column(column.name).cast(column.arrow) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(one.name, one.arrow) for one in columns]))


def _key_array(owned: OwnerSql, probe: Probe, name: str, columns: Sequence[LakeColumn]) -> pa.Array:
    """The values of a key column as the lake table has them; NULL is one of them if the probe has it."""
    column = next(one for one in columns if one.name == name)
    kind = probe.kinds[name][0]
    texts = [sql.Literal(one).as_string(owned.connection) if one is not None else "null" for one in probe.values[name]]
    listed = ", ".join(f"({text}::{kind})" for text in texts)
    return read_lake_column(owned, f"select v from (values {listed}) as t(v)", column)
