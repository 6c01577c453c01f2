"""The filter on a table's changed rows: a condition without which a row cannot matter to the view.

A row that meets the conditions of none of the table's items in FROM is in no result, before or after. So its changes
need not be netted, stored or followed.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlglot import exp

from gdq.plan.dialect import render_sql
from gdq.plan.query import Query, conjuncts, joins_of, leaves_of, where_of
from gdq.plan.table import FILTER_ROW, TableSchema

# Expressions that never raise an error: the condition is also evaluated for images of rows that are gone.
_HARMLESS = (
    exp.And,
    exp.Or,
    exp.Not,
    exp.Paren,
    exp.EQ,
    exp.NEQ,
    exp.LT,
    exp.LTE,
    exp.GT,
    exp.GTE,
    exp.Is,
    exp.Between,
    exp.Like,
    exp.Column,
)


def row_filter(query: Query, table: TableSchema) -> str:
    """SQL condition on rows of `table` under the alias FILTER_ROW; empty if any row may matter."""
    wanted = [leaf.alias for leaf in query.leaves.values() if leaf.table is table]
    found: dict[str, list[exp.Expr]] = {alias: [] for alias in wanted}
    for select in query.root.find_all(exp.Select):
        tree = query.tree(select)
        joins = list(joins_of(tree))
        here = {leaf.alias for leaf in leaves_of(tree)}
        own = [alias for alias in wanted if alias in here]
        if not own or any(join.kind != "inner" for join in joins):
            continue  # in an outer join, a row that fails a condition may still matter: it changes the padding
        parts = [*where_of(select), *conjuncts(*(join.on for join in joins))]
        for alias in own:
            found[alias] += filter(None, (_about(part, alias) for part in parts))
    if not found or not all(found.values()):
        return ""
    rows = {" and ".join(f"({_of_row(part)})" for part in parts): None for parts in found.values()}
    return " or ".join(f"({row})" for row in rows)


def _about(part: exp.Expr, alias: str) -> exp.Expr | None:
    """The part of a condition about one leaf alone: the condition, or an OR of both sides' parts; None if empty."""
    part = part.unnest()
    if isinstance(part, exp.Or):
        sides = [_all(_about(one, alias) for one in conjuncts(side)) for side in (part.this, part.expression)]
        return None if None in sides else exp.Paren(this=exp.or_(*sides, copy=True))
    about = {column.table for column in part.find_all(exp.Column)} == {alias}
    return part if about and _is_harmless(part) else None


def _all(parts: Iterable[exp.Expr | None]) -> exp.Expr | None:
    found = [part for part in parts if part is not None]
    return exp.Paren(this=exp.and_(*found, copy=True)) if found else None


def _is_harmless(node: exp.Expr) -> bool:
    if node.find(exp.Query, exp.Subquery):
        return False
    if not node.find(exp.Column):
        return True  # the same for all rows
    if isinstance(node, exp.Like) and node.expression.find(exp.Column):
        return False  # a pattern may end within an escape
    return isinstance(node, _HARMLESS) and all(_is_harmless(child) for child in node.iter_expressions())


def _of_row(part: exp.Expr) -> str:
    part = part.copy()
    for column in part.find_all(exp.Column):
        column.set("table", exp.to_identifier(FILTER_ROW, quoted=True))
    return render_sql(part)
