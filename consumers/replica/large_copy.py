"""Large tables copied to a replica's target in chunks: in short transactions on both sides, which go on after a kill.

Each step stores how far the table is with its rows, and the last one that the table is copied, at that step's snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.copy.chunk_progress import Progress, begin_copy
from gdq.consumers.copy.chunk_step import ChunkSteps, record_tick
from gdq.consumers.copy.chunk_table import ChunkTable
from gdq.consumers.copy.chunk_target import ChunkTarget
from gdq.consumers.copy.chunk_work import ChunkWork, TableProgress
from gdq.consumers.copy.pieces import copy_columns
from gdq.consumers.copy.snapshot import CopyProgress
from gdq.consumers.replica.changes import empty_table
from gdq.consumers.replica.column_changes import source_columns
from gdq.consumers.replica.copy_workers import CopyWorker, take_alone
from gdq.consumers.replica.source_tables import SourceTable, require_capture, require_oids, source_tables
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table_copy import CopyOptions, Describe, make_ready
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.era import check_position
from gdq.errors import GdqError, TruncatedPosition
from gdq.sql_text import raw

# Rows of the first chunks: their snapshots are short on a slow machine, too.
_FIRST_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class _Target(ChunkTarget):
    """A worker's session of the target, by which the replica's `state` is changed, too."""

    state: ReplicaState

    def empty(self, target: str) -> None:
        """Delete all rows of a table whose copy starts again; GdqError if others have brought some of them."""
        if other := self.state.shared_with(target):
            raise GdqError(
                f"the copy of table {target} has to start again, and has rows of replica {other} in the target",
                hint=f"Delete this source's rows there, then copy them: --copy-again '{target}'",
            )
        empty_table(self.connection, target)


class _Steps(ChunkSteps):
    """One worker's steps, which keep the replica's state in line with the rows."""

    def __init__(self, large: LargeCopy, worker: CopyWorker) -> None:
        state = worker.state
        tick = partial(record_tick, large.source, state.queue)
        target = _Target(state.connection, state)
        ChunkSteps.__init__(self, state.queue, state.copy_name, worker.reader, target, tick, large.options.chunk_rows)
        self.large, self.state = large, state
        self._size = min(_FIRST_ROWS, large.options.chunk_rows)  # grows as long as a chunk is done at once
        # rows and how far they are commit together: what a server's crash takes is copied again
        self._for_good = scalar(state.connection, "select current_setting('synchronous_commit')")
        state.connection.execute("set synchronous_commit = off")

    def prepare(self, holder: SnapshotHolder, table: str) -> None:
        """Have the target's table take the copy, and store that it has begun."""
        self._require_same(holder, table)
        large, captured = self.large, self.large.captured(table)
        columns, _ = make_ready(large.source, holder, self.state, captured, options=large.options, tell=large.tell)
        large.check(captured, self.state.connection)
        self.state.copied(table, captured.relid, holder.snapshot, columns.while_copied())

    def describe(self, holder: SnapshotHolder, table: str) -> ChunkTable:
        """The table with the columns that are captured, and that the target does not compute."""
        self._require_same(holder, table)
        whole = ChunkSteps.describe(self, holder, table)
        names = self.large.copied_names(whole, self.state.connection)
        return replace(whole, columns=tuple(column for column in whole.columns if column[0] in names))

    def join(self, states: Sequence[Progress]) -> Progress:
        """As ChunkSteps has it; the target's planner learns what it has got."""
        joined = ChunkSteps.join(self, states)
        self.state.connection.execute(raw(f"analyze {joined.table}"))
        return joined

    def finish(self, holder: SnapshotHolder, joined: Progress) -> None:
        """Store, for good, that the table is copied: as of the step's snapshot its rows are the source's."""
        self.state.connection.execute("select set_config('synchronous_commit', %s, true)", [self._for_good])
        captured = self.large.captured(joined.table)
        columns = source_columns(self.large.source, self.queue, captured.relid, captured.version)
        self.state.copied(joined.table, captured.relid, holder.snapshot, columns)
        self.large.finished[joined.table] = joined.rows

    def _require_same(self, holder: SnapshotHolder, table: str) -> None:
        """UndefinedTable if another table has got the name, which the holder's lock keeps as it is."""
        require_oids(holder.connection, {table: self.large.relid(table)})


