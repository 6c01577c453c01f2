"""Recompute by the table's own key: for a projection of one table that reads columns missing in the log.

    select id, note from orders     -- orders is captured in mode pk: its log holds only id

Only the keys of changed rows are needed from the log: the view's rows with these keys are replaced by the table's
current rows. The view must show the whole key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.query import Query, aliased, value_of
from gdq.plan.relation_sql import RelationSql
from gdq.plan.shape import is_divided
from gdq.plan.steps import ReplaceOutcome
from gdq.plan.table import TableColumn, TableSchema
from gdq.plan.whole import whole_reason
from gdq.sql_text import quote


def missing_columns(query: Query, table: TableSchema) -> list[TableColumn]:
    """The columns that a query reads of a table but the table's log does not hold."""
    aliases = {leaf.alias for leaf in query.leaves.values() if leaf.table is table}
    read = {column.name for column in query.root.find_all(exp.Column) if column.table in aliases}
    return [column for column in table.unlogged if column.name in read]


def own_key(query: Query, table: TableSchema) -> dict[str, str]:
    """Each column of the table's key with the view's column that shows it.

    Empty if that key alone cannot replace rows: the view is no projection of this table, does not show the whole key,
    or the key's collation treats different values as equal.
    """
    root = query.root
    if not isinstance(root, exp.Select) or [leaf.table for leaf in query.leaves.values()] != [table]:
        return {}
    if whole_reason(root) is not None or is_divided(root):
        return {}
    shown = {
        value_of(item).name: item.alias for item in reversed(root.expressions) if isinstance(value_of(item), exp.Column)
    }
    keys = [column for column in table.columns if column.key]
    if any(column.folded or column.name not in shown or column in table.unlogged for column in keys):
        return {}
    return {column.name: shown[column.name] for column in keys}


def replaced_by_own_key(relations: RelationSql, collect: Callable[[str], str]) -> ReplaceOutcome | None:
    """The plan that replaces the rows with the log's keys; None if the log holds all columns.

    `collect` adds a step that collects keys by a SELECT, and returns the keys' name.
    """
    query = relations.query
    leaf = next(iter(query.leaves.values()), None)
    if leaf is None or leaf.table is None or not missing_columns(query, leaf.table):
        return None
    delta = f"pg_temp.gdq_delta_{relations.numbers[leaf.table.qualified]}"
    keys = {name: collect(f"select d.{quote(name)} as k from {delta} as d") for name in leaf.table.key}
    select = query.root.copy()
    select.set("order", None)
    select.set("expressions", [aliased(item, f"c{n}") for n, item in enumerate(query.root.expressions, 1)])
    columns = own_key(query, leaf.table)
    rows = relations.at(select, "new", {leaf.alias: list(keys.items())})
    return ReplaceOutcome(tuple((columns[name], step) for name, step in keys.items()), rows)


def missing_columns_error(table: TableSchema, missing: Sequence[TableColumn]) -> PlanError:
    """The error for columns that the view needs but the table's log does not hold."""
    listed = ", ".join(quote(column.name) for column in missing)
    pk = table.mode == "pk"
    return PlanError(
        "pk-columns-missing" if pk else "column-not-captured",
        f"the log of {table.qualified} does not hold column{'s' * (len(missing) > 1)} {listed}",
        hint=f"Capture the table with --include {','.join(column.name for column in missing)}, or in mode full; "
        "a view of rows of this table alone may select its key instead."
        if pk
        else "Capture these columns too, with unchanged both or once, or let a view of rows of this table alone select "
        "its key.",
    )
