"""Queries that depend on all rows at once: LIMIT, and aggregates without GROUP BY.

A query with LIMIT or with aggregates without GROUP BY is recomputed from all of its rows if a change reaches it.
"""

from __future__ import annotations

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.dialect import render_sql
from gdq.plan.query import Query, leaves_of, value_of
from gdq.plan.shape import group_of, is_grouped


def whole_reason(select: exp.Select) -> str | None:
    """Why a SELECT depends on all of its rows, with the code; None if the rows can be divided."""
    if select.args.get("limit") or select.args.get("offset"):
        return "LIMIT is loaded in full here; its first rows are kept if ORDER BY ends with a key [order-limit]"
    if is_grouped(select) and not group_of(select):
        return "an aggregate without GROUP BY whose value is not kept is loaded in full [no-group-by]"
    return None


def whole_inputs(query: Query, select: exp.Select) -> list[exp.Expr]:
    """The columns of a SELECT's own FROM that it uses after WHERE."""
    own = {leaf.alias for leaf in leaves_of(query.tree(select))}
    found = [
        column for part in parts_after_where(select) for column in part.find_all(exp.Column) if column.table in own
    ]
    return list({render_sql(column): column.copy() for column in found}.values())


def parts_after_where(select: exp.Select) -> list[exp.Expr]:
    """The parts of a SELECT that are computed after FROM and WHERE."""
    clauses = (select.args.get(name) for name in ("distinct", "group", "having", "order"))
    return [*select.expressions, *(clause for clause in clauses if clause is not None)]


def require_limit_order(query: Query, node: exp.Expr) -> None:
    """PlanError if a LIMIT inside a query may choose among different rows: its old result is then unknown."""
    for select in node.find_all(exp.Select):
        if (select.args.get("limit") or select.args.get("offset")) and not is_ordered(query, select):
            raise PlanError("order-limit", "a LIMIT whose ORDER BY leaves open which rows it takes is loaded in full")


def is_ordered(query: Query, select: exp.Select) -> bool:
    """True if ORDER BY leaves no two different rows in any order: it has all columns, all groups, or a table's key."""
    order = select.args.get("order")
    by = {render_sql(item.this) for item in order.expressions} if order is not None else set()
    if all(render_sql(value_of(item)) in by for item in select.expressions):
        return True
    if is_grouped(select) or select.args.get("distinct"):
        groups = group_of(select)
        return bool(groups) and not select.args.get("distinct") and all(render_sql(group) in by for group in groups)
    leaves = leaves_of(query.tree(select))
    key = leaves[0].table.key if len(leaves) == 1 and leaves[0].table is not None else ()
    columns = {render_sql(exp.column(name, leaves[0].alias)) for name in key}
    return bool(columns) and columns <= by
