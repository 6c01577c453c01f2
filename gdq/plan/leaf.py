"""The items of FROM: tables, queries, LATERAL queries, and VALUES and functions, which read no table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.table import TableSchema

LEAF_NODES = (exp.Table, exp.Subquery, exp.Values, exp.Unnest)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One item of a FROM: a table, a query, or `fixed`: VALUES or a function, which read no table.

    `columns`: the names of its columns. `lateral`: it reads columns of items before it.
    """

    alias: str
    columns: tuple[str, ...]
    table: TableSchema | None = None
    query: exp.Query | None = None
    fixed: exp.Expr | None = None
    lateral: bool = False


def leaf_of(
    node: exp.Expr, alias: str, columns: tuple[str, ...], tables: Mapping[tuple[str, str], TableSchema]
) -> Leaf:
    """The leaf for a node of FROM; `columns` as its alias lists them. PlanError for an unknown kind of item."""
    lateral = isinstance(node, exp.Lateral)
    inner = node.this if isinstance(node, exp.Lateral) else node
    if isinstance(inner, exp.Subquery) and isinstance(inner.this, exp.Query):
        names = output_names(inner.this)
        names = columns + names[len(columns) :]
        if len(set(names)) != len(names):
            raise PlanError("duplicate-column", "a query in FROM has two columns of one name")
        return Leaf(alias, names, query=inner.this, lateral=lateral)
    if not isinstance(inner, exp.Table) or not isinstance(inner.this, exp.Identifier) or inner.args.get("sample"):
        return _fixed(node, inner, alias, columns)
    table = tables.get((inner.db, inner.name))
    if table is None:
        raise PlanError("unknown-table", f"table {inner.db}.{inner.name} is not captured")
    if columns:
        raise PlanError("column-aliases", "a table with aliases for its columns is loaded in full")
    return Leaf(alias, tuple(column.name for column in table.columns), table=table)


def _fixed(node: exp.Expr, inner: exp.Expr, alias: str, columns: tuple[str, ...]) -> Leaf:
    """The leaf for VALUES, or for a function, whose columns PostgreSQL always names."""
    given = node.args.get("alias")
    inner = inner.copy()
    inner.set("joins", None)
    if isinstance(inner, exp.Values):
        width = len(inner.expressions[0].expressions) if isinstance(inner.expressions[0], exp.Tuple) else 1
        columns += tuple(f"column{n}" for n in range(len(columns) + 1, width + 1))
    if isinstance(inner.args.get("offset"), exp.Expr):
        columns += (inner.args["offset"].name,)  # WITH ORDINALITY
    plain = all(isinstance(column, exp.Identifier) for column in (given.args.get("columns") if given else None) or ())
    if not columns or not plain or inner.find(exp.Query) or inner.args.get("sample") or isinstance(inner, exp.Subquery):
        raise PlanError("table-function", f"FROM {node.sql(dialect='postgres')} is loaded in full")
    return Leaf(alias, columns, fixed=node, lateral=inner.find(exp.Column) is not None)


def output_names(query: exp.Query) -> tuple[str, ...]:
    """The names of a query's columns."""
    while not isinstance(query, exp.Select):
        if isinstance(query, exp.Table):
            raise PlanError("table-function", "a join with a name of its own is loaded in full")
        query = query.this
    return tuple(item.alias_or_name or f"column{n}" for n, item in enumerate(query.expressions, 1))


def is_correlated(query: exp.Expr) -> bool:
    """True if a part of a query, with resolved columns, reads columns of a query around it."""
    inner = {node.alias for node in query.find_all(*LEAF_NODES, exp.Lateral)}
    return any(column.table not in inner for column in query.find_all(exp.Column))
