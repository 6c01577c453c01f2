"""What depends on all rows at once: LIMIT, aggregates without GROUP BY, and the values of uncorrelated subqueries.

A query of the first two kinds is computed anew, from all of its rows, when a change reaches it. An uncorrelated
subquery counts as unchanged when its value did not change, which is checked; it is then no part of the query any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.leaf import is_correlated, output_names
from gdq.plan.query import Query, leaves_of, render, value
from gdq.plan.shape import group_of, is_grouped

Kind = Literal["scalar", "exists", "set"]


def whole_reason(select: exp.Select) -> str | None:
    """Why a SELECT depends on all of its rows, with the code; None when they can be divided."""
    if select.args.get("limit") or select.args.get("offset"):
        return "LIMIT is loaded in full, but over a GROUP BY whose sums are kept [order-limit]"
    if is_grouped(select) and not group_of(select):
        return "an aggregate without GROUP BY whose value is not kept is loaded in full [no-group-by]"
    return None


def inputs(query: Query, select: exp.Select) -> list[exp.Expr]:
    """The columns of its own FROM that a SELECT computes its rows of, its WHERE left out."""
    own = {leaf.alias for leaf in leaves_of(query.tree(select))}
    found = [column for part in outside(select) for column in part.find_all(exp.Column) if column.table in own]
    return list({render(column): column.copy() for column in found}.values())


def outside(select: exp.Select) -> list[exp.Expr]:
    """The parts of a SELECT that come after FROM and WHERE."""
    clauses = (select.args.get(name) for name in ("distinct", "group", "having", "order"))
    return [*select.expressions, *(clause for clause in clauses if clause is not None)]


def require_order(query: Query, node: exp.Expr) -> None:
    """PlanError when a LIMIT inside a query may cut between rows that differ: old and new would not compare."""
    for select in node.find_all(exp.Select):
        if (select.args.get("limit") or select.args.get("offset")) and not _is_ordered(query, select):
            raise PlanError("order-limit", "a LIMIT whose ORDER BY leaves open which rows it takes is loaded in full")


def _is_ordered(query: Query, select: exp.Select) -> bool:
    order = select.args.get("order")
    by = {render(item.this) for item in order.expressions} if order is not None else set()
    if all(render(value(item)) in by for item in select.expressions):
        return True
    if is_grouped(select) or select.args.get("distinct"):
        groups = group_of(select)
        return bool(groups) and not select.args.get("distinct") and all(render(group) in by for group in groups)
    leaves = leaves_of(query.tree(select))
    key = leaves[0].table.key if len(leaves) == 1 and leaves[0].table is not None else ()
    columns = {render(exp.column(name, leaves[0].alias)) for name in key}
    return bool(columns) and columns <= by


def constants(root: exp.Query, changed: Callable[[exp.Expr], bool]) -> Iterator[tuple[Kind, exp.Query, exp.Expr]]:
    """The uncorrelated subqueries of expressions whose tables changed: kind, query, and the node to put a value for."""
    for query in list(root.find_all(exp.Query)):
        if isinstance(query, exp.Subquery) or query.root() is not root:
            continue
        place = _place(query)
        if place is not None and changed(query) and not is_correlated(query):
            yield place[0], query, place[1]


def _place(query: exp.Query) -> tuple[Kind, exp.Expr] | None:
    """How an expression uses a subquery, and the node that stands for it; None for a part of FROM or of a query."""
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


def is_other(kind: Kind, query: exp.Query, rows: str | None, new: str, old: str) -> str:
    """SELECT that is true if the subquery's value changed.

    `rows`: its signed rows c1, c2, ..., w, None when there are none; `new` and `old`: the query at both states.
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


def constant(kind: Kind, new: str) -> exp.Var:
    """The node that stands for a subquery with an unchanged value."""
    return exp.Var(this=f"exists ({new})" if kind == "exists" else f"({new})")
