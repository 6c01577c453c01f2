"""The shape of a SELECT: its groups, aggregates and windows, and the expressions that divide its rows into parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.dialect import render_sql
from gdq.plan.query import value_of
from gdq.plan.whitelist import AGGREGATES


def dividing_expressions(select: exp.Select) -> list[exp.Expr] | None:
    """The expressions that divide a SELECT's rows into parts computed apart; None if each row is a part.

    Not for a SELECT with a whole_reason(). PlanError if there are no such expressions.
    """
    if not is_divided(select):
        return None
    if has_open_windows(select):
        raise PlanError("window-no-partition", "a window without a common PARTITION BY is loaded in full")
    distinct = select.args.get("distinct")
    keys = _partition(select)
    if distinct:
        on = distinct.args.get("on")
        own = list(on.expressions) if on is not None else [value_of(item) for item in select.expressions]
        keys = _common(own if keys is None else keys, own)
    if not keys:
        raise PlanError("no-key", "no expression divides the rows of the view")
    return [key.copy() for key in keys]


def is_divided(select: exp.Select) -> bool:
    """True if a SELECT's rows are not each computed apart: it has groups, DISTINCT or windows."""
    windows = any(windows_of(item) for item in select.expressions)
    return bool(windows or select.args.get("distinct") or is_grouped(select))


def has_open_windows(select: exp.Select) -> bool:
    """True if the windows of a SELECT have no common PARTITION BY, of groups if it has such."""
    return any(windows_of(item) for item in select.expressions) and not _partition(select)


def _partition(select: exp.Select) -> list[exp.Expr] | None:
    """The expressions of GROUP BY and of every PARTITION BY; None without any of these clauses."""
    keys = group_of(select) if is_grouped(select) else None
    for window in (window for item in select.expressions for window in windows_of(item)):
        parts = list(window.args.get("partition_by") or ())
        keys = _common(parts if keys is None else keys, parts)
    return keys


def is_grouped(select: exp.Select) -> bool:
    """True if a SELECT has a GROUP BY, HAVING or aggregates."""
    clauses = (select.args.get("group"), select.args.get("having"))
    return any(clause is not None for clause in clauses) or any(aggregates_of(item) for item in select.expressions)


def group_of(select: exp.Select) -> list[exp.Expr]:
    """The expressions of GROUP BY."""
    group = select.args.get("group")
    if group is None:
        return []
    if has_grouping_sets(select):
        raise PlanError("grouping-sets", "GROUPING SETS are loaded in full")
    return [item.unnest() for item in group.expressions]


def has_grouping_sets(select: exp.Select) -> bool:
    """True if a GROUP BY is more than a list of expressions, or GROUPING() asks for it."""
    group = select.args.get("group")
    if group is None:
        return False
    sets = exp.Rollup | exp.Cube | exp.GroupingSets
    nothing = any(isinstance(item, exp.Tuple) and not item.expressions for item in group.expressions)
    more = any(value is not None for name, value in group.args.items() if name != "expressions")
    if nothing or more or any(isinstance(item, sets) for item in group.expressions):
        return True
    clauses = [*select.expressions, *(select.args[name] for name in ("having", "order") if select.args.get(name))]
    return any(call.name.upper() == "GROUPING" for clause in clauses for call in clause.find_all(exp.Anonymous))


def group_all(select: exp.Select) -> None:
    """Add all columns outside of aggregates to GROUP BY.

    PostgreSQL allows them if a table's primary key is grouped by, but not if a query takes the table's place.
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
    """The columns of an expression outside of aggregates and of grouped expressions."""
    if node in grouped or (not isinstance(node, exp.Query | exp.Window) and aggregates_of(node) == [node]):
        return
    if isinstance(node, exp.Column):
        yield node
    for child in node.iter_expressions():
        yield from _bare_columns(child, grouped)


def windows_of(node: exp.Expr) -> list[exp.Window]:
    """The window functions in an expression, without those of inner queries."""
    if isinstance(node, exp.Window):
        return [node]
    if isinstance(node, exp.Query):
        return []
    return [window for child in node.iter_expressions() for window in windows_of(child)]


def aggregates_of(node: exp.Expr) -> list[exp.Expr]:
    """The aggregate calls directly in an expression, each with its FILTER; not those of inner queries or windows."""
    if isinstance(node, exp.Query | exp.Window):
        inner = [] if isinstance(node, exp.Query) else window_parts(node)
        return [call for part in inner for call in aggregates_of(part)]
    if isinstance(node, exp.Filter | exp.WithinGroup) or _is_aggregate(node):
        return [node]
    found: list[exp.Expr] = []
    for child in node.iter_expressions():
        found += aggregates_of(child)
    return found


def _is_aggregate(node: exp.Expr) -> bool:
    """True if a node calls an aggregate of PostgreSQL: such a name has no schema, and sqlglot need not know it."""
    if isinstance(node.parent, exp.Dot):
        return False
    return isinstance(node, exp.AggFunc) or (isinstance(node, exp.Anonymous) and node.name.lower() in AGGREGATES)


def window_parts(window: exp.Window) -> list[exp.Expr]:
    """The arguments, PARTITION BY and ORDER BY of a window function; they may hold aggregates of the query itself."""
    call = window.this.this if isinstance(window.this, exp.Filter | exp.IgnoreNulls | exp.RespectNulls) else window.this
    order = window.args.get("order")
    return [*call.iter_expressions(), *(window.args.get("partition_by") or []), *([order] if order else [])]


def _common(some: Iterable[exp.Expr], others: Iterable[exp.Expr]) -> list[exp.Expr]:
    """The expressions that are in both lists."""
    listed = {render_sql(other) for other in others}
    return [one for one in some if render_sql(one) in listed]
