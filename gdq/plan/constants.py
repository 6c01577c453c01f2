"""Replaces uncorrelated subqueries by their values, with a check that the values did not change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.delta import DeltaPlanner
from gdq.plan.leaf import is_correlated, output_names
from gdq.plan.steps import PlanStep
from gdq.plan.whole import require_limit_order

SubqueryKind = Literal["scalar", "exists", "set"]

# Kinds of subqueries that a planner replaces by values, tried in this order: none, single values, also sets.
CONSTANT_LEVELS: tuple[tuple[SubqueryKind, ...], ...] = ((), ("scalar", "exists"), ("scalar", "exists", "set"))

_REASON = "the value of a subquery changed [subquery-value]"


def fix_changed_subqueries(planner: DeltaPlanner, kinds: Collection[SubqueryKind]) -> bool:
    """Replace subqueries of these kinds whose tables changed by values, each with a check; False if there are none."""
    found = False
    for kind, query, place in _uncorrelated(planner.query.root, planner.relations.is_changed):
        if kind not in kinds:
            continue
        if kind != "exists":
            require_limit_order(planner.query, query)
        planned = len(planner.steps)
        new, old = (planner.relations.at(query, state) for state in ("new", "old"))
        try:
            rows = planner.delta(query)
        except PlanError:
            del planner.steps[planned:]
            sql = _is_other(kind, query, None, new, old)
        else:
            sql = _is_other(kind, query, rows, new, old) if rows is not None else ""
        if sql:
            planner.steps.append(PlanStep("check", "check value", sql, _REASON))
        place.replace(_value_node(kind, new))
        found = True
    return found


def fix_unchanged_subqueries(planner: DeltaPlanner) -> None:
    """Compute the values of scalar subqueries in WHERE whose tables did not change once for all steps."""
    relations, query = planner.relations, planner.query
    for kind, nested, place in _uncorrelated(query.root, lambda node: not relations.is_changed(node)):
        if (
            kind == "scalar"
            and query.tables(nested)
            and isinstance(place.find_ancestor(exp.Select, exp.Where), exp.Where)
        ):
            value = planner.step(f"select ({relations.at(nested)}) as c1, 1 as w")
            place.replace(exp.Var(this=f"(select c1 from {value})"))


def _uncorrelated(
    root: exp.Query, changed: Callable[[exp.Expr], bool]
) -> Iterator[tuple[SubqueryKind, exp.Query, exp.Expr]]:
    """The uncorrelated subqueries for which changed() is true: kind, query, and the node to replace by a value."""
    for query in list(root.find_all(exp.Query)):
        if isinstance(query, exp.Subquery) or query.root() is not root:
            continue
        place = _place(query)
        if place is not None and changed(query) and not is_correlated(query):
            yield place[0], query, place[1]


def _place(query: exp.Query) -> tuple[SubqueryKind, exp.Expr] | None:
    """How an expression uses a subquery, and the node to replace; None for a part of FROM or of a set operation."""
    parent = query.parent
    if isinstance(parent, exp.Exists):
        return "exists", parent
    if isinstance(parent, exp.In | exp.All | exp.Any):
        return "set", query
    if not isinstance(parent, exp.Subquery) or parent.alias:
        return None
    around = parent.parent
    if isinstance(around, exp.In | exp.All | exp.Any):
        return "set", parent
    outside_expressions = exp.From | exp.Join | exp.Lateral | exp.Subquery | exp.SetOperation | exp.Array
    return None if around is None or isinstance(around, outside_expressions) else ("scalar", parent)


def _is_other(kind: SubqueryKind, query: exp.Query, rows: str | None, new: str, old: str) -> str:
    """SELECT that is true if the subquery's value changed.

    `rows`: the relation of its signed rows c1, c2, ..., w, or None; `new` and `old`: the query at both states.
    """
    columns = ", ".join(f"r.c{n}" for n in range(1, len(output_names(query)) + 1))
    grouped = f" group by row({columns})::text" if columns else ""
    differs = "" if rows is None else f"exists (select from {rows} as r{grouped} having sum(r.w) <> 0)"
    if kind == "exists":
        compared = f"exists ({new}) <> exists ({old})"
    elif kind == "set":
        compared = f"exists (({new}) except ({old})) or exists (({old}) except ({new}))"
    else:
        compared = "" if differs else f"row(({new}))::text <> row(({old}))::text"
    return "select " + " and ".join(f"({part})" for part in (differs, compared) if part)


def _value_node(kind: SubqueryKind, new: str) -> exp.Var:
    """The node that replaces a subquery with an unchanged value."""
    return exp.Var(this=f"exists ({new})" if kind == "exists" else f"({new})")
