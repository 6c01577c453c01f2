"""Rows of a view's target compared with rows of its query, both restricted alike, in the target's database."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gdq.consumers.refresh.view_refresh import ViewRefresh
from gdq.consumers.views.row_copy import copy_rows
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.consumers.views.target import TargetColumn
from gdq.owner_sql import OwnerSql
from gdq.sql_text import quote
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings

_EXPECTED = "pg_temp.gdq_expected"

# PostgreSQL's types without an equality for EXCEPT: they are compared as text.
NO_EQUALITY = {"json", "xml", "jsonpath", "point", "line", "lseg", "box", "path", "polygon", "circle", "pg_snapshot"}
# Sums of floats are equal only if they are added in the same order.
IN_ORDER = {"max_parallel_workers_per_gather": "0", "synchronize_seqscans": "off"}
_FLOATS = {"real", "double precision"}

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A query's rows in a table beside the target. `columns`: those compared; `target`: SELECT of the target's rows."""

    output: OwnerSql
    columns: Sequence[TargetColumn]
    floats: frozenset[int]
    target: str
    expected: str

    def counts(self) -> tuple[int, int, int]:
        """Numbers of rows in the target, missing in it, and unexpected in it."""
        if self.floats:
            missing, unexpected = map(len, self.rows())
        else:
            missing, unexpected = (self._count(query) for query in self._queries())
        return self._count(self.target), missing, unexpected

    def rows(self) -> tuple[Rows, Rows]:
        """Rows missing in the target, and rows unexpected there; floats that were added may differ a little."""
        missing, unexpected = (self.output.rows(query) for query in self._queries())
        return rows_unlike(missing, unexpected, self.floats)

    def _queries(self) -> tuple[str, str]:
        return f"{self.expected} except all {self.target}", f"{self.target} except all {self.expected}"

    def _count(self, query: str) -> int:
        return int(self.output.value(f"select count(*) from ({query}) as q"))


def compare_target(
    work: ViewRefresh, holder: SnapshotHolder, query: str, where: str = "", left_out: Collection[int] = ()
) -> Comparison:
    """Copy `query`'s rows at the held snapshot beside the target, into a table that ends with the transaction.

    `query`: the view's, perhaps with a condition, like the condition `where` on the target's rows. `left_out`: numbers
    of columns, from 0, that are not compared.
    """
    output = work.output
    apply_view_settings(output, READ_SETTINGS | work.view.target_settings)
    columns = ", ".join(f"{quote(column.name)} {column.type}" for column in work.types)
    owned = work.target.sql(output)
    owned.run(f"create temp table gdq_expected ({columns}) on commit drop")
    with holder.connection.transaction():
        apply_view_settings(holder.connection, READ_SETTINGS | work.view.settings | IN_ORDER)
        source = OwnerSql(holder.connection, work.view.acts_as)
        if owned.role is None:
            copy_rows(holder.connection, f"({source.select(query)})", output, _EXPECTED)
        else:
            _copy_as_text(source, query, owned, work.types)
    compared = [column for number, column in enumerate(work.types) if number not in left_out]
    values = ", ".join(
        f"{quote(column.name)}::text" if column.type in NO_EQUALITY else quote(column.name) for column in compared
    )
    target = f"select {values} from {work.view.target}" + (f" where {where}" if where else "")
    return Comparison(owned, compared, float_columns(work, compared), target, f"select {values} from {_EXPECTED}")


def _copy_as_text(source: OwnerSql, query: str, owned: OwnerSql, columns: Sequence[TargetColumn]) -> None:
    """As copy_rows(), but no type's input function runs in COPY: a domain's check could be code of the view's owner."""
    names = [f"c{n}" for n in range(len(columns))]
    owned.run(f"create temp table gdq_texts ({', '.join(f'{name} text' for name in names)}) on commit drop")
    copy_rows(source.connection, f"({source.select(query)})", owned.connection, "pg_temp.gdq_texts")
    values = ", ".join(f"{name}::{column.type}" for name, column in zip(names, columns, strict=True))
    owned.run(f"insert into {_EXPECTED} select {values} from pg_temp.gdq_texts")


def float_columns(work: ViewRefresh, columns: Sequence[TargetColumn]) -> frozenset[int]:
    """The numbers of columns, from 0, that may be sums of floats."""
    summed = work.plan.aggregates
    return frozenset(n for n, column in enumerate(columns) if column.name in summed and column.type in _FLOATS)


def rows_unlike(lacking: Sequence[tuple[Any, ...]], surplus: Rows, floats: Collection[int]) -> tuple[Rows, Rows]:
    """Two lists of rows without those that differ only in the last digits of floats."""
    if not floats:
        return list(lacking), list(surplus)
    left: dict[tuple[Any, ...], Rows] = {}
    for row in surplus:
        left.setdefault(_without(row, floats), []).append(row)
    missing: Rows = []
    for row in lacking:
        rivals = left.get(_without(row, floats), [])
        twin = next((other for other in rivals if _close(row, other, floats)), None)
        if twin is not None:
            rivals.remove(twin)
        else:
            missing.append(row)
    return missing, [row for rows in left.values() for row in rows]


def _without(row: tuple[Any, ...], floats: Collection[int]) -> tuple[Any, ...]:
    return tuple(value for n, value in enumerate(row) if n not in floats)


def _close(row: tuple[Any, ...], other: tuple[Any, ...], floats: Collection[int]) -> bool:
    pairs = [(row[n], other[n]) for n in floats]
    return all(
        a == b or (a is not None and b is not None and math.isclose(float(a), float(b), rel_tol=1e-9)) for a, b in pairs
    )
