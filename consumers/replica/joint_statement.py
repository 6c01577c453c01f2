"""One statement that changes all tables whose changes are staged, and what it must not do by foreign keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection, errors

from gdq.consumers.replica.changes import Applied
from gdq.consumers.replica.foreign_keys import ForeignKey
from gdq.consumers.replica.joint_sql import (
    StagedTable,
    acted_on_sql,
    joint_statement,
    may_set,
    parked_sql,
    stage_acted_on_sql,
)
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
        return table.keyed and table.more_keys and not table.extra and not held

    def _run(self, replaced: Collection[str]) -> Applied:
        target = self.target
        with target.transaction():
            parked = self._parked()
            row = target.execute(raw(joint_statement(self.tables, replaced, parked))).fetchone()
            assert row is not None
            for staged in self.tables:
                if columns := parked.get(staged.table.name):
                    target.execute(raw(parked_sql(staged, columns)))
            applied = Applied()
            for staged, (deleted, updated, inserted, new, old) in zip(self.tables, row[0], strict=True):
                if lacking := max(abs(new - inserted - updated), abs(old - updated - deleted)):
                    raise RowsLackingError(f"did not take {lacking} changes of table {staged.table.name}")
                applied += Applied(inserted, updated, deleted)
            return applied

    def _parked(self) -> dict[str, set[str]]:
        """By table the columns that are NULL until the statement has ended: a key would change their rows by itself.

        They have values that other rows give up; those of them that are not staged are staged as they are.
        ForeignKeyViolation where a key would change rows that the source has otherwise, and that cannot wait so.
        """
        by_name = {staged.table.name: staged for staged in self.tables}
        parked: dict[str, set[str]] = {}
        for key in self.keys:
            parent, child = by_name.get(key.parent), by_name.get(key.child)
            if parent is None or not key.child_known:
                continue
            query = acted_on_sql(key, parent, child)
            found = (False, False) if query is None else self.target.execute(raw(query)).fetchone()
            if found == (False, False):
                continue
            if child is not None and key.nullable and may_set(child.table, key.child_columns):
                self.target.execute(raw(stage_acted_on_sql(key, parent, child)))
                child.paired = False
            else:
                raise errors.ForeignKeyViolation(
                    f'foreign key "{key.name}" would change rows of table {key.child} that the source has otherwise'
                )
            parked.setdefault(key.child, set()).update(key.child_columns)
        return parked
