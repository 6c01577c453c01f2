"""Whole tables copied to a replica's target, all at one snapshot of the source, each in a transaction of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from psycopg import Connection

from gdq.conninfo import connect, conninfo_of
from gdq.consumers.copy.pieces import CopyChoice, describe_source_table
from gdq.consumers.replica.changes import empty_table
from gdq.consumers.replica.column_changes import SourceColumns, change_columns, source_columns
from gdq.consumers.replica.sessions import apply_settings
from gdq.consumers.replica.source_tables import SourceTable, source_tables
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.replica.table_ddl import create_table, is_missing, rename_table
from gdq.consumers.views.row_copy import CopyForm, copy_rows
from gdq.consumers.views.snapshot_holder import hold_snapshot
from gdq.errors import GdqError
from gdq.sql_text import raw


def copy_tables(
    source: Connection[Any],
    state: ReplicaState,
    tables: Sequence[SourceTable],
    describe: Callable[[SourceTable], ReplicaTable],
    *,
    create: bool,
    overwrite: bool,
    copy: bool = True,
    tell: Callable[[str], None],
) -> None:
    """Copy tables as one snapshot of the source has them, and store it in the target beside each.

    A table that was copied before gets the source's present name and columns first; one that the target lacks is made
    there if `create`. `describe` gives it as it is then. GdqError if the target has rows of a table that this replica
    has not copied before, unless `overwrite`. `copy` False: the target has the rows already, except for tables that are
    made.
    """
    if not tables:
        return
    for table in tables:
        name = table.table_name
        if name not in state.tables and not (create and is_missing(state.connection, name)):
            describe(table)  # all that could not be copied is told before the first copy
    session = f"gdq:{state.queue}/{state.name}/copy"
    with connect(conninfo_of(source), application_name=session, autocommit=True) as reader:
        apply_settings(reader)
        with hold_snapshot(reader, state.queue, [table.table_name for table in tables]) as holder:
            locked = source_tables(source, state.queue, state.name)
            for table in (locked[table.relid] for table in tables):
                name, before = table.table_name, state.names.get(table.relid)
                missing = all(is_missing(state.connection, one) for one in (name, before) if one is not None)
                with state.connection.transaction():
                    columns = source_columns(source, state.queue, table.relid, table.version)
                    if create and missing:
                        names = [column for column, _ in columns.columns.values()]
                        create_table(holder.connection, state.connection, name, names, table.key or [], tell=tell)
                    elif copy:
                        _follow(source, state, table, columns, overwrite=overwrite)
                    described = describe(table)
                    if copy or missing:
                        told = f"copied {name}: {copy_table(holder.connection, state.connection, described)} rows"
                    else:
                        told = f"not copied {name}: the target is taken to have the rows"
                    state.copied(name, table.relid, holder.snapshot, columns)
                state.connection.execute(raw(f"analyze {name}"))
                tell(told)


def make_room(state: ReplicaState, table: str, *, overwrite: bool) -> None:
    """Empty a table of the target for its copy; GdqError if it has rows that this replica has not copied."""
    if needs_room(state, table, overwrite=overwrite):
        empty_table(state.connection, table)


def needs_room(state: ReplicaState, table: str, *, overwrite: bool) -> bool:
    """True if a target's table may have rows, which its copy replaces; GdqError if this replica has not copied them.

    Rows of other sources stay; those of this one have been deleted then, or were never copied.
    """
    if state.shared_with(table) is not None:
        return False
    if table in state.tables or overwrite:
        return True
    if state.connection.execute(raw(f"select from {table} limit 1")).rowcount:
        raise GdqError(
            f"table {table} of the target has rows already",
            hint="Empty it, replace its rows by --overwrite, or say that they are the source's by --no-copy.",
        )
    return False


def _follow(
    source: Connection[Any], state: ReplicaState, table: SourceTable, columns: SourceColumns, *, overwrite: bool
) -> None:
    """Give the target's table the source's name and columns, and delete its rows."""
    take_name(state, table)
    make_room(state, table.table_name, overwrite=overwrite)
    take_columns(source, state, table, columns)


def take_name(state: ReplicaState, table: SourceTable) -> None:
    """Give the target's table the source's name, in the open transaction."""
    name, before = table.table_name, state.names.get(table.relid)
    if before is not None and before != name:
        if name in state.tables:  # the other one's new name comes with a later batch: it will be copied, too
            state.left(before)
        else:
            rename_table(state, before, name)


def take_columns(source: Connection[Any], state: ReplicaState, table: SourceTable, columns: SourceColumns) -> None:
    """Give the target's table the source's columns, in the open transaction."""
    name = table.table_name
    known = state.tables.get(name)
    if known is not None:
        same = known.relid == table.relid
        old = known.columns if same else known.columns.of_other_table(columns)
        change_columns(source, state.connection, name, old, columns, relid=table.relid)


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
