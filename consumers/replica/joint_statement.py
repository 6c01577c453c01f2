"""One statement that changes all tables whose changes are staged, and what it must not do by foreign keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection, errors

from gdq.consumers.replica.changes import Applied
from gdq.consumers.replica.foreign_keys import ForeignKey
from gdq.consumers.replica.joint_sql import StagedTable, acted_on_sql, joint_statement
from gdq.consumers.replica.refusal import RowsLackingError
from gdq.consumers.replica.table import ReplicaTable
from gdq.sql_text import raw


@dataclass(frozen=True, slots=True)
class JointStatement:
    """The changes of staged tables. `keys`: the foreign keys from and to them."""

    target: Connection[Any]
    tables: Sequence[StagedTable]
    keys: Sequence[ForeignKey]

    def attempt(self) -> Applied:
        """Change all rows that are staged, in a savepoint; RowsLackingError if the target does not take some."""
        try:
            return self._run(set())
        except errors.UniqueViolation:
            # two rows may have swapped the values of another unique key
            replaced = {one.table.name for one in self.tables if self.may_replace(one.table)}
            if not replaced:
                raise
            return self._run(replaced)

    def may_replace(self, table: ReplicaTable) -> bool:
        """True if all changed rows of a table may be deleted and inserted again."""
        held = any(key.parent == table.name and key.keeps_row for key in self.keys)
        return table.more_keys and not table.extra and not held

    def _run(self, replaced: Collection[str]) -> Applied:
        target = self.target
        with target.transaction():
            self._check_actions()
            row = target.execute(raw(joint_statement(self.tables, replaced))).fetchone()
            assert row is not None
            applied = Applied()
            for staged, (deleted, updated, inserted, new, old) in zip(self.tables, row[0], strict=True):
                if lacking := max(new - inserted - updated, old - updated - deleted):
                    raise RowsLackingError(f"did not take {lacking} changes of table {staged.table.name}")
                applied += Applied(inserted, updated, deleted)
            return applied

    def _check_actions(self) -> None:
        """ForeignKeyViolation where a key would change rows by itself that the source has."""
        by_name = {staged.table.name: staged for staged in self.tables}
        for key in self.keys:
            parent = by_name.get(key.parent)
            if parent is None or not key.child_known:
                continue
            query = acted_on_sql(key, parent, by_name.get(key.child))
            if query is not None and self.target.execute(raw(query)).fetchone() == (True,):
                raise errors.ForeignKeyViolation(
                    f'foreign key "{key.name}" would change rows of table {key.child} that the source has otherwise'
                )
