"""Tables that a replica copies whole, each by one COPY in a transaction of the target, by several workers.

A worker copies a group of tables at one snapshot of the source, which is short: small tables share one. The snapshot is
stored beside each table, and the changes after it are applied later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumers.replica.copy_workers import CopyRun, CopyWorker
from gdq.consumers.replica.source_tables import SourceTable, source_tables
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table_copy import CopyOptions, Describe, copy_table, make_ready, name_before
from gdq.consumers.views.snapshot_holder import SnapshotHolder, hold_snapshot
from gdq.sql_text import raw

# Tables of a group, and their bytes on disk: much beside the statements that a snapshot costs, little beside a copy.
_GROUP_TABLES = 50
_GROUP_BYTES = 16 * 2**20


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
    copies = _Copies(source, describe, options, run)
    return run.run(workers, groups, copies.copy_group)


def grouped(state: ReplicaState, tables: Sequence[SourceTable], sizes: Mapping[int, int]) -> list[list[SourceTable]]:
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

    def copy_group(self, worker: CopyWorker, group: Sequence[SourceTable]) -> None:
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
