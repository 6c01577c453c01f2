"""One table copied to a replica's target: what the target's table needs before its rows come, and the COPY."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumers.copy.target_columns import rows_of, same_form
from gdq.consumers.replica.changes import empty_table
from gdq.consumers.replica.column_changes import SourceColumns, change_columns, source_columns
from gdq.consumers.replica.copy_workers import WORKERS, ShowProgress, no_progress
from gdq.consumers.replica.source_tables import SourceTable
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.replica.table_ddl import create_table, is_missing, rename_table
from gdq.consumers.views.row_copy import copy_rows
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.errors import GdqError
from gdq.sql_text import raw

# Tables with more rows are copied in chunks, of so many rows at most: some seconds of work.
CHUNK_ROWS = 500_000

# Gives a table as it and a session of the target are now; GdqError if the replica cannot keep it.
Describe = Callable[[SourceTable, Connection[Any]], ReplicaTable]


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How tables are copied. `create`: make those that the target lacks. `overwrite`: replace rows of others.

    `copy` False: the target has the rows already, except for tables that are made. `chunk_rows`: tables that have more
    are copied in chunks. `show` shows the progress.
    """

    create: bool = False
    overwrite: bool = False
    copy: bool = True
    workers: int = WORKERS
    chunk_rows: int = CHUNK_ROWS
    show: ShowProgress = no_progress


def name_before(state: ReplicaState, table: SourceTable) -> str | None:
    """The name that the target has a table by; None if this replica does not know it."""
    return state.names.get(table.relid, state.begun_names.get(table.relid))


def refuse_copies(state: ReplicaState, tables: Sequence[str]) -> None:
    """GdqError for a table whose copy would replace rows that the source does not have."""
    for table in tables:
        if state.two_ways:
            raise GdqError(
                f"table {table} has to be copied again, and the target replicates back: what was changed there and "
                "has not arrived here would be lost",
                hint=f"Let no side write to it until the other replica is up to date; then --copy-again '{table}'",
            )
        if other := state.shared_with(table):
            raise GdqError(
                f"table {table} has to be copied again, and has rows of replica {other} in the target",
                hint=f"Delete this source's rows there, then copy them: --copy-again '{table}'",
            )


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
    if state.known(table) is not None or overwrite:
        return True
    if state.connection.execute(raw(f"select from {table} limit 1")).rowcount:
        raise GdqError(
            f"table {table} of the target has rows already",
            hint="Empty it, replace its rows by --overwrite, or say that they are the source's by --no-copy.",
        )
    return False


def make_ready(
    source: Connection[Any],
    holder: SnapshotHolder,
    state: ReplicaState,
    table: SourceTable,
    *,
    options: CopyOptions,
    tell: Callable[[str], None],
) -> tuple[SourceColumns, bool]:
    """Have the target's table take a copy, in the open transaction: made if it is missing, else with the source's name,
    columns and key, and without its rows.

    The source's columns, and whether it was made. `source`: a session that sees the present catalog. Without
    `options.copy` only what is missing is made.
    """
    name, before = table.table_name, name_before(state, table)
    missing = all(is_missing(state.connection, one) for one in (name, before) if one is not None)
    columns = source_columns(source, state.queue, table.relid, table.version)
    if options.create and missing:
        names = [column for column, _ in columns.columns.values()]
        create_table(holder.connection, state.connection, name, names, table.key or [], tell=tell)
    elif options.copy:
        take_name(state, table)
        make_room(state, name, overwrite=options.overwrite)
        take_columns(source, state, table, columns)
    return columns, missing


def take_name(state: ReplicaState, table: SourceTable) -> None:
    """Give the target's table the source's name, in the open transaction."""
    name, before = table.table_name, name_before(state, table)
    if before is not None and before != name:
        if state.known(name) is not None:  # the source has dropped that one: its rows make room
            state.left(before)
        else:
            rename_table(state, before, name)


def take_columns(source: Connection[Any], state: ReplicaState, table: SourceTable, columns: SourceColumns) -> None:
    """Give the target's table the source's columns, in the open transaction."""
    name = table.table_name
    known = state.known(name)
    if known is not None:
        same = known.relid == table.relid
        old = known.columns if same else known.columns.of_other_table(columns)
        change_columns(source, state.connection, name, old, columns, relid=table.relid)


def copy_table(
    reader: Connection[Any],
    target: Connection[Any],
    table: ReplicaTable,
    moved: Callable[[int], None] = lambda _: None,
) -> int:
    """Copy all rows; returns their number. `moved` gets the rows since it was called last."""
    rows = f"(select {table.column_list} from {rows_of(reader, table.name)})"
    into = f"{table.name} ({table.column_list})"
    form = same_form(reader, table.name, target, table.name, [column.name for column in table.columns])
    return copy_rows(reader, rows, target, into, form=form, moved=moved).rows
