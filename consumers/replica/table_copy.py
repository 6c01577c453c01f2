"""Whole tables copied to a replica's target by several workers, each table in a transaction of its own.

A worker copies a group of tables at one snapshot of the source, which is short: a large table is a group, and small
ones are several. The snapshot is stored beside each table, and the changes after it are applied later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumers.copy.pieces import copy_columns
from gdq.consumers.replica.changes import empty_table
from gdq.consumers.replica.column_changes import SourceColumns, change_columns, source_columns
from gdq.consumers.replica.copy_workers import CopyRun, ShowProgress, no_progress, open_reader, open_writer
from gdq.consumers.replica.source_tables import SourceTable, source_tables
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.replica.table_ddl import create_schemas, create_table, is_missing, rename_table
from gdq.consumers.views.row_copy import CopyForm, copy_rows
from gdq.consumers.views.snapshot_holder import SnapshotHolder, hold_snapshot
from gdq.errors import GdqError
from gdq.sql_text import raw

# Tables of a group, and their bytes on disk: much beside the statements that a snapshot costs, little beside a copy.
_GROUP_TABLES = 50
_GROUP_BYTES = 16 * 2**20

# Of each table and its partitions: bytes, and about how many rows; the estimate follows the blocks since ANALYZE. Sizes
# wait for locks: of p.oid, so that no plan looks at all tables.
_SIZES = """
select o.relid::bigint, s.bytes, s.rows
  from unnest(%s::oid[]) as o(relid), lateral (
    select coalesce(sum(b.bytes), 0)::bigint as bytes,
           sum(case when c.reltuples >= 0 then c.reltuples / greatest(c.relpages, 1) end
               * b.heap / current_setting('block_size')::int)::bigint as rows
      from (select o.relid::oid union select t.relid from pg_partition_tree(o.relid) t where t.isleaf) as p(oid)
      join pg_class c on c.oid = p.oid and c.relkind <> 'p',
           lateral (select pg_table_size(p.oid) as bytes, pg_relation_size(p.oid) as heap) as b) as s"""


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker's session in the source, and the replica's state in its session of the target."""

    reader: Connection[Any]
    state: ReplicaState


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How tables are copied. `create`: make those that the target lacks. `overwrite`: replace rows of others.

    `copy` False: the target has the rows already, except for tables that are made. `show` shows the progress.
    """

    create: bool = False
    overwrite: bool = False
    copy: bool = True
    workers: int = 2
    show: ShowProgress = no_progress


def copy_tables(
    source: Connection[Any],
    state: ReplicaState,
    tables: Sequence[SourceTable],
    describe: Callable[[SourceTable, Connection[Any]], ReplicaTable],
    options: CopyOptions,
    *,
    tell: Callable[[str], None],
    stop: Callable[[], bool],
) -> bool:
    """Copy tables, and store the snapshot of each in the target; False if `stop` came before all were copied.

    A table that was copied before gets the source's present name and columns first; one that the target lacks is made
    there if `options` say so. `describe` gives a table as it and a session of the target are then. GdqError if the
    target has rows of a table that this replica has not copied before, unless they are to be overwritten.
    """
    if not tables:
        return True
    there = state.connection
    missing = [table.table_name for table in tables if options.create and is_missing(there, table.table_name)]
    for table in tables:
        if table.table_name not in state.tables and table.table_name not in missing:
            describe(table, there)  # all that could not be copied is told before the first copy
    create_schemas(there, missing)
    sizes = {relid: (size, rows) for relid, size, rows in source.execute(_SIZES, [[t.relid for t in tables]])}
    groups = _grouped(state, tables, {relid: size for relid, (size, _) in sizes.items()})
    known = [rows for _, rows in sizes.values() if rows is not None]
    expected = sum(known) if len(known) == len(tables) else None
    name = tables[0].table_name if len(tables) == 1 else f"{len(tables)} tables"
    run: CopyRun[_Worker, Sequence[SourceTable]] = CopyRun(name, expected, tell=tell, show=options.show, stop=stop)
    copies = _Copies(source, describe, options, run)
    with ExitStack() as stack:
        workers = [
            _Worker(open_reader(stack, source, state), open_writer(stack, state))
            for _ in range(min(options.workers, len(groups)))
        ]
        whole = run.run(workers, lambda one: (one.reader, one.state.connection), groups, copies.copy_group)
    state.load()
    return whole


def _grouped(state: ReplicaState, tables: Sequence[SourceTable], sizes: dict[int, int]) -> list[list[SourceTable]]:
    """The tables in groups, the largest first. Those that get another table's name are one, in their order."""
    moved = [table for table in tables if _is_moved(state, table)]
    groups: list[list[SourceTable]] = []
    full = 0
    for table in sorted(tables, key=lambda table: -sizes.get(table.relid, 0)):
        if table in moved:
            continue
        size = sizes.get(table.relid, 0)
        if not groups or full + size > _GROUP_BYTES or len(groups[-1]) == _GROUP_TABLES:
            groups.append([])
            full = 0
        groups[-1].append(table)
        full += size
    return [moved, *groups] if moved else groups


