"""Log rows of several versions of a table's columns, read with the columns of one version: by the columns' numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg import Connection

from gdq.consumers.replica.table import logged_columns
from gdq.sql_text import literal, quote


def version_rows(
    source: Connection[Any],
    queue: str,
    relid: int,
    parts: Mapping[int, str],
    version: int,
    *,
    with_origin: bool,
) -> tuple[str, frozenset[str]]:
    """The SELECT of a table's log rows at some versions, with the log's columns of one, the last or a later.

    And the columns that updates of an older version may leave out. `parts`: the SELECT of each version's rows.
    """
    if list(parts) == [version]:
        return parts[version], frozenset()
    logged = [(log_rows, logged_columns(source, queue, relid, one)) for one, log_rows in parts.items()]
    columns = logged_columns(source, queue, relid, version)
    omitted = {column.attnum for _, some in logged for column in some if column.omitted}
    names = frozenset(column.name for column in columns if column.attnum in omitted)
    return aligned_rows(logged, columns, with_origin=with_origin), names


def aligned_rows(parts: Sequence[tuple[str, Sequence[Any]]], columns: Sequence[Any], *, with_origin: bool) -> str:
    """SELECT of log rows with the log's columns of a later version; a column that a row does not have is NULL.

    `parts`: the log rows of each version, and its columns as logged_columns() gives them. `columns`: those of the later
    version. A column of another type passes as text: a type whose values change is no change of columns alone.
    """
    return " union all ".join(_aligned(log_rows, there, columns, with_origin=with_origin) for log_rows, there in parts)


def _aligned(log_rows: str, there: Sequence[Any], columns: Sequence[Any], *, with_origin: bool) -> str:
    own = {column.attnum: column for column in there}
    values = []
    for column in columns:
        before = own.get(column.attnum)
        names = [(column.log_old, before and before.log_old), (column.log_new, before and before.log_new)]
        for name, old_name in names:
            value = "null" if old_name is None else f"d.{quote(old_name)}"
            same = before is not None and before.log_type == column.log_type
            cast = "" if same else f"::{column.log_type}" if before is None else f"::text::{column.log_type}"
            values.append(f"{value}{cast} as {quote(name)}")
    unchanged = f"{_unchanged(there, columns)} as ev_unchanged"
    listed = ", ".join(["d.ev_id", "d.ev_op", *(["d.ev_origin"] if with_origin else []), unchanged, *values])
    return f"select {listed} from ({log_rows}) d"


def _unchanged(there: Sequence[Any], columns: Sequence[Any]) -> str:
    """Expression of the columns that a row lacks, by their names in a later version; NULL for none."""
    now = {column.attnum: column.name for column in columns}
    names = {column.name: now[column.attnum] for column in there if column.omitted and column.attnum in now}
    if not names:
        return "null::text[]"
    lacking = ", ".join(
        f"case when {literal(was)} = any (d.ev_unchanged) then {literal(name)} end" for was, name in names.items()
    )
    return f"nullif(array_remove(array[{lacking}]::text[], null), '{{}}')"
