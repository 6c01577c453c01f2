"""Typed rows of a whole table as an exported snapshot has them: a SELECT of a table copy into Arrow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from psycopg import Connection, sql

from gdq.conninfo import conninfo_of
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.typed.arrow import ArrowColumn, arrow_select_sql, arrow_server_errors, connect_arrow, convert_arrow_batch
from gdq.typed.pgtypes import FIRST_USER_OID, READ_AS_TEXT, READ_SETTINGS, OnUnsupported, column_type

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_postgresql.dbapi import Cursor

_COLUMNS = qualified("""
select a.attname::text, a.atttypid::bigint, format_type(a.atttypid, a.atttypmod)
  from pg_catalog.pg_attribute a
 where a.attrelid = %s::pg_catalog.regclass and a.attnum > 0 and not a.attisdropped
 order by a.attnum""")


def table_copy_columns(
    connection: Connection[Any], table: str, unsupported: OnUnsupported, as_text: Collection[str]
) -> list[ArrowColumn]:
    """How each column of a table is read; UnsupportedValue for a type that Arrow lacks, GdqError for a wrong name."""
    found = connection.execute(_COLUMNS, [table]).fetchall()
    missing = set(as_text) - {name for name, _, _ in found}
    if missing:
        raise GdqError(f'table {table} has no column "{min(missing)}"')
    return [
        ArrowColumn(
            name,
            READ_AS_TEXT
            if name in as_text or number >= FIRST_USER_OID
            else column_type(kind, column=name, unsupported=unsupported),
        )
        for name, number, kind in found
    ]


def read_table_copy(
    beside: Connection[Any], exported: str, relation: str, columns: Sequence[ArrowColumn]
) -> Iterator[pa.RecordBatch]:
    """The rows of a table at a snapshot that another session has exported, on a connection of their own, streamed."""
    with (
        arrow_server_errors(),
        closing(connect_arrow(conninfo_of(beside))) as connection,
        connection.cursor() as cursor,
    ):
        join_snapshot(cursor, exported)
        cursor.execute(arrow_select_sql(relation, columns))
        for batch in cursor.fetch_record_batch():
            yield convert_arrow_batch(batch, columns)


def join_snapshot(cursor: Cursor, exported: str, *locks: str) -> None:
    """Begin to read at a snapshot that another session has exported; `locks`: statements that come before it."""
    listed = ", ".join(f"pg_catalog.set_config('{name}', '{value}', true)" for name, value in READ_SETTINGS.items())
    cursor.execute("set transaction isolation level repeatable read, read only")
    for statement in locks:
        cursor.execute(statement)
    cursor.execute(f"set transaction snapshot {sql.Literal(exported).as_string(None)}")
    cursor.execute(f"select {listed}")
    cursor.fetchall()
