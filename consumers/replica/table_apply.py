"""A table's changes brought into the open transaction of the target, and what is done where it does not take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import Connection

from gdq.consumers.replica.changes import (
    STAGE,
    Applied,
    netted_sql,
    replace_rows,
    stage_changes,
    update_rows,
)
from gdq.consumers.replica.conflicts import settle_conflicts, settle_differing
from gdq.consumers.replica.policy import DIFFERING, Answer, Kind, Policies
from gdq.consumers.replica.table import ReplicaTable
from gdq.errors import GdqError
from gdq.sql_text import raw


class RowsLackingError(GdqError):
    """The target lacks rows that the source changed or deleted, or a trigger of its own keeps them as they are."""


@dataclass(frozen=True, slots=True)
class TableApplier:
    """Applies the changes of a replica's tables: `policies` answer conflicts, which are noted in the target."""

    replica: str
    source: Connection[Any]
    target: Connection[Any]
    policies: Policies

    def apply(self, table: ReplicaTable, log_rows: str, truncated: int | None, tick: int) -> Applied:
        """Bring a table's changes of the batch that ends with a tick into the open transaction of the target.

        `truncated`: the number of the last TRUNCATE, which has been applied; earlier changes are left out.
        """
        answers = self.answers(table)
        whole = any(kind in answers for kind in DIFFERING)
        stage_changes(self.source, self.target, table, netted_sql(table, log_rows, truncated, whole=whole))
        conflicts = settle_differing(self.target, table, answers, self.replica, tick)
        while True:
            try:
                applied = self._attempt(table)
                break
            except (psycopg.errors.UniqueViolation, RowsLackingError) as error:
                settled = settle_conflicts(self.target, table, answers, self.replica, tick)
                if settled:
                    conflicts += settled
                    continue
                # two rows may have swapped the values of another unique key
                if isinstance(error, RowsLackingError) or not table.more_keys or table.extra:
                    raise
                applied = self._attempt(table, replaced=True)
                break
        self.target.execute(f"drop table {STAGE}")
        return replace(applied, conflicts=conflicts)

    def answers(self, table: ReplicaTable) -> dict[Kind, Answer]:
        """What is done about conflicts in a table; GdqError if a column that decides is missing."""
        return self.policies.of(table.name, [column.name for column in table.columns])

    def _attempt(self, table: ReplicaTable, *, replaced: bool = False) -> Applied:
        """Apply what is staged, in a savepoint; RowsLackingError if the target lacks some of the rows."""
        with self.target.transaction():
            applied = (replace_rows if replaced else update_rows)(self.target, table)
            row = self.target.execute(raw(f"select count(*) from {STAGE} where not is_new")).fetchone()
            lacking = 0 if row is None else row[0] - applied.updated - applied.deleted
            if lacking:
                raise RowsLackingError(
                    f"table {table.name} of the target did not take {lacking} changes",
                    hint="Has it triggers that are ENABLE ALWAYS or ENABLE REPLICA and keep rows as they are?",
                )
            return applied
