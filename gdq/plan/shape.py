"""What the clauses of a SELECT do to its rows: which of them group, and by what its rows are divided into parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.query import render, value


def dividing(select: exp.Select) -> list[exp.Expr] | None:
    """The expressions that divide the rows of a SELECT into parts computed apart; None when each row is one.

    Not of one that plan_whole says to depend on all rows. PlanError when there are none.
    """
    windows = [window for item in select.expressions for window in windows_of(item)]
    distinct = select.args.get("distinct")
    grouped = is_grouped(select)
    if not (windows or distinct or grouped):
        return None
    keys = group_of(select) if grouped else None
    for window in windows:
        parts = list(window.args.get("partition_by") or ())
        keys = _common(parts if keys is None else keys, parts)
    if windows and not keys:
        raise PlanError("window-no-partition", "a window without a common PARTITION BY is loaded in full")
    if distinct:
        on = distinct.args.get("on")
        own = list(on.expressions) if on is not None else [value(item) for item in select.expressions]
        keys = _common(own if keys is None else keys, own)
    if not keys:
        raise PlanError("no-key", "no expression divides the rows of the view")
    return [key.copy() for key in keys]


def is_grouped(select: exp.Select) -> bool:
    """Whether a SELECT has a GROUP BY or aggregates."""
    having = select.args.get("having")
    items = [*select.expressions, *([having.this] if having is not None else [])]
    return select.args.get("group") is not None or any(aggregates_of(item) for item in items)


def group_of(select: exp.Select) -> list[exp.Expr]:
    """The expressions of GROUP BY."""
    group = select.args.get("group")
    if group is None:
        return []
    extra = [name for name, value in group.args.items() if value and name != "expressions"]
    if extra or any(isinstance(item, exp.Rollup | exp.Cube | exp.GroupingSets) for item in group.expressions):
        raise PlanError("grouping-sets", "GROUPING SETS are loaded in full")
    return [item.unnest() for item in group.expressions]


def group_all(select: exp.Select) -> None:
    """Group by all columns that stand outside of aggregates: where the primary key is grouped by they may.

    PostgreSQL knows that of a table, not of a query over it.
    """
    group = select.args.get("group")
    if group is None:
        return
    own = {item.unnest() for item in group.expressions}
    having = select.args.get("having")
    parts = [*select.expressions, *([having] if having is not None else [])]
    local = {node.alias for node in _from_of(select) for node in node.find_all(exp.Table, exp.Subquery)}
    for part in parts:
        for column in _bare_columns(part, own):
            if column.table in local and column not in own:
                own.add(column)
                group.append("expressions", column.copy())


def _from_of(select: exp.Select) -> list[exp.Expr]:
    clause = select.args.get("from_")
    return [*([clause] if clause is not None else []), *(select.args.get("joins") or ())]


def _bare_columns(node: exp.Expr, grouped: set[exp.Expr]) -> Iterator[exp.Column]:
    """The columns of an expression outside of aggregates and of what is grouped by."""
    if node in grouped or (not isinstance(node, exp.Query | exp.Window) and aggregates_of(node) == [node]):
        return
    if isinstance(node, exp.Column):
        yield node
    for child in node.iter_expressions():
        yield from _bare_columns(child, grouped)


def windows_of(node: exp.Expr) -> list[exp.Window]:
    """The window functions in an expression, those of inner queries left out."""
    if isinstance(node, exp.Window):
        return [node]
    if isinstance(node, exp.Query):
        return []
    return [window for child in node.iter_expressions() for window in windows_of(child)]


def aggregates_of(node: exp.Expr) -> list[exp.Expr]:
    """The aggregate calls directly in an expression, each with its FILTER; not those of inner queries or windows."""
    if isinstance(node, exp.Query | exp.Window):
        inner = [] if isinstance(node, exp.Query) else _window_parts(node)
        return [call for part in inner for call in aggregates_of(part)]
    if isinstance(node, exp.Filter | exp.WithinGroup) or is_aggregate(node):
        return [node]
    found: list[exp.Expr] = []
    for child in node.iter_expressions():
        found += aggregates_of(child)
    return found


def is_aggregate(node: exp.Expr) -> bool:
    """Whether a node is a call of an aggregate. An unknown function counts as one when PostgreSQL has it as one."""
    return isinstance(node, exp.AggFunc) or (isinstance(node, exp.Anonymous) and node.name.lower() in _AGGREGATES)


_AGGREGATES = {
    "variance", "bit_and", "bit_or", "bit_xor", "bool_and", "bool_or", "every", "json_agg", "jsonb_agg",
    "json_object_agg",
    "jsonb_object_agg", "range_agg", "range_intersect_agg", "xmlagg", "regr_count", "any_value", "mode",
    "json_agg_strict", "jsonb_agg_strict", "json_object_agg_strict", "json_object_agg_unique",
    "json_object_agg_unique_strict", "jsonb_object_agg_strict", "jsonb_object_agg_unique",
    "jsonb_object_agg_unique_strict", "regr_avgx", "regr_avgy", "regr_intercept", "regr_r2", "regr_slope", "regr_sxx",
    "regr_sxy", "regr_syy", "covar_pop", "covar_samp", "corr",
}  # fmt: skip


def _window_parts(window: exp.Window) -> list[exp.Expr]:
    """What a window function is over, which may hold aggregates of the query itself."""
    call = window.this.this if isinstance(window.this, exp.Filter | exp.IgnoreNulls | exp.RespectNulls) else window.this
    order = window.args.get("order")
    return [*call.iter_expressions(), *(window.args.get("partition_by") or []), *([order] if order else [])]


def _common(some: Iterable[exp.Expr], others: Iterable[exp.Expr]) -> list[exp.Expr]:
    """The expressions of `some` that are among `others` too."""
    listed = {render(other) for other in others}
    return [one for one in some if render(one) in listed]
