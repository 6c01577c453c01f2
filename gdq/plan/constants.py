"""Takes uncorrelated subqueries for constants, with a check that their values did not change."""

from __future__ import annotations

from collections.abc import Collection

from sqlglot import exp

from gdq.plan.delta import DeltaPlanner
from gdq.plan.steps import Step
from gdq.plan.table import PlanError
from gdq.plan.whole import Kind, constant, constants, is_other, require_order

# How far a planner goes in it: not at all, single values, sets too.
LEVELS: tuple[tuple[Kind, ...], ...] = ((), ("scalar", "exists"), ("scalar", "exists", "set"))

_REASON = "the value of a subquery changed [subquery-value]"


def settle(planner: DeltaPlanner, kinds: Collection[Kind]) -> bool:
    """Put constants for the subqueries of these kinds whose tables changed; whether there are such."""
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


def hold(planner: DeltaPlanner) -> None:
    """Compute the single values that conditions compare with once for all steps, where their tables did not change."""
    relations, query = planner.relations, planner.query
    for kind, nested, place in constants(query.root, lambda node: not relations.is_changed(node)):
        if (
            kind == "scalar"
            and query.tables(nested)
            and isinstance(place.find_ancestor(exp.Select, exp.Where), exp.Where)
        ):
            value = planner.step(f"select ({relations.at(nested)}) as c1, 1 as w")
            place.replace(exp.Var(this=f"(select c1 from {value})"))
