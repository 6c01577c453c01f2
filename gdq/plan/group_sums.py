"""The groups of a SELECT inside a query at both states, from one look: as they are now, less what came and went.

select k, sum(v) from t group by k      now: the sums of the touched keys; before: now less the sums of the change
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlglot import exp

from gdq.plan.kept_state import StatePlan, plan_state
from gdq.plan.query import Query
from gdq.plan.recompute import recomputed_sql
from gdq.plan.relation_sql import RelationSql


@dataclass(frozen=True, slots=True)
class GroupSums:
    """The counts and sums of a grouped SELECT; all are exact, so what was added can be taken away."""

    select: exp.Select
    state: StatePlan

    def now(self, relations: RelationSql, keys: Sequence[tuple[exp.Expr, str]]) -> str:
        """SELECT of the sums of these groups, each expression with the name of its keys, at the new state."""
        bare = self.select.copy()
        for clause in ("group", "having", "order"):
            bare.set(clause, None)
        bare.set("expressions", [item.copy() for item in self.state.items])
        rows = recomputed_sql(relations, bare, keys, "new")
        return f"select *, 1 as w from ({self.state.sums(f'(select *, 1 as w from ({rows}) as q)')}) as q"

    def before(self, now: str, changes: str) -> str:
        """SELECT of the sums as they were: `now` has them as they are, `changes` the signed change of the items."""
        groups, numbers = ", ".join(self.state.group_columns), self.state.numbers
        taken = ", ".join(f"-{name} as {name}" for name in numbers)
        both = (
            f"select {groups}, {', '.join(numbers)} from {now} "
            f"union all select {groups}, {taken} from ({self.state.sums(changes)}) as q"
        )
        added = ", ".join(f"sum({name})::{'numeric' if name[0] == 's' else 'bigint'} as {name}" for name in numbers)
        return f"select {groups}, {added} from ({both}) as q group by {groups} having sum(n) <> 0"

    def shown(self, sums: str) -> str:
        """SELECT of the rows that the SELECT has of these sums."""
        having = f" where {self.state.having}" if self.state.having else ""
        return f"select {', '.join(self.state.visible)} from {sums} as s{having}"

    def no_number(self, changes: str) -> str:
        """SELECT that is true if NaN came into a sum, which a subtraction does not take away; empty if none can."""
        return self.state.no_number(f"(select * from {changes} where w > 0)")


def group_sums(query: Query, select: exp.Select) -> GroupSums | None:
    """The sums of a SELECT's groups; None if the groups must be computed at both states."""
    state = plan_state(replace(query, root=select))
    if state is None or not state.groups or state.extremes or state.loose or state.order or state.empty:
        return None
    if any(one.summed and (one.number is None or not one.number.fixed) for one in state.arguments):
        return None
    return GroupSums(select, state)
