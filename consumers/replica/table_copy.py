"""Whole tables copied to a replica's target, all at one snapshot of the source, each in a transaction of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from psycopg import Connection

from gdq.conninfo import connect, conninfo_of
from gdq.consumers.copy.pieces import CopyChoice, describe_source_table
from gdq.consumers.replica.changes import empty_table
from gdq.consumers.replica.column_changes import change_columns, source_columns
from gdq.consumers.replica.sessions import apply_settings
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.views.row_copy import CopyForm, copy_rows
from gdq.consumers.views.snapshot_holder import hold_snapshot
from gdq.errors import GdqError
from gdq.sql_text import raw


def copy_tables(
    source: Connection[Any],
    state: ReplicaState,
    tables: Sequence[str],
    describe: Callable[[str], ReplicaTable],
    *,
    overwrite: bool,
    tell: Callable[[str], None],
) -> None:
    """Copy tables as one snapshot of the source has them, and store it in the target beside each.

    A table that was copied before gets the source's present columns first. `describe` gives it as it is then. GdqError
    if the target has rows of a table that this replica has not copied before, unless `overwrite`.
    """
    for table in tables:
        if table not in state.tables:
            describe(table)  # all that could not be copied is told before the first copy
    session = f"gdq:{state.queue}/{state.name}/copy"
    with connect(conninfo_of(source), application_name=session, autocommit=True) as reader:
        apply_settings(reader)
        with hold_snapshot(reader, state.queue, tables) as holder:
            for name in tables:
                with state.connection.transaction():
                    make_room(state, name, overwrite=overwrite)
                    columns = source_columns(source, state.queue, name)
                    if name in state.tables:
                        change_columns(source, state.connection, name, state.tables[name].columns, columns)
                    copied = copy_table(holder.connection, state.connection, describe(name))
                    state.copied(name, holder.snapshot, columns)
                state.connection.execute(raw(f"analyze {name}"))
                tell(f"copied {name}: {copied} rows")


def make_room(state: ReplicaState, table: str, *, overwrite: bool) -> None:
    """Empty a table of the target for its copy; GdqError if it has rows that this replica has not copied."""
    known = table in state.tables or overwrite
    if not known and state.connection.execute(raw(f"select from {table} limit 1")).rowcount:
        raise GdqError(
            f"table {table} of the target has rows already", hint="Empty it, or replace its rows by --overwrite."
        )
    empty_table(state.connection, table)


def copy_table(reader: Connection[Any], target: Connection[Any], table: ReplicaTable) -> int:
    """Copy all rows; returns their number."""
    # a partitioned table's rows are in its partitions; those of inheritance children belong to the children
    only = f"(select {table.column_list} from {{}}{table.name})"
    row = reader.execute("select relkind = 'p' from pg_class where oid = %s::regclass", [table.name]).fetchone()
    rows_of = only.format("" if row is not None and row[0] else "only ")
    into = f"{table.name} ({table.column_list})"
    return copy_rows(reader, rows_of, target, into, form=_form(reader, target, table)).rows


def _form(reader: Connection[Any], target: Connection[Any], table: ReplicaTable) -> CopyForm:
    """Binary if both sides have the same types, all of them PostgreSQL's own; as text they may differ a little."""
    ours, theirs = (
        {column.name: column for column in describe_source_table(side, CopyChoice(table.name)).columns}
        for side in (reader, target)
    )
    names = {column.name for column in table.columns}
    same = names <= ours.keys() and all(ours[name].binary and theirs[name].type == ours[name].type for name in names)
    return "binary" if same else "text"
