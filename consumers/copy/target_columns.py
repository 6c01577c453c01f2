"""The columns of a target table beside those of the copied one: whether the values fit unchanged, and in which form."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.copy.pieces import CopyColumn, SourceTable, copy_columns
from gdq.consumers.views.row_copy import CopyForm
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.typed.pgtypes import base_type_name

_COLUMNS = """
select a.attname::text, format_type(a.atttypid, a.atttypmod), a.attgenerated <> ''
  from pg_attribute a
 where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped"""

_KIND = "select relkind in ('r', 'p') from pg_class where oid = %s::regclass"

_HAS_PARTITIONS = qualified("select c.relkind = 'p' from pg_catalog.pg_class c where c.oid = %s::pg_catalog.regclass")

# Types that hold every value of the type on the left, beside that type without its length or precision.
_WIDER = {
    "smallint": {"integer", "bigint", "numeric"},
    "integer": {"bigint", "numeric"},
    "bigint": {"numeric"},
}
_TEXTS = {"text", "character varying"}


def rows_of(connection: Connection[Any], table: str) -> str:
    """A table of either side where its rows are read or deleted: those of inheritance children are not its own."""
    return table if scalar(connection, _HAS_PARTITIONS, table) else f"only {table}"


def target_form(control: Connection[Any], table: SourceTable) -> CopyForm:
    """The form in which rows go into a target table; GdqError if a column is missing, or could change a value."""
    row = control.execute(_KIND, [table.name]).fetchone()
    if row is None or not row[0]:
        raise GdqError(f"{table.name} of the target is no table")
    found = {name: (kind, generated) for name, kind, generated in control.execute(_COLUMNS, [table.name])}
    for column in table.columns:
        if column.name not in found:
            raise GdqError(
                f'table {table.name} of the target has no column "{column.name}"',
                hint="Add it there, or choose the columns with --columns.",
            )
        kind, generated = found[column.name]
        if generated:
            raise GdqError(f'column "{column.name}" of the target\'s table {table.name} is generated')
        if not _fits(column, kind):
            raise GdqError(
                f'column "{column.name}" of table {table.name} is {column.type}, and {kind} in the target',
                hint="Give it the same type there, or one that holds every value, such as text.",
            )
    same = all(column.binary and found[column.name][0] == column.type for column in table.columns)
    return "binary" if same else "text"


def same_form(
    reader: Connection[Any], table: str, writer: Connection[Any], target: str, names: Collection[str]
) -> CopyForm:
    """Binary if these columns have the same types on both sides, all PostgreSQL's own; as text they may differ."""
    ours = {column.name: column for column in copy_columns(reader, table)}
    theirs = {column.name: column.type for column in copy_columns(writer, target)}
    same = all(name in ours and ours[name].binary and theirs.get(name) == ours[name].type for name in names)
    return "binary" if same else "text"


def _fits(column: CopyColumn, kind: str) -> bool:
    """True if a type holds every value of the column as it is."""
    return kind in {column.type, base_type_name(column.type)} | _TEXTS | _WIDER.get(column.type, set())
