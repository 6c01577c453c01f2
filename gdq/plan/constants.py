"""Replaces uncorrelated subqueries by their values, with a check that the values did not change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Literal

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.delta import DeltaPlanner
from gdq.plan.leaf import is_correlated, output_names
from gdq.plan.query import value_of, where_of
from gdq.plan.steps import PlannedValue, PlanStep
from gdq.plan.whole import require_limit_order

SubqueryKind = Literal["scalar", "exists", "set"]

# Kinds of subqueries that a planner replaces by values, tried in this order: none, single values, also sets.
CONSTANT_LEVELS: tuple[tuple[SubqueryKind, ...], ...] = ((), ("scalar", "exists"), ("scalar", "exists", "set"))

_REASON = "the value of a subquery changed [subquery-value]"


def fix_changed_subqueries(planner: DeltaPlanner, kinds: Collection[SubqueryKind], *, held: bool) -> bool:
    """Replace subqueries of these kinds whose tables changed by values, each with a check; False if there are none.

    `held`: the value of an extreme is computed once for all steps.
    """
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
        value = _extreme(planner, query, new, old) if held and kind == "scalar" and sql else None
        if value is not None:
            value = replace(value, shown=_shown(planner.query.root, place))
        node = _value_node(kind, new) if value is None else _held_node(planner, value)
        if sql:
            planner.steps.append(PlanStep("check", "check value", sql, _REASON, value=value))
        place.replace(node)
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
            place.replace(_held_node(planner, PlannedValue(relations.at(nested), frozenset(query.tables(nested)))))


def _extreme(planner: DeltaPlanner, query: exp.Query, new: str, old: str) -> PlannedValue | None:
    """The value of a subquery that is the MIN or MAX of an expression over its rows; None for another."""
    if not isinstance(query, exp.Select) or len(query.expressions) != 1:
        return None
    call = value_of(query.expressions[0])
    clauses = ("group", "having", "distinct", "order", "limit", "offset", "windows")
    if any(query.args.get(clause) for clause in clauses) or not isinstance(call, exp.Min | exp.Max):
        return None
    if call.expressions or isinstance(call.this, exp.Distinct | exp.Order):
        return None
    planned = len(planner.steps)
    try:
        rows = planner.core(query, [call.this])
    except PlanError:
        rows = None
    if rows is None:
        del planner.steps[planned:]
        return None
    tables = frozenset(planner.query.tables(query))
    return PlannedValue(new, tables, old, "min" if isinstance(call, exp.Min) else "max", rows)


def _shown(root: exp.Query, place: exp.Expr) -> str:
    """The column of the view that WHERE says to equal the subquery in this place; empty if there is none."""
    for part in where_of(root) if isinstance(root, exp.Select) else ():
        sides = (part.this.unnest(), part.expression.unnest()) if isinstance(part, exp.EQ) else ()
        for own, other in (sides, sides[::-1]) if sides else ():
            if other is place.unnest():
                return next((item.alias for item in root.expressions if value_of(item).unnest() == own), "")
    return ""


def _held_node(planner: DeltaPlanner, value: PlannedValue) -> exp.Var:
    """The node that replaces a subquery by a value that a step computes once."""
    return exp.Var(this=f"(select c1 from {planner.step(f'select ({value.new}) as c1, 1 as w', value)})")


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
