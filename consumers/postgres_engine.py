"""Brings the difference of a refresh into a target in PostgreSQL, in one transaction with the position.

In the database of the tables the difference is computed in that same transaction, and the counts and sums of a GROUP BY
are kept beside the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection

from gdq.consumers.computation import Computation
from gdq.consumers.difference import Difference
from gdq.consumers.effort import Effort
from gdq.consumers.target_rows import TargetRows
from gdq.plan_state import StatePlan
from gdq.plan_steps import Signed
from gdq.target import Diverged, NeedsFull, OutputType, Target, run

_SUMS, _BEFORE = "pg_temp.gdq_sums", "pg_temp.gdq_before"


@dataclass(slots=True)
class PostgresEngine:
    """One refresh of one view in the transaction of `output`, in which it is computed too."""

    computation: Computation
    output: Connection[Any]
    target: Target
    types: Sequence[OutputType]

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """NeedsFull for a view that has no delta; all else is done in one transaction."""
        plan = self.computation.plan
        if s0 is not None and changed and plan.full and not plan.checked:
            raise NeedsFull(plan.full)

    def effort(self) -> Effort:
        """What the refresh took."""
        return self.computation.effort()

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:
        """Load the target in full, or bring it from s0 to the leader's snapshot; the rows deleted and inserted.

        NeedsFull when that takes a full load, Diverged when the target lacks rows that should go. Must come first in
        its transaction.
        """
        self.computation.begin()
        if s0 is None:
            return self._load()
        if not changed:
            return 0
        with self.computation.computing():
            rows = self._rows.change(self._difference(changed))
            self.computation.end()
        return rows

    @property
    def _rows(self) -> TargetRows:
        return TargetRows(self.output, self.target, self.types)

    def _difference(self, changed: Mapping[str, str]) -> Difference:
        outcome, state = self.computation.outcome(changed), self.computation.plan.state
        if state is not None and isinstance(outcome, Signed):
            return self._merge_state(state, outcome.rows)
        return self.computation.difference_of(outcome)

    def _load(self) -> int:
        """Fill the target, made if missing, with all rows of the view; the rows deleted and inserted."""
        state, match = self.computation.plan.state, self.computation.plan.match
        if state is None:
            return self._rows.change(self.computation.full())
        self.computation.full()
        self._make_state(state)
        return self._rows.change(Difference("full", self._shown(state, ""), match=match))

    def _make_state(self, state: StatePlan) -> None:
        """Make the state afresh from the tables."""
        table, columns = self.target.state, state.group_columns
        run(self.output, f"drop table if exists {table}")
        run(self.output, f"create table {table} as {state.whole()}")
        run(self.output, f"alter table {table} add check (n {'>' if columns else '>='} 0)")
        if columns:
            listed = ", ".join(f"(array[{column}])" for column in columns)
            run(self.output, f"create unique index on {table} ({listed})")
        run(self.output, f"analyze {table}")

    def _merge_state(self, state: StatePlan, rows: str) -> Difference:
        """Add signed rows of groups and arguments to the state; the difference between the groups' old and new rows."""
        check = state.no_number(rows)
        if check and self.computation.one(check):
            raise NeedsFull("NaN or infinity came into or went from a sum")
        columns, numbers = state.group_columns, state.numbers
        some = " or ".join(f"{name} <> 0" for name in numbers)
        self.computation.temporary("gdq_sums", f"select * from ({state.sums(rows)}) as s where {some}")
        touched = "" if state.order or state.extremes else f" join {_SUMS} as d on {_same(columns)}"
        names = ", ".join(f"c{n}" for n in range(1, len(self.types) + 1))
        self.computation.temporary(
            "gdq_before", f"select *, -1 as w from ({self._shown(state, touched)}) as b({names})"
        )
        added = ", ".join(f"{name} = s.{name} + d.{name}" for name in numbers)
        gone = "when matched and s.n + d.n = 0 then delete " if columns else ""
        listed = ", ".join([*columns, *numbers])
        values = ", ".join(f"d.{name}" for name in [*columns, *numbers])
        try:
            run(
                self.output,
                f"merge into {self.target.state} as s using {_SUMS} as d on {_same(columns)} {gone}"
                f"when matched then update set {added} when not matched then insert ({listed}) values ({values})",
            )
        except psycopg.errors.CheckViolation as error:
            raise Diverged(f"{self.target.state} counts fewer rows than the delta takes away") from error
        for statement in state.follow_extremes(self.target.state, rows):
            run(self.output, statement)
        after = f"select *, 1 as w from ({self._shown(state, touched)}) as a({names})"
        return self.computation.net(f"{after} union all select * from {_BEFORE}")

    def _shown(self, state: StatePlan, touched: str) -> str:
        """The view's rows from the state."""
        where = f" where {state.having}" if state.having else ""
        return f"select {', '.join(state.visible)} from {self.target.state} as s{touched}{where}{state.order}"


def _same(columns: Sequence[str]) -> str:
    """The condition that s and d are one group; arrays with a NULL each are equal."""
    return " and ".join(f"array[s.{column}] = array[d.{column}]" for column in columns) or "true"