def _is_moved(state: ReplicaState, table: SourceTable) -> bool:
    """True if the table, or another one of its name, has another name in the target."""
    known = state.tables.get(table.table_name)
    return state.names.get(table.relid, table.table_name) != table.table_name or (
        known is not None and known.relid != table.relid
    )


@dataclass(frozen=True, slots=True)
class _Copies:
    """What the workers of one run do; `source` answers questions of all of them about the present catalog."""

    source: Connection[Any]
    describe: Callable[[SourceTable, Connection[Any]], ReplicaTable]
    options: CopyOptions
    run: CopyRun[_Worker, Sequence[SourceTable]]

    def copy_group(self, worker: _Worker, group: Sequence[SourceTable]) -> None:
        """Copy tables at one snapshot, each in a transaction of the target."""
        state = worker.state
        with hold_snapshot(worker.reader, state.queue, [table.table_name for table in group]) as holder:
            locked = source_tables(self.source, state.queue, state.name)
            for table in (locked[table.relid] for table in group):
                if not self.run.goes_on():
                    return
                with state.connection.transaction():
                    told = self._copy(holder, state, table)
                state.connection.execute(raw(f"analyze {table.table_name}"))
                self.run.told(told)

    def _copy(self, holder: SnapshotHolder, state: ReplicaState, table: SourceTable) -> str:
        """Copy a table, or make it alone, and store the snapshot; returns what is told of it."""
        name, before = table.table_name, state.names.get(table.relid)
        missing = all(is_missing(state.connection, one) for one in (name, before) if one is not None)
        columns = source_columns(self.source, state.queue, table.relid, table.version)
        if self.options.create and missing:
            names = [column for column, _ in columns.columns.values()]
            create_table(holder.connection, state.connection, name, names, table.key or [], tell=self.run.told)
        elif self.options.copy:
            _follow(self.source, state, table, columns, overwrite=self.options.overwrite)
        described = self.describe(table, state.connection)
        if self.options.copy or missing:
            rows = copy_table(holder.connection, state.connection, described, self.run.moved)
            told = f"copied {name}: {rows} rows"
        else:
            told = f"not copied {name}: the target is taken to have the rows"
        state.copied(name, table.relid, holder.snapshot, columns)
        return told


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


def copy_table(
    reader: Connection[Any],
    target: Connection[Any],
    table: ReplicaTable,
    moved: Callable[[int], None] = lambda _: None,
) -> int:
    """Copy all rows; returns their number. `moved` gets the rows since it was called last."""
    # a partitioned table's rows are in its partitions; those of inheritance children belong to the children
    only = f"(select {table.column_list} from {{}}{table.name})"
    row = reader.execute("select relkind = 'p' from pg_class where oid = %s::regclass", [table.name]).fetchone()
    rows_of = only.format("" if row is not None and row[0] else "only ")
    into = f"{table.name} ({table.column_list})"
    return copy_rows(reader, rows_of, target, into, form=copy_form(reader, target, table), moved=moved).rows


def copy_form(reader: Connection[Any], target: Connection[Any], table: ReplicaTable) -> CopyForm:
    """Binary if both sides have the same types, all of them PostgreSQL's own; as text they may differ a little."""
    ours, theirs = ({c.name: c for c in copy_columns(side, table.name)} for side in (reader, target))
    names = {column.name for column in table.columns}
    same = names <= ours.keys() and all(ours[name].binary and theirs[name].type == ours[name].type for name in names)
    return "binary" if same else "text"
