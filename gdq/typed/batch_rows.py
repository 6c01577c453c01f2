"""Typed rows of a batch for a role that may not read the logs: through gdq.batch_rows(), on the batch's own connection.

The values equal those of gdq.typed.arrow. A server-side cursor streams them, not COPY, so the caller may use the
connection between two record batches. Dates and times come as PostgreSQL's integers, since Python's own types lack
PostgreSQL's range and infinities.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from psycopg import Connection, sql
from psycopg.rows import tuple_row

from gdq.call import scalar
from gdq.errors import mapped_errors
from gdq.sql_text import raw
from gdq.typed.arrow import ArrowColumn, arrow_schema, convert_arrow_batch

if TYPE_CHECKING:
    import pyarrow as pa

_FETCH_ROWS = 10_000

# How each is sent, and 1970-01-01 in its count from 2000-01-01
_SENT = {
    "date32[day]": ("pg_catalog.date_send({})", "i", 10_957),
    "timestamp[us]": ("pg_catalog.timestamp_send({})", "q", 946_684_800_000_000),
    "timestamp[us, tz=UTC]": ("pg_catalog.timestamptz_send({})", "q", 946_684_800_000_000),
}

# A column definition list has at most 1,600 entries, and a SELECT of both images up to 1,664 columns.
_LISTED_MAX = 1_500

# What tells log rows apart: both halves of an update, and a deleted and an inserted key, share one number.
_ROW = ("ev_id", "ev_op")

_cursor_numbers = itertools.count()


def may_read_logs(connection: Connection[Any]) -> bool:
    """True if the session may run the SQL of gdq.batch_sql(), as gdq_admin and the owner of gdq may."""
    query = """select pg_catalog.has_schema_privilege('gdq_log', 'usage') and pg_catalog.has_function_privilege(
                 'gdq.batch_sql(bigint, uuid, regclass, bigint)', 'execute')"""
    return bool(scalar(connection, query))


def read_batch_rows(
    connection: Connection[Any],
    batch: int,
    token: UUID,
    table: str,
    columns: Sequence[ArrowColumn],
    *,
    version: int | None,
) -> Iterator[pa.RecordBatch]:
    """The rows of one table in an open batch as record batches; needs the transaction of the batch."""
    import pyarrow as pa  # noqa: PLC0415

    row = [column for column in columns if column.source in _ROW]
    parts = [
        _part(batch, token, table, columns[start : start + _LISTED_MAX], row=row if number else (), version=version)
        for number, start in enumerate(range(0, len(columns), _LISTED_MAX))
    ]
    query = sql.SQL("select {} from {}").format(
        sql.SQL(", ").join(raw(_expression(column)).format(sql.Identifier(column.source)) for column in columns),
        sql.SQL(" join ").join(parts),
    )
    name = f"gdq_rows_{next(_cursor_numbers)}"
    with mapped_errors(), connection.cursor(name, row_factory=tuple_row) as cursor:
        cursor.execute(query, binary=True)
        while rows := cursor.fetchmany(_FETCH_ROWS):
            arrays = [_array(values, column) for values, column in zip(zip(*rows, strict=True), columns, strict=True)]
            yield convert_arrow_batch(pa.RecordBatch.from_arrays(arrays, names=arrow_schema(columns).names), columns)


def _part(
    batch: int,
    token: UUID,
    table: str,
    columns: Sequence[ArrowColumn],
    *,
    row: Sequence[ArrowColumn],
    version: int | None,
) -> sql.Composed:
    """Some columns of the rows for FROM; `row`: what joins them to the first part, none for the first."""
    listed = [*row, *columns]
    text = [column for column in columns if "text" in column.type.read_sql]
    types = (
        sql.SQL("{} {}").format(
            sql.Identifier(f"more_{column.source}" if column in row else column.source),
            # from the catalog, quoted by format_type()
            sql.SQL("text" if column in text else column.log_type),
        )
        for column in listed
    )
    rows = sql.SQL("gdq.batch_rows({}, {}, {}::pg_catalog.regclass, {}, {}::text[], {}::text[]) as {}({})").format(
        *(sql.Literal(value) for value in (batch, str(token), table, version)),
        *(sql.Literal([column.source for column in some]) for some in (listed, text)),
        sql.Identifier("more" if row else "r"),
        sql.SQL(", ").join(types),
    )
    on = " and ".join(f"r.{name} operator(pg_catalog.=) more.more_{name}" for name in _ROW)
    return sql.SQL("{} on {}").format(rows, raw(on)) if row else rows


def _expression(column: ArrowColumn) -> Any:
    if column.type.arrow in _SENT:
        return _SENT[column.type.arrow][0]
    # the other reading expressions are done by the server's function, since they follow settings
    return "({})::bigint" if column.type.read_sql == "({c})::bigint" else "{}"


def _array(values: Sequence[Any], column: ArrowColumn) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415

    arrow = column.type.arrow
    if column.type.decimal is not None:
        return pa.array(values, pa.string())  # convert_arrow_batch() makes a decimal of it
    wanted = arrow_schema([column]).field(0).type
    if arrow not in _SENT:
        return pa.array(values, wanted)
    _, code, epoch = _SENT[arrow]
    known = [value for value in values if value is not None]
    sent = iter(struct.unpack(f">{len(known)}{code}", b"".join(known)))
    bits = 8 * struct.calcsize(f">{code}") - 1
    # a value that does not fit becomes the smallest one, which convert_arrow_batch() refuses like infinity
    shifted = (value + epoch if value + epoch < 2**bits else -(2**bits) for value in sent)
    integers = pa.int32() if code == "i" else pa.int64()
    return pa.array([None if value is None else next(shifted) for value in values], integers).view(wanted)
