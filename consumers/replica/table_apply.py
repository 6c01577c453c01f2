"""A table's changes brought into the open transaction of the target, and what is done where it does not take them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import Connection

from gdq.consumers.replica.changes import (
    IN_STAGE,
    PLACE_TAKEN,
    Applied,
    Staged,
    empty_table,
    release_stage,
    replace_rows,
    takes_other_identity,
    update_rows,
)
from gdq.consumers.replica.conflicts import settle_conflicts, settle_differing
from gdq.consumers.replica.dead_letters import DeadLetters
from gdq.consumers.replica.deferrable_keys import check_deferrable_keys
from gdq.consumers.replica.policy import DIFFERING, Answer, Kind, Policies
from gdq.consumers.replica.refusal import Refused, RowsLackingError, apply_in_parts, refusal_error, refuses_rows
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.replica.whole_rows import replace_whole_rows

# Staged rows come in the order of their keys, in which an index finds rows at least cost: a hash would be filled with
# what is staged, and changes come in the order of the table then; a merge would read all rows between the first key and
# the last. Rows without a key are found by a hash alone.
_BY_KEY = "set local enable_hashjoin = off; set local enable_mergejoin = off; set local enable_memoize = off"
_BY_ROW = _BY_KEY.replace("= off", "to default")


@dataclass(frozen=True, slots=True)
class TableApplier:
    """Applies the changes of a replica's tables: `policies` answer conflicts and refusals, which the target notes."""

    replica: str
    target: Connection[Any]
    policies: Policies
    letters: DeadLetters

    def apply(
        self,
        table: ReplicaTable,
        stage: Callable[[], Iterable[Staged]],
        tick: int,
        stage_all: Callable[[], Iterable[Staged]] | None = None,
    ) -> Applied:
        """Bring a table's changes of the batch that ends with a tick into the open transaction of the target.

        `stage()` stages the net change, in several parts if takes_parts(). It may leave out the old rows of pairs, or
        stage where nothing can be edited: then `stage_all()` stages all in STAGE. GdqError if the target refuses a row
        and rows do not become dead letters.
        """
        answers = self.answers(table)
        parts = stage()
        met = self.letters.meet_stage(table)
        conflicts = settle_differing(self.target, table, answers, self.replica, tick)
        applied, refused = None, list[Refused]()
        while applied is None:
            try:
                # dead letters and conflicts edit the stage
                applied = apply_staged(self.target, table, IN_STAGE if met or conflicts else parts)
            except (psycopg.Error, RowsLackingError) as error:
                if not refuses_rows(error):
                    raise
                if stage_all is not None:
                    parts = stage_all()
                    stage_all, met = None, self.letters.meet_stage(table)
                    continue
                old = self.letters.keys_sql(table)
                settled = settle_conflicts(self.target, table, answers, self.replica, tick, refused=old)
                conflicts += settled
                if not settled and self.policies.on_error == "stop":
                    raise refusal_error(table, error) from error
                if not settled:
                    applied, refused = apply_in_parts(self.target, table, apply_staged)
        self.letters.settle(table, met, refused, tick)
        release_stage(self.target, table)
        return replace(applied, conflicts=conflicts, dead_letters=len(refused))

    @property
    def jointly(self) -> bool:
        """False: each version of a table's columns is staged and applied by itself."""
        return False

    def begin(self) -> None:
        """Nothing: no transaction leaves something behind."""

    def empty(self, tables: Sequence[str]) -> None:
        """Delete all rows of some tables."""
        for name in tables:
            empty_table(self.target, name)

    @property
    def cleared(self) -> Collection[str]:
        """No tables: those that were emptied have no rows."""
        return ()

    def finish(self) -> Applied:
        """Nothing: all changes are applied."""
        return Applied()

    def needs_whole(self, table: ReplicaTable) -> bool:
        """True if conflicts ask for all columns of rows that went."""
        return any(kind in self.answers(table) for kind in DIFFERING)

    def answers(self, table: ReplicaTable) -> dict[Kind, Answer]:
        """What is done about conflicts in a table; GdqError if a column that decides is missing."""
        return self.policies.of(table.name, [column.name for column in table.columns])


def takes_parts(table: ReplicaTable) -> bool:
    """True if any parts of a table's net change may be applied one after the other.

    Not so if a row may need a place that a row of a later part leaves.
    """
    return table.keyed and not (table.more_keys or table.deferrable or any(one.always for one in table.columns))


def apply_staged(target: Connection[Any], table: ReplicaTable, parts: Iterable[Staged] = IN_STAGE) -> Applied:
    """Apply what is staged, or raise and leave the target as it was; RowsLackingError if it does not take some rows.

    There may be several parts if takes_parts().
    """
    if not table.keyed:
        return _attempt(target, table, parts, lambda target, table, _: replace_whole_rows(target, table))
    if takes_parts(table):
        return _attempt(target, table, parts, update_rows)
    parts = list(parts)
    if any(takes_other_identity(target, table, part.name) for part in parts):
        return _attempt(target, table, parts, replace_rows)
    try:
        return _attempt(target, table, parts, update_rows)
    except PLACE_TAKEN:
        # two rows may have swapped the values of another unique key, or what an exclusion constraint compares
        if not table.more_keys:
            raise
        return _attempt(target, table, parts, replace_rows)


def _attempt(
    target: Connection[Any],
    table: ReplicaTable,
    parts: Iterable[Staged],
    change: Callable[[Connection[Any], ReplicaTable, Staged], Applied],
) -> Applied:
    """Change the rows that are staged, in a savepoint."""
    applied = Applied()
    with target.transaction():
        # what is asked of conflicts after a failure is joined in any way
        target.execute(_BY_KEY if table.keyed else _BY_ROW)
        for part in parts:
            changed = change(target, table, part)
            check_deferrable_keys(target, table, part.name)
            staged = part.counted(target)
            assert staged.coming is not None
            assert staged.going is not None
            there = changed.inserted + changed.updated, changed.updated + changed.deleted
            lacking = max(abs(staged.coming - there[0]), abs(staged.going - there[1]))
            if lacking:
                raise RowsLackingError(f"did not take {lacking} changes")
            applied += changed
    return applied
