"""Tables that a replica copies whole, each by one COPY in a transaction of the target, by several workers.

A worker copies a group of tables at one snapshot of the source, which is short: small tables share one. The snapshot is
stored beside each table, and the changes after it are applied later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from psycopg import Connection

from gdq.consumers.replica.copy_sizes import TableSize, grouped
from gdq.consumers.replica.copy_workers import CopyRun, CopyWorker, HeldTable, copy_groups
from gdq.consumers.replica.source_tables import SourceTable, source_tables
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table_copy import CopyOptions, Describe, copy_table, make_ready, name_before
from gdq.consumers.views.snapshot_holder import SnapshotHolder, hold_snapshot


def copy_whole(
    source: Connection[Any],
    workers: Sequence[CopyWorker],
    groups: Sequence[Sequence[SourceTable]],
    describe: Describe,
    *,
    options: CopyOptions,
    run: CopyRun,
) -> bool:
    """Copy groups of tables; False if the run was stopped before. `source` shows the present catalog."""
    return copy_groups(workers, groups, _Copies(source, describe, options, run).hold, run)


def whole_groups(
    state: ReplicaState, tables: Sequence[SourceTable], sizes: Mapping[int, TableSize]
) -> list[list[SourceTable]]:
    """The tables in groups, the largest first. Those that get another table's name are one, in their order."""
    moved = [table for table in tables if _is_moved(state, table)]
    groups = grouped([table for table in tables if table not in moved], lambda table: sizes[table.relid])
    return [moved, *groups] if moved else groups


def _is_moved(state: ReplicaState, table: SourceTable) -> bool:
    """True if the table, or another one of its name, has another name in the target."""
    known = state.known(table.table_name)
    return (name_before(state, table) or table.table_name) != table.table_name or (
        known is not None and known.relid != table.relid
    )


@dataclass(frozen=True, slots=True)
class _Copies:
    """What the workers of one run do; `source` answers questions of all of them about the present catalog."""

    source: Connection[Any]
    describe: Describe
    options: CopyOptions
    run: CopyRun

    @contextmanager
    def hold(self, worker: CopyWorker, group: Sequence[SourceTable]) -> Iterator[list[HeldTable]]:
        """Lock tables in a worker's session, and take a snapshot, until the block ends."""
        state = worker.state
        with hold_snapshot(worker.reader, state.queue, [table.table_name for table in group]) as holder:
            locked = source_tables(self.source, state.queue, state.name)
            tables = [locked[table.relid] for table in group]
            yield [HeldTable(table.table_name, partial(self._copy, holder, state, table)) for table in tables]

    def _copy(self, holder: SnapshotHolder, state: ReplicaState, table: SourceTable) -> str:
        """Copy a table, or make it alone, and store the snapshot; returns what is told of it."""
        name = table.table_name
        columns, made = make_ready(self.source, holder, state, table, options=self.options, tell=self.run.told)
        described = self.describe(table, state.connection)
        if self.options.copy or made:
            rows = copy_table(holder.connection, state.connection, described, self.run.moved)
            told = f"copied {name}: {rows} rows"
        else:
            told = f"not copied {name}: the target is taken to have the rows"
        state.copied(name, table.relid, holder.snapshot, columns)
        return told
