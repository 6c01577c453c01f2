"""Takes uncorrelated subqueries for constants, with a check that their values did not change."""

from __future__ import annotations

from collections.abc import Collection

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.delta import DeltaPlanner
from gdq.plan.steps import Step
from gdq.plan.whole import Kind, constant, constants, is_other, require_order

# Which subqueries a planner takes for constants, tried in this order: none, single values, sets too.
LEVELS: tuple[tuple[Kind, ...], ...] = ((), ("scalar", "exists"), ("scalar", "exists", "set"))

_REASON = "the value of a subquery changed [subquery-value]"


def fix_changed(planner: DeltaPlanner, kinds: Collection[Kind]) -> bool:
    """Take subqueries of these kinds whose tables changed for constants, each with a check; False if there are none."""
    found = False
    for kind, query, place in constants(planner.query.root, planner.relations.is_changed):
        if kind not in kinds:
            continue
        if kind != "exists":
            require_order(planner.query, query)
        planned = len(planner.steps)
        new, old = (planner.relations.at(query, state) for state in ("new", "old"))
        try:
            rows = planner.delta(query)
        except PlanError:
            del planner.steps[planned:]
            sql = is_other(kind, query, None, new, old)
        else:
            sql = is_other(kind, query, rows, new, old) if rows is not None else ""
        if sql:
            planner.steps.append(Step("check", "check value", sql, _REASON))
        place.replace(constant(kind, new))
        found = True
    return found


def fix_unchanged(planner: DeltaPlanner) -> None:
    """Compute values of subqueries whose tables did not change once for all steps, where a condition compares them."""
    relations, query = planner.relations, planner.query
    for kind, nested, place in constants(query.root, lambda node: not relations.is_changed(node)):
        if (
            kind == "scalar"
            and query.tables(nested)
            and isinstance(place.find_ancestor(exp.Select, exp.Where), exp.Where)
        ):
            value = planner.step(f"select ({relations.at(nested)}) as c1, 1 as w")
            place.replace(exp.Var(this=f"(select c1 from {value})"))
