"""Tables that a replica copies whole, each by one COPY in a transaction of the target, by several workers.

A worker copies a group of tables at one snapshot of the source, which is short: small tables share one. The snapshot is
stored beside each table, and the changes after it are applied later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from psycopg import Connection

from gdq.consumers.replica.copy_workers import CopyRun, CopyWorker, HeldTable, copy_groups
from gdq.consumers.replica.source_tables import SourceTable, require_oids, source_tables
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table_copy import CopyOptions, Describe, copy_table, make_ready
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
            require_oids(holder.connection, {table.table_name: table.relid for table in group})
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
