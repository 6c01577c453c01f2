"""Copies of the tables that a slot feeds, by several workers: each at a snapshot of its own, which small ones share.

What a table's snapshot sees is left out of what the slot sends of that table, so the snapshots of tables need not be
one, and none outlives the reading of its rows. A large table is read in parts, which all workers read at one snapshot.
A part is committed by itself: a copy that is interrupted begins again, and tables that are copied stay so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.copy.chunk_progress import take_copy
from gdq.consumers.copy.pieces import PIECE_BYTES, CopyChoice, Piece, describe_source_table
from gdq.consumers.copy.target_columns import same_form
from gdq.consumers.replica.column_changes import change_columns
from gdq.consumers.replica.copy_sizes import TableSize, expected_rows, grouped, shown_names, table_sizes
from gdq.consumers.replica.copy_workers import (
    CopyRun,
    CopyWorker,
    HeldTable,
    copy_groups,
    open_reader,
    open_writer,
    take_alone,
)
from gdq.consumers.replica.foreign_keys import foreign_keys
from gdq.consumers.replica.joined_copy import AllRows
from gdq.consumers.replica.slot.published import PublishedTable, current_snapshot, published_tables
from gdq.consumers.replica.slot.slot_apply import SlotApplier
from gdq.consumers.replica.slot.slot_state import SlotReplicaState
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.replica.table_copy import CopyOptions, copy_table, make_room, needs_room
from gdq.consumers.replica.table_ddl import create_schemas, create_table, is_missing
from gdq.consumers.slot.replication import lsn_number
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.consumers.views.row_copy import copy_rows
from gdq.consumers.views.signals import TableWanted
from gdq.consumers.views.snapshot_holder import SnapshotHolder, lock_tables
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.sql_text import raw

_WRITTEN = qualified("select pg_catalog.pg_current_wal_insert_lsn()::text")
_BEGIN = "begin isolation level repeatable read read only"
_PAUSE_SECONDS = 0.1


def written_lsn(source: Connection[Any]) -> int:
    """An LSN after all commits that a snapshot taken before sees."""
    return lsn_number(scalar(source, _WRITTEN))


@dataclass(frozen=True, slots=True)
class SlotCopies:
    """Copies tables of a replica that a slot feeds; `source` shows the present catalog.

    `tell` gets lines, from any thread.
    """

    source: Connection[Any]
    state: SlotReplicaState
    applier: SlotApplier
    options: CopyOptions
    tell: Callable[[str], None]

    def copy(self, tables: Sequence[PublishedTable], stop: Callable[[], bool]) -> bool:
        """Copy tables, and store the snapshot of each in the target; False if `stop` came before all were copied.

        One that the target lacks is made there if the options say so. GdqError if the target has rows of a table that
        this replica has not copied before, unless they are to be overwritten.
        """
        there = self.state.connection
        missing = [table.name for table in tables if self.options.create and is_missing(there, table.name)]
        for table in tables:
            if self.state.known(table.name) is None and table.name not in missing:
                self.applier.describe(table)  # all that could not be copied is told before the first copy
        create_schemas(there, missing)
        sizes = table_sizes(self.source, [table.oid for table in tables])
        large = [table for table in tables if self._is_large(table, sizes[table.oid])]
        whole = [table for table in tables if table not in large]
        groups = grouped(whole, lambda table: sizes[table.oid])
        if self._jointly:
            large, groups = [], [list(tables)]
        with ExitStack() as stack:
            workers = [
                CopyWorker(open_reader(stack, self.source, self.state), open_writer(stack, self.state))
                for _ in range(self.options.workers if large else min(self.options.workers, len(groups)))
            ]
            alone = take_alone(partial(_take, workers[0]), workers, stop)
            done = bool(alone) and self._copy(workers, groups, large, sizes, stop)
        self.state.load()
        self.state.note_copies(written_lsn(self.source))
        return done

    def _copy(
        self,
        workers: Sequence[CopyWorker],
        groups: Sequence[Sequence[PublishedTable]],
        large: Sequence[PublishedTable],
        sizes: Mapping[int, TableSize],
        stop: Callable[[], bool],
    ) -> bool:
        if self._jointly:
            self._copy_joined(workers[0].reader, [table.name for table in groups[0]])
            return True
        if groups:
            run = self._run([table for group in groups for table in group], sizes, stop)
            if not copy_groups(workers, groups, partial(self._hold, run), run):
                return False
        return all(self._copy_parts(workers, table, sizes, stop) for table in large)

    @property
    def _jointly(self) -> bool:
        """True if foreign keys fire: all that they join is of one moment."""
        return self.options.copy and self.applier.tables.jointly

    def _run(
        self, tables: Sequence[PublishedTable], sizes: Mapping[int, TableSize], stop: Callable[[], bool]
    ) -> CopyRun:
        name = shown_names([table.name for table in tables])
        expected = expected_rows(sizes[table.oid] for table in tables)
        return CopyRun(name, expected, tell=self.tell, show=self.options.show, stop=stop)

    def _is_large(self, table: PublishedTable, size: TableSize) -> bool:
        """True if a table is copied in parts, which needs all rows of the target's table."""
        large = self.options.copy and size.is_large(self.options.chunk_rows)
        return large and self.state.shared_with(table.name) is None

    @contextmanager
    def _hold(self, run: CopyRun, worker: CopyWorker, group: Sequence[PublishedTable]) -> Iterator[list[HeldTable]]:
        """Lock tables in a worker's session, and take a snapshot, until the block ends."""
        names = [table.name for table in group]
        with self._locked(worker.reader, names) as (snapshot, tables):
            yield [HeldTable(table.name, partial(self._copy_whole, run, worker, table, snapshot)) for table in tables]

    @contextmanager
    def _locked(
        self, reader: Connection[Any], names: Sequence[str]
    ) -> Iterator[tuple[PgSnapshot, list[PublishedTable]]]:
        """Lock tables, take a snapshot, and look at them as it sees them; GdqError if one is published no longer."""
        # before the snapshot: a table that is truncated or rewritten after it would read as empty
        lock_tables(reader, _BEGIN, ", ".join(names))
        try:
            snapshot = current_snapshot(reader)
            tables = published_tables(reader, self.state.queue, names)
            for name in names:
                if name not in tables:
                    raise GdqError(f"table {name} is no longer published for queue {self.state.queue}")
            yield snapshot, [tables[name] for name in names]
        finally:
            if not reader.closed:
                reader.rollback()

    def _copy_whole(self, run: CopyRun, worker: CopyWorker, table: PublishedTable, snapshot: PgSnapshot) -> str:
        """Copy a table in the open transaction of the target, or make it alone, and store the snapshot.

        Returns what is told of it.
        """
        described, made = self._make_ready(worker, table, run.told)
        told = f"not copied {table.name}: the target is taken to have the rows"
        if self.options.copy or made:
            rows = copy_table(worker.reader, worker.state.connection, described, run.moved)
            told = f"copied {table.name}: {rows} rows"
        worker.state.copied(table.name, table.oid, snapshot.text, table.columns)
        return told

    def _make_ready(
        self, worker: CopyWorker, table: PublishedTable, tell: Callable[[str], None]
    ) -> tuple[ReplicaTable, bool]:
        """Have the target's table take a copy, in the open transaction: made if it is missing, else with the source's
        columns, and without its rows. How both sides have it, and whether it was made.

        Without `options.copy` only what is missing is made.
        """
        reader, state, name = worker.reader, worker.state, table.name
        made = self._made(table, reader, state.connection, tell)
        if self.options.copy and not made:
            make_room(state, name, overwrite=self.options.overwrite)
            if known := state.known(name):
                change_columns(reader, state.connection, name, known.columns, table.columns, relid=table.oid)
        return self.applier.describe(table, reader, state.connection), made

    def _made(
        self, table: PublishedTable, reader: Connection[Any], target: Connection[Any], tell: Callable[[str], None]
    ) -> bool:
        """Make a table if the target lacks it, and the options say so; True if it was made."""
        if not self.options.create or not is_missing(target, table.name):
            return False
        create_table(reader, target, table.name, table.column_names, self.applier.key(table, reader), tell=tell)
        return True

    def _copy_parts(
        self,
        workers: Sequence[CopyWorker],
        table: PublishedTable,
        sizes: Mapping[int, TableSize],
        stop: Callable[[], bool],
    ) -> bool:
        """Copy a large table by all workers; False if `stop` came before, and the copy begins again later."""
        state, name = workers[0].state, table.name
        run = self._run([table], sizes, stop)
        with self._held_by_all(workers, name) as (snapshot, held):
            with state.connection.transaction():
                described, _ = self._make_ready(workers[0], held, self.tell)
                # what is in the target from now on is no copy before all parts are
                state.copied(name, held.oid, snapshot.text, held.columns.while_copied())
            pieces = self._pieces(workers[0].reader, name, sizes[table.oid])
            rows: list[int] = []
            if not run.run(workers, pieces, partial(self._copy_piece, run, described, rows)):
                return False
        with state.connection.transaction():
            state.copied(name, held.oid, snapshot.text, held.columns)
        state.connection.execute(raw(f"analyze {name}"))
        self.tell(f"copied {name}: {sum(rows)} rows")
        return True

    @contextmanager
    def _held_by_all(self, workers: Sequence[CopyWorker], name: str) -> Iterator[tuple[PgSnapshot, PublishedTable]]:
        """Have the sessions of all workers read a locked table at one snapshot until the block ends."""
        lead, others = workers[0].reader, [worker.reader for worker in workers[1:]]
        while True:
            with ExitStack() as ended, self._locked(lead, [name]) as (snapshot, tables):
                exported = scalar(lead, "select pg_catalog.pg_export_snapshot()")
                try:
                    for reader in others:
                        ended.callback(reader.rollback)
                        reader.execute("begin read only")
                        SnapshotHolder(lead, snapshot.text, exported, name).join(reader)
                except TableWanted:
                    pass  # somebody waits for the table, and for the lead's lock: let him have it
                else:
                    yield snapshot, tables[0]
                    return
            time.sleep(_PAUSE_SECONDS)

    def _pieces(self, reader: Connection[Any], name: str, size: TableSize) -> list[Piece]:
        """The parts of a table at the reader's snapshot: of so many rows as the options say, but not too large."""
        block_size = int(scalar(reader, "select pg_catalog.current_setting('block_size')"))
        of_rows = size.bytes * self.options.chunk_rows // size.rows if size.rows else PIECE_BYTES
        return describe_source_table(reader, CopyChoice(name)).pieces(block_size, min(PIECE_BYTES, of_rows))

    @staticmethod
    def _copy_piece(run: CopyRun, table: ReplicaTable, rows: list[int], worker: CopyWorker, piece: Piece) -> None:
        """Copy a part in a transaction of the target."""
        reader, target = worker.reader, worker.state.connection
        form = same_form(reader, table.name, target, table.name, [column.name for column in table.columns])
        into = f"{table.name} ({table.column_list})"
        with target.transaction():
            # the commit that makes the copy whole waits for the disk, and all before it with it
            target.execute("set local synchronous_commit = off")
            query = f"({piece.select(table.column_list)})"
            rows.append(copy_rows(reader, query, target, into, form=form, moved=run.moved).rows)

    def _copy_joined(self, reader: Connection[Any], names: Sequence[str]) -> None:
        """Copy tables at one snapshot in one transaction of the target, where foreign keys between them fire."""
        target, applier = self.state.connection, self.applier.tables
        with self._locked(reader, names) as (snapshot, tables):
            end = written_lsn(self.source)
            with target.transaction():
                applier.begin()
                there = [table for table in tables if not self._made(table, reader, target, self.tell)]
                overwrite = self.options.overwrite
                applier.empty([one.name for one in there if needs_room(self.state, one.name, overwrite=overwrite)])
                for table in there:
                    if known := self.state.known(table.name):
                        change_columns(reader, target, table.name, known.columns, table.columns, relid=table.oid)
                described = [self.applier.describe(table) for table in tables]
                for table in tables:
                    self.state.copied(table.name, table.oid, snapshot.text, table.columns)
                copied = AllRows(reader, applier, described, foreign_keys(target, names), end).bring()
            for name, rows in copied.items():
                target.execute(raw(f"analyze {name}"))
                self.tell(f"copied {name}: {rows} rows")


def _take(worker: CopyWorker) -> bool:
    take_copy(worker.state.connection, worker.state.copy_name)
    return True
