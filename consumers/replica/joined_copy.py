"""Copies of tables that foreign keys join, into a target where these fire: all at one snapshot, in one transaction.

A row and that which it points to must be of one moment. So tables that have a copy already, and are joined with those
that are to be copied, are moved to the snapshot too, by their changes since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from psycopg import Connection

from gdq.conninfo import connect, conninfo_of
from gdq.consumers.copy.target_columns import rows_of
from gdq.consumers.replica.batch_apply import BatchApplier
from gdq.consumers.replica.changes import IN_STAGE, STAGE, Staged, make_stage
from gdq.consumers.replica.column_changes import source_columns
from gdq.consumers.replica.foreign_keys import ForeignKey, foreign_keys, joined_tables, parents_first
from gdq.consumers.replica.sessions import apply_settings
from gdq.consumers.replica.skip import later_snapshot
from gdq.consumers.replica.source_tables import SourceTable, require_oids, source_tables
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.replica.table_apply import TableApplier
from gdq.consumers.replica.table_copy import copy_table, needs_room, take_columns, take_name
from gdq.consumers.views.row_copy import copy_rows
from gdq.consumers.views.snapshot_holder import SnapshotHolder, hold_snapshot
from gdq.errors import mapped_errors
from gdq.source import Position
from gdq.sql_text import quote, raw

# Tables with changes that no row shows.
_EVENTS = """
select distinct e.tbl from gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot) e
 where e.kind <> 'message' and e.ev_id is not null"""


@dataclass(frozen=True, slots=True)
class JoinedCopy:
    """Copies tables that foreign keys of the target join; `tell` gets a line for each."""

    source: Connection[Any]
    state: ReplicaState
    applier: BatchApplier
    tell: Callable[[str], None]

    def copy(
        self, known: Collection[SourceTable], missing: Sequence[SourceTable], *, overwrite: bool
    ) -> list[SourceTable]:
        """Copy those of the missing tables that foreign keys concern; the others. `known`: all that the replica takes.

        GdqError if the target has rows of a table that this replica has not copied before, unless `overwrite`.
        """
        names = {self.state.names.get(table.relid, table.table_name): table.relid for table in known}
        keys = foreign_keys(self.state.connection, names.keys())
        concerned = {name for key in keys for name in (key.child, key.parent)}
        wanted = {table.relid for table in missing}
        for group in joined_tables(concerned & names.keys(), keys):
            relids = {names[name] for name in group}
            if relids & wanted:
                self._copy_group(relids, wanted, overwrite=overwrite)
                wanted -= relids
        return [table for table in missing if table.relid in wanted]

    def _copy_group(self, relids: Collection[int], wanted: Collection[int], *, overwrite: bool) -> None:
        """Bring tables to one snapshot of the source: those that are wanted by a copy, the others by their changes."""
        state, target = self.state, self.state.connection
        session = f"gdq:{state.queue}/{state.name}/copy"
        with connect(conninfo_of(self.source), application_name=session, autocommit=True) as reader:
            apply_settings(reader)
            captured = self._captured(relids)
            with hold_snapshot(reader, state.queue, [table.table_name for table in captured]) as holder:
                require_oids(holder.connection, {table.table_name: table.relid for table in captured})
                copies, moved = self._divide(self._captured(relids), wanted, holder.snapshot)
                with target.transaction():
                    self._prepare(copies, holder.snapshot, overwrite=overwrite)
                    described = [self.applier.reading.describe(table) for table in copies]
                    keys = foreign_keys(target, [table.table_name for table in (*copies, *moved)])
                    rows = AllRows(holder.connection, self.applier.tables, described, keys, state.tick).bring(
                        partial(self._stage_moved, holder, moved)
                    )
                    for table in moved:
                        state.moved(table.table_name, holder.snapshot)
                for name, number in rows.items():
                    target.execute(raw(f"analyze {name}"))
                    self.tell(f"copied {name}: {number} rows")

    def _captured(self, relids: Collection[int]) -> list[SourceTable]:
        """Some of the captured tables, as the source has them now."""
        tables = source_tables(self.source, self.state.queue, self.state.name)
        return [tables[relid] for relid in sorted(relids) if relid in tables and tables[relid].is_there]

    def _divide(
        self, tables: Sequence[SourceTable], wanted: Collection[int], till: str
    ) -> tuple[list[SourceTable], list[SourceTable]]:
        """The tables to be copied, and those that their changes alone bring to a snapshot."""
        with mapped_errors():
            altered = {name for (name,) in self.source.execute(_EVENTS, [self.state.queue, self._stands, till])}
        copies, moved = list[SourceTable](), list[SourceTable]()
        for table in tables:
            name = table.table_name
            same = self.state.names.get(table.relid) == name
            if same and table.relid not in wanted and name not in altered:
                same = self.state.tables[name].columns.version == table.version
                (moved if same else copies).append(table)
            else:
                copies.append(table)
        return copies, moved

    def _prepare(self, tables: Sequence[SourceTable], snapshot: str, *, overwrite: bool) -> None:
        """Give the target's tables the source's names and columns, and delete their rows."""
        for table in tables:
            take_name(self.state, table)
        names = [table.table_name for table in tables]
        self.applier.tables.begin()
        self.applier.tables.empty([name for name in names if needs_room(self.state, name, overwrite=overwrite)])
        for table in tables:
            columns = source_columns(self.source, self.state.queue, table.relid, table.version)
            take_columns(self.source, self.state, table, columns)
            # before the rows: one that the target refuses may become a dead letter
            self.state.copied(table.table_name, table.relid, snapshot, columns)

    @property
    def _stands(self) -> str:
        return Position.parse(self.state.position or "").snapshot

    def _stage_moved(self, holder: SnapshotHolder, moved: Sequence[SourceTable]) -> None:
        """Stage the changes of tables between where they stand and the snapshot."""
        for table in moved:
            begin = later_snapshot(self._stands, self.state.tables[table.table_name].snapshot)
            self.applier.stage_between(holder.connection, table, begin, holder.snapshot)


@dataclass(frozen=True, slots=True)
class AllRows:
    """All rows of tables on their way to the target, in its open transaction. `keys`: the foreign keys there."""

    reader: Connection[Any]
    tables: TableApplier
    copies: Sequence[ReplicaTable]
    keys: Sequence[ForeignKey]
    tick: int

    def bring(self, stage_moved: Callable[[], None] = lambda: None) -> dict[str, int]:
        """Bring the rows, and what `stage_moved` stages of other tables; the numbers of rows by table.

        They are filled by COPY, in the order of their keys, or in one statement if rows of others point to them, or
        they point to each other in a circle.
        """
        names = [table.name for table in self.copies]
        order, straight = parents_first(names, self.keys)
        pointed_to = any(key.parent in names and key.child_known and key.child not in names for key in self.keys)
        if straight and not pointed_to and not self.tables.cleared:
            stage_moved()
            self.tables.finish()
            by_name = {table.name: table for table in self.copies}
            return {name: copy_table(self.reader, self.tables.target, by_name[name]) for name in order}
        rows = {}
        for table in self.copies:
            numbers: list[int] = []
            self.tables.apply(table, partial(_stage_whole, self.reader, self.tables.target, table, numbers), self.tick)
            rows[table.name] = sum(numbers)
        stage_moved()
        self.tables.finish()
        return rows


def _stage_whole(
    reader: Connection[Any], target: Connection[Any], table: ReplicaTable, numbers: list[int]
) -> Sequence[Staged]:
    """Stage all rows of a table of the source, and add their number to a list; there are no pairs."""
    make_stage(target, table)
    values = ", ".join(column.logged(quote(column.name)) for column in table.columns)
    places = ", ".join(f"c{place}" for place in range(1, len(table.columns) + 1))
    query = f"(select true, {values} from {rows_of(reader, table.name)})"
    numbers.append(copy_rows(reader, query, target, f"{STAGE} (is_new, {places})", form="binary").rows)
    target.execute(f"analyze {STAGE}")
    return IN_STAGE
