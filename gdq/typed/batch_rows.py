"""Typed rows of a batch for a role that may not read the logs: through gdq.batch_rows(), on the batch's own connection.

The values are those that gdq.typed.arrow reads. A cursor of the server streams them, not COPY: the caller may use the
connection between two record batches. Dates and times come as the integers that PostgreSQL sends: Python's own types
have neither the range nor the infinities of PostgreSQL's.
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
from gdq.errors import mapped
from gdq.sql_text import raw
from gdq.typed.arrow import Column, convert, schema_of

if TYPE_CHECKING:
    import pyarrow as pa

_FETCH_ROWS = 10_000

# How each is sent, and 1970-01-01 in its count from 2000-01-01
_SENT = {
    "date32[day]": ("pg_catalog.date_send({})", "i", 10_957),
    "timestamp[us]": ("pg_catalog.timestamp_send({})", "q", 946_684_800_000_000),
    "timestamp[us, tz=UTC]": ("pg_catalog.timestamptz_send({})", "q", 946_684_800_000_000),
}

_cursor_numbers = itertools.count()


def may_read_logs(connection: Connection[Any]) -> bool:
    """Whether the session may run what gdq.batch_sql() gives, as gdq_admin and the owner of gdq may."""
    query = """select pg_catalog.has_schema_privilege('gdq_log', 'usage') and pg_catalog.has_function_privilege(
                 'gdq.batch_sql(bigint, uuid, regclass, bigint)', 'execute')"""
    return bool(scalar(connection, query))


def read_rows(
    connection: Connection[Any], batch: int, token: UUID, table: str, columns: Sequence[Column], *, version: int | None
) -> Iterator[pa.RecordBatch]:
    """The rows of one table in an open batch as record batches; needs the transaction of the batch."""
    import pyarrow as pa  # noqa: PLC0415

    text = [column for column in columns if "text" in column.type.read_sql]
    query = sql.SQL(
        "select {} from gdq.batch_rows({}, {}, {}::pg_catalog.regclass, {}, {}::text[], {}::text[]) as r({})"
    ).format(
        sql.SQL(", ").join(raw(_expression(column)).format(sql.Identifier(column.source)) for column in columns),
        *(sql.Literal(value) for value in (batch, str(token), table, version)),
        *(sql.Literal([column.source for column in some]) for some in (columns, text)),
        sql.SQL(", ").join(
            sql.SQL("{} {}").format(
                sql.Identifier(column.source),
                # from the catalog, quoted by format_type()
                sql.SQL("text" if column in text else column.log_type),
            )
            for column in columns
        ),
    )
    name = f"gdq_rows_{next(_cursor_numbers)}"
    with mapped(), connection.cursor(name, row_factory=tuple_row) as cursor:
        cursor.execute(query, binary=True)
        while rows := cursor.fetchmany(_FETCH_ROWS):
            arrays = [_array(values, column) for values, column in zip(zip(*rows, strict=True), columns, strict=True)]
            yield convert(pa.RecordBatch.from_arrays(arrays, names=schema_of(columns).names), columns)


def _expression(column: Column) -> Any:
    if column.type.arrow in _SENT:
        return _SENT[column.type.arrow][0]
    # the other reading expressions are done by the server's function, since they follow settings
    return "({})::bigint" if column.type.read_sql == "({c})::bigint" else "{}"


def _array(values: Sequence[Any], column: Column) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415

    arrow = column.type.arrow
    if column.type.decimal is not None:
        return pa.array(values, pa.string())  # convert() makes a decimal of it
    wanted = schema_of([column]).field(0).type
    if arrow not in _SENT:
        return pa.array(values, wanted)
    _, code, epoch = _SENT[arrow]
    known = [value for value in values if value is not None]
    sent = iter(struct.unpack(f">{len(known)}{code}", b"".join(known)))
    bits = 8 * struct.calcsize(f">{code}") - 1
    # what does not fit becomes the least value, which convert() refuses as it does infinity
    shifted = (value + epoch if value + epoch < 2**bits else -(2**bits) for value in sent)
    integers = pa.int32() if code == "i" else pa.int64()
    return pa.array([None if value is None else next(shifted) for value in values], integers).view(wanted)
