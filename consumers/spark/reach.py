"""The rows that a refresh of a join has to read: those that join, step by step, with the changed rows.

Statements in the holder's transaction follow the keys from table to table. The reading statements get the keys as
arrays, so that PostgreSQL can use an index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psycopg import sql

from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.owner_sql import OwnerSql
from gdq.plan.spark.parts import Branch, LeafRead
from gdq.plan.spark.plan import SparkPlan
from gdq.plan.table import WEIGHT_COLUMN
from gdq.sql_text import is_not_null, quote, raw
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings
from gdq.view.view import ViewInfo

# With more keys, reading the whole table is faster than looking them up.
_KEYS_MAX = 50_000
_KEYS_EACH = 10_000


@dataclass(slots=True)
class Reach:
    """Finds the rows that a refresh reads. `images`: each changed table's log rows as signed images, for FROM."""

    holder: SnapshotHolder
    view: ViewInfo
    plan: SparkPlan
    images: Mapping[str, str]

    def conditions(self, branch: Branch) -> dict[str, list[str] | None]:
        """For each leaf, one condition per part of its table to read. None: read all; empty: read nothing."""
        leaves = {leaf.alias: leaf for leaf in branch.leaves}
        changed = [leaf.alias for leaf in branch.leaves if leaf.table in self.images]
        found: dict[str, list[tuple[str, ...] | None]] = {alias: [] for alias in leaves}
        with self.holder.connection.transaction(force_rollback=True):
            apply_view_settings(self.holder.connection, READ_SETTINGS | self.view.settings)
            for start in changed:
                reached = self._follow(branch, leaves, start)
                for alias in leaves:
                    if alias != start or leaves[start].own:
                        found[alias].append(reached.get(alias))
        return {alias: _parts(some) for alias, some in found.items()}

    def _follow(self, branch: Branch, leaves: Mapping[str, LeafRead], start: str) -> dict[str, tuple[str, ...]]:
        """Conditions for every leaf that the changes of `start` lead to; leaves that must be read whole are left out.

        `a join b left join c`, a changes: first the rows of b that join with the changed rows of a, then the rows of c.
        1. The certain steps go to leaves that have a row wherever the change counts: over inner joins, and from a leaf
           of an outer, semi or anti join to the leaf it is joined to.
        2. The uncertain steps go to leaves that may have no row, never back from them: without a row of c, rows of a
           and b still count.
        A leaf of an outer or semi join also reaches itself: all rows with a changed key count.
        """
        reached: dict[str, tuple[str, ...]] = {}
        optional = {alias for alias, leaf in leaves.items() if leaf.role != "inner"}
        certain = [(edge.left, edge.right) for edge in branch.edges]
        certain += [(right, left) for left, right in certain if left[0] not in optional]
        uncertain = [(edge.right, edge.left) for edge in branch.edges if edge.left[0] in optional]
        for steps in (certain, uncertain):
            waiting = deque([start, *reached])
            while waiting:
                here = waiting.popleft()
                for (alias, own), (other, theirs) in steps:
                    if alias != here or other in reached or other == start:
                        continue
                    keys = self._keys(leaves[here], own, None if here == start else reached[here])
                    if keys is not None:
                        reached[other] = tuple(_among(theirs, array) for array in keys)
                        waiting.append(other)
        leaf = leaves[start]
        if leaf.own:
            keys = self._keys(leaf, leaf.own[0], None)
            if keys is not None:
                reached[start] = tuple(_among(leaf.own[0], array) for array in keys)
        return reached

    def _keys(self, leaf: LeafRead, expression: str, conditions: Sequence[str] | None) -> list[str] | None:
        """Arrays of an expression's values over a leaf's changes, or its rows under `conditions`; None if too many."""
        connection = self.holder.connection
        relation = self.images[leaf.table] if conditions is None else self._any(leaf)
        parts = [f"({leaf.where})"] if leaf.where else []
        if conditions is not None:
            parts.append(f"({' or '.join(conditions) or 'false'})")
        where = f" where {' and '.join(parts)}" if parts else ""
        connection.execute("select set_config('enable_seqscan', %s, true)", ["off" if conditions is None else "on"])
        rows = OwnerSql(connection, self.view.acts_as).rows(
            sql.SQL(
                "with q as materialized (select distinct k from (select {} as k from {} as {}{}) as q "
                "where {} limit {}), n as (select k, row_number() over () as n from q) "
                "select array_agg(k)::text, pg_typeof(array_agg(k))::text, count(*) from n group by (n - 1) / {}"
            )
            .format(
                raw(expression),
                raw(relation),
                raw(quote(leaf.alias)),
                raw(where),
                raw(is_not_null("k")),
                sql.Literal(_KEYS_MAX + 1),
                sql.Literal(_KEYS_EACH),
            )
            .as_string(connection)
        )
        if sum(count for _, _, count in rows) > _KEYS_MAX:
            return None
        return [f"{sql.Literal(array).as_string(None)}::{kind}" for array, kind, _ in rows]

    def _any(self, leaf: LeafRead) -> str:
        """Relation of all rows that a leaf's table has or had since S0."""
        if leaf.table not in self.images:
            return leaf.table
        (table,) = (table for table in self.plan.tables if table.name == leaf.table)
        columns = ", ".join(quote(name) for name in table.logged)
        gone = f"select {columns} from {self.images[leaf.table]} as d where {quote(WEIGHT_COLUMN)} < 0"
        return f"(select {columns} from {leaf.table} union all {gone})"


def _among(expression: str, array: str) -> str:
    return f"{expression} = any ({array})"


def _parts(found: Sequence[tuple[str, ...] | None]) -> list[str] | None:
    """Conditions of parts without common rows: arrays of one start are disjoint, arrays of several may overlap."""
    if len(found) == 1 and found[0] is not None:
        return list(found[0])
    conditions: list[str] = []
    for some in found:
        if some is None:
            return None
        conditions += some
    unique = dict.fromkeys(conditions)
    return [" or ".join(unique)] if unique else []