@dataclass(slots=True)
class LargeCopy:
    """Copies large tables; `source` shows the present catalog, to all workers.

    `check` raises GdqError for a table that the replica cannot keep. `tell` gets lines, from any thread.
    """

    source: Connection[Any]
    state: ReplicaState
    tables: Sequence[SourceTable]
    check: Describe
    options: CopyOptions
    tell: Callable[[str], None]
    finished: dict[str, int] = field(default_factory=dict)
    _names: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def run(
        self,
        workers: Sequence[CopyWorker],
        sizes: Mapping[str, int],
        expected: int | None,
        *,
        anew: Collection[str],
        stop: Callable[[], bool],
    ) -> bool:
        """Copy what is missing, about `expected` rows; False if `stop` came before. `sizes`: the bytes of each table.

        `anew`: tables whose copy starts again.
        """
        steps = [_Steps(self, worker) for worker in workers]
        lead = steps[0]
        pairs = [(table.table_name, table.table_name) for table in self.tables]
        begin = partial(begin_copy, lead.target.connection, self.state.copy_name, pairs)
        tables = take_alone(begin, workers, stop)
        if tables is None:
            return False
        tables = [
            [lead.empty(states)] if states[0].table in anew and any(state.begun for state in states) else states
            for states in tables
        ]
        self._check_positions(tables)
        # a worker for each table if they are alike: two of them in one table are in each other's way
        total = sum(sizes.values())
        ranges = {name: max(1, round(len(steps) * size / total)) if total else 1 for name, size in sizes.items()}
        # one after the other: names may change hands
        tables = [
            lead.begin(states[0], ranges[states[0].table], grow=False) if states[0].described is None else states
            for states in tables
        ]
        try:
            with self.options.show() as progress:
                return self._copy(tables, steps, self._told(tables, progress, expected), stop)
        except GdqError:
            require_capture(self.source, self.state.queue, [table.table_name for table in self.tables])
            raise

    def captured(self, table: str) -> SourceTable:
        """A table as the source has it now; by its oid, as it may have got another name."""
        return source_tables(self.source, self.state.queue, self.state.name)[self.relid(table)]

    def relid(self, table: str) -> int:
        """The oid of the source's table whose copy has begun under a name."""
        [relid] = [one.relid for one in self.tables if one.table_name == table]
        return relid

    def copied_names(self, table: ChunkTable, target: Connection[Any]) -> set[str]:
        """The columns that are copied, of a table that has these columns in the source."""
        described = (table.name, table.described)
        if described not in self._names:
            captured = self.captured(table.name)
            columns = source_columns(self.source, self.state.queue, captured.relid, captured.version)
            computed = {column.name for column in copy_columns(target, table.name) if column.generated}
            self._names[described] = {name for name, _ in columns.columns.values()} - computed
        return self._names[described]

    def _check_positions(self, tables: Sequence[Sequence[Progress]]) -> None:
        """Error if the source has lost the state that an earlier run has copied."""
        for position in {state.position for states in tables for state in states if state.position is not None}:
            with suppress(TruncatedPosition):  # the next step finds whether the changes of this table are gone
                check_position(self.source, self.state.queue, position)

    def _copy(
        self,
        tables: Sequence[Sequence[Progress]],
        steps: Sequence[_Steps],
        told: Callable[[TableProgress, str], None],
        stop: Callable[[], bool],
    ) -> bool:
        while tables:
            work = ChunkWork(tables, steps, told, stop)
            work.copy()
            if not stop():
                work.settle()
            tables = [states for states in work.states if states[0].table not in self.finished]
            if stop():
                break
        for name, rows in self.finished.items():
            self.tell(f"copied {name}: {rows} rows")
        return not tables

    def _told(
        self, tables: Sequence[Sequence[Progress]], progress: CopyProgress | None, expected: int | None
    ) -> Callable[[TableProgress, str], None]:
        rows = {states[0].table: sum(state.rows for state in states) for states in tables}
        name = next(iter(rows)) if len(rows) == 1 else f"{len(rows)} large tables"

        def told(done: TableProgress, what: str) -> None:
            if what != "copied":
                self.tell(f"copy of {done.table} {what}")
            rows[done.table] = done.rows
            if progress is not None:
                progress(name, "copying", sum(rows.values()), expected)

        return told
