"""Takes a SELECT apart where two of its clauses follow different rules: the inner one becomes a query in FROM.

select distinct a, count(*) from t group by a, b                    DISTINCT over groups
select a, lag(count(*)) over (order by a) from t group by a         windows over groups
"""

from __future__ import annotations

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.dialect import render_sql
from gdq.plan.leaf import Leaf, output_names
from gdq.plan.query import Query, aliased, column_node, subqueries_of, value_of
from gdq.plan.relation_sql import alias_node
from gdq.plan.shape import aggregates_of, group_of, has_open_windows, is_grouped, window_parts


def separated(query: Query, select: exp.Select, alias: str) -> exp.Select:
    """A SELECT whose clauses follow one rule, perhaps over a query in FROM with this alias; others unchanged."""
    grouped, windows = is_grouped(select), has_open_windows(select)
    if select.args.get("distinct") and (grouped or windows):
        return _distinct_over(query, select, alias)
    return _windows_over(query, select, alias) if grouped and windows else select


def _distinct_over(query: Query, select: exp.Select, alias: str) -> exp.Select:
    if select.args["distinct"].args.get("on"):
        over = "aggregates" if is_grouped(select) else "windows without PARTITION BY"
        raise PlanError("distinct-on-aggregate", f"DISTINCT ON over {over} is loaded in full")
    inner = select.copy()
    inner.set("distinct", None)
    outer = _over(query, inner, alias)
    outer.set("distinct", exp.Distinct())
    for name in output_names(inner):
        outer.append("expressions", aliased(column_node(alias, name), name))
    return outer


def _windows_over(query: Query, select: exp.Select, alias: str) -> exp.Select:
    """Windows over groups: the inner query shows the groups and what the windows and items need of them."""
    if any(subqueries_of(item) for item in select.expressions):
        raise PlanError("window-no-partition", "a subquery beside windows over groups is loaded in full")
    inner = select.copy()
    inner.set("order", None)
    shown = {render_sql(group): (group, f"g{n}") for n, group in enumerate(group_of(select), 1)}
    items = [aliased(value_of(item), item.alias) for item in select.expressions]
    for item in items:
        _replace(item.this, shown, alias)
    inner.set("expressions", [aliased(value, name) for value, name in shown.values()])
    outer = _over(query, inner, alias)
    outer.set("expressions", items)
    return outer


def _over(query: Query, inner: exp.Select, alias: str) -> exp.Select:
    query.leaves[alias] = Leaf(alias, output_names(inner), query=inner)
    return exp.Select(from_=exp.From(this=exp.Subquery(this=inner, alias=alias_node(alias))))


def _replace(node: exp.Expr, shown: dict[str, tuple[exp.Expr, str]], alias: str) -> None:
    """Replace groups, aggregates and columns in an expression by columns of the inner query, which `shown` names."""
    sql = "" if isinstance(node, exp.Ordered) else render_sql(node)  # it may be written as the expression in it
    whole = aggregates_of(node) == [node] and not isinstance(node, exp.Window)
    if sql in shown or whole or isinstance(node, exp.Column):
        _, name = shown.setdefault(sql, (node.copy(), f"g{len(shown) + 1}"))
        node.replace(column_node(alias, name))
        return
    for child in list(_parts(node)):
        _replace(child, shown, alias)


def _parts(node: exp.Expr) -> list[exp.Expr]:
    """The parts of an expression over groups. A window's own function is no aggregate of the groups."""
    if not isinstance(node, exp.Window):
        return list(node.iter_expressions())
    call = node.this
    return [*window_parts(node), *([call.expression] if isinstance(call, exp.Filter) else [])]
