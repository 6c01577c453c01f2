"""Which rows of its tables a refresh of a join has to read: those that the keys of the changed rows lead to.

The keys are followed from table to table by statements of the holder's transaction, and go into the reading statements
as arrays, which an index serves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psycopg import sql

from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.plan.spark.parts import Branch, LeafRead
from gdq.plan.spark.plan import SparkPlan
from gdq.plan.table import WEIGHT
from gdq.sql_text import quote, raw
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_settings
from gdq.view.view import ViewInfo

# More keys than these are looked up for longer than reading the whole table takes.
_KEYS_MAX = 50_000
_KEYS_EACH = 10_000


@dataclass(slots=True)
class Reach:
    """The rows that a refresh reads. `images`: for every table that changed its log rows as signed images, for FROM."""

    holder: SnapshotHolder
    view: ViewInfo
    plan: SparkPlan
    images: Mapping[str, str]

    def conditions(self, branch: Branch) -> dict[str, list[str] | None]:
        """For each leaf the conditions of the parts to read of its table; None: all of it; empty: nothing."""
        leaves = {leaf.alias: leaf for leaf in branch.leaves}
        changed = [leaf.alias for leaf in branch.leaves if leaf.table in self.images]
        found: dict[str, list[tuple[str, ...] | None]] = {alias: [] for alias in leaves}
        with self.holder.connection.transaction(force_rollback=True):
            apply_settings(self.holder.connection, READ_SETTINGS | self.view.settings)
            for start in changed:
                reached = self._follow(branch, leaves, start)
                for alias in leaves:
                    if alias != start or leaves[start].own:
                        found[alias].append(reached.get(alias))
        return {alias: _parts(some) for alias, some in found.items()}

    def _follow(self, branch: Branch, leaves: Mapping[str, LeafRead], start: str) -> dict[str, tuple[str, ...]]:
        """The conditions of every leaf that the changes of one lead to; leaves that need all rows are left out.

        First to leaves that have a row wherever the change counts: over inner joins, and from a leaf of an outer, semi
        or anti join to what it is joined with. Then from these to leaves that may have none, and on to what is joined
        with those, but never back to another table that they are joined with: where they have no row it still counts.
        A leaf of an outer or semi join is reached from itself too: of a key that changed there all rows count.
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
        """The values of an expression over a leaf's changes, or over all its rows that meet the conditions, as arrays.

        None when there are too many.
        """
        connection = self.holder.connection
        relation = self.images[leaf.table] if conditions is None else self._any(leaf)
        parts = [f"({leaf.where})"] if leaf.where else []
        if conditions is not None:
            parts.append(f"({' or '.join(conditions) or 'false'})")
        where = f" where {' and '.join(parts)}" if parts else ""
        connection.execute("select set_config('enable_seqscan', %s, true)", ["off" if conditions is None else "on"])
        rows = connection.execute(
            sql.SQL(
                "with q as materialized (select distinct k from (select {} as k from {} as {}{}) as q "
                "where k is not null limit {}), n as (select k, row_number() over () as n from q) "
                "select array_agg(k)::text, pg_typeof(array_agg(k))::text, count(*) from n group by (n - 1) / {}"
            ).format(
                raw(expression),
                raw(relation),
                raw(quote(leaf.alias)),
                raw(where),
                sql.Literal(_KEYS_MAX + 1),
                sql.Literal(_KEYS_EACH),
            )
        ).fetchall()
        if sum(count for _, _, count in rows) > _KEYS_MAX:
            return None
        return [f"{sql.Literal(array).as_string(None)}::{kind}" for array, kind, _ in rows]

    def _any(self, leaf: LeafRead) -> str:
        """Every row that the table of a leaf has or had."""
        if leaf.table not in self.images:
            return leaf.table
        (table,) = (table for table in self.plan.tables if table.name == leaf.table)
        columns = ", ".join(quote(name) for name in table.logged)
        gone = f"select {columns} from {self.images[leaf.table]} as d where {quote(WEIGHT)} < 0"
        return f"(select {columns} from {leaf.table} union all {gone})"


def _among(expression: str, array: str) -> str:
    return f"{expression} = any ({array})"


def _parts(found: Sequence[tuple[str, ...] | None]) -> list[str] | None:
    """Conditions of parts that have no row in common: keys of one origin may be divided, others may meet."""
    if len(found) == 1 and found[0] is not None:
        return list(found[0])
    conditions: list[str] = []
    for some in found:
        if some is None:
            return None
        conditions += some
    unique = dict.fromkeys(conditions)
    return [" or ".join(unique)] if unique else []
