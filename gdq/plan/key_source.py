"""Where values of a view's columns can be taken from, for audits: columns of single tables, and expressions over them.

An audit may compare rows of any values, so a source that gives other values than the view shows does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.dialect import render_sql
from gdq.plan.leaf import output_names
from gdq.plan.query import Query, parse_query, selects_of, subqueries_of, value_of
from gdq.plan.shape import aggregates_of, windows_of
from gdq.plan.table import TableSchema
from gdq.sql_text import quote


@dataclass(frozen=True, slots=True)
class KeySource:
    """Expressions over one table's columns, each with the column of the view that shows it.

    `reads`: the table's columns in them.
    """

    table: str
    alias: str
    values: tuple[tuple[str, str], ...]
    reads: frozenset[str]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the view."""
        return tuple(column for column, _ in self.values)

    def select(self, relation: str, columns: Sequence[str]) -> str:
        """SELECT of the values as texts, named as `columns`, from a relation like the table; NULL for others."""
        known = dict(self.values)
        texts = {name: f"({known[name]})::text" if name in known else "null::text" for name in columns}
        listed = ", ".join(f"{text} as {quote(name)}" for name, text in texts.items())
        return f"select {listed} from {relation} as {quote(self.alias)}"


# cached for a process that refreshes again and again
@lru_cache(maxsize=256)
def key_sources(canonical: str, tables: tuple[TableSchema, ...], columns: tuple[str, ...]) -> tuple[KeySource, ...]:
    """The sources of values for some columns of a view by its canonical SQL; none if the planner cannot read it."""
    try:
        query = parse_query(canonical, tables)
        names = output_names(query.root)
        return tuple(one for select in selects_of(query.root) for one in _of_select(query, select, names, columns))
    except PlanError:
        return ()


def _of_select(query: Query, select: exp.Select, names: Sequence[str], columns: Sequence[str]) -> list[KeySource]:
    found: dict[str, list[tuple[str, exp.Expr]]] = {}
    for name, item in zip(names, select.expressions, strict=True):
        value = _resolved(query, value_of(item)) if name in columns else None
        aliases = {column.table for column in value.find_all(exp.Column)} if value is not None else set()
        if value is not None and len(aliases) == 1:
            found.setdefault(aliases.pop(), []).append((name, value))
    sources = []
    for alias, values in found.items():
        table = query.leaves[alias].table
        assert table is not None
        reads = frozenset(column.name for _, value in values for column in value.find_all(exp.Column))
        shown = tuple((name, render_sql(value)) for name, value in values)
        sources.append(KeySource(table.qualified, alias, shown, reads))
    return sources


def _resolved(query: Query, value: exp.Expr) -> exp.Expr | None:
    """An expression over columns of tables; None if it needs more than one row, or a subquery."""
    if aggregates_of(value) or windows_of(value) or subqueries_of(value):
        return None
    if isinstance(value, exp.Column):
        leaf = query.leaves[value.table]
        if leaf.query is None:
            return value.copy() if leaf.table is not None else None
        inner = selects_of(leaf.query)[0]
        return _resolved(query, value_of(inner.expressions[leaf.columns.index(value.name)]))
    value = value.copy()
    for column in list(value.find_all(exp.Column)):
        found = _resolved(query, column)
        if found is None:
            return None
        column.replace(exp.Paren(this=found))
    return value
