"""Compares a view with its query at one snapshot, while writers go on: `gdq verify-view NAME`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumers.refresh.refresher import Refresher, refresh_groups
from gdq.consumers.refresh.view_refresh import ViewRefresh
from gdq.consumers.views.copy_engine import copy_rows
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.consumers.views.target import run
from gdq.sql_text import quote
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_settings

_EXPECTED = "pg_temp.gdq_expected"

# Types of PostgreSQL without an equality that EXCEPT can use: they are compared as text.
_NO_EQUALITY = {"json", "xml", "jsonpath", "point", "line", "lseg", "box", "path", "polygon", "circle", "pg_snapshot"}
# Sums of floats come out the same when they are added up in the same order.
_IN_ORDER = {"max_parallel_workers_per_gather": "0", "synchronize_seqscans": "off"}
_FLOATS = {"real", "double precision"}


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """A comparison: rows of the target, rows of the query that it lacks, rows that it has and the query has not."""

    view_name: str
    rows: int
    missing: int
    unexpected: int

    @property
    def equal(self) -> bool:
        return not self.missing and not self.unexpected


def verify_view(refresher: Refresher, name: str, *, slot: bool = False) -> VerifyResult:
    """Refresh a view and, before that is committed, compare its target with its query at the refresh's snapshot.

    A lake table is compared after its commit. A view of a group is refreshed with it. `slot`: as for Refresher.refresh.

    Both sides are multisets and compared by PostgreSQL (EXCEPT ALL, both ways). Sums of floats may differ by one part
    in 10^9: PostgreSQL adds them up in no fixed order. Writes what a refresh writes.
    """
    found: list[VerifyResult] = []
    (unit,) = refresh_groups(refresher.control, [name])
    refresher.refresh_group(unit, check={name: lambda work, holder: found.append(_compare(work, holder))}, slot=slot)
    return found[-1]


def _compare(work: ViewRefresh, holder: SnapshotHolder) -> VerifyResult:
    """Copy the query's rows at the held snapshot beside the target, and compare the two there."""
    if work.lake is not None:
        return _compare_lake(work, holder)
    output = work.output
    apply_settings(output, READ_SETTINGS | work.view.settings)
    columns = ", ".join(f"{quote(column.name)} {column.type}" for column in work.types)
    run(output, f"create temp table gdq_expected ({columns}) on commit drop")
    with holder.connection.transaction():
        apply_settings(holder.connection, READ_SETTINGS | work.view.settings | _IN_ORDER)
        copy_rows(holder.connection, work.plan.query, output, _EXPECTED)
    values = ", ".join(
        f"{quote(column.name)}::text" if column.type in _NO_EQUALITY else quote(column.name) for column in work.types
    )
    target = f"select {values} from {work.view.target}"
    expected = f"select {values} from {_EXPECTED}"
    missing, unexpected = f"{expected} except all {target}", f"{target} except all {expected}"
    if _float_columns(work):
        lacking, surplus = _tell_apart(work, output, missing, unexpected)
    else:
        lacking, surplus = _count(output, missing), _count(output, unexpected)
    return VerifyResult(work.view.view_name, _count(output, target), lacking, surplus)


def _compare_lake(work: ViewRefresh, holder: SnapshotHolder) -> VerifyResult:
    """Read both sides into memory, as the lake table has them, and count equal rows."""
    from gdq.consumers.lake.types import differing, lake_columns, read  # noqa: PLC0415 (pyarrow is slow to load)

    assert work.lake is not None
    assert work.view.lake is not None
    columns = lake_columns(work.columns, work.view.lake.kind)
    with holder.connection.transaction():
        apply_settings(holder.connection, READ_SETTINGS | work.view.settings | _IN_ORDER)
        expected = list(read(holder.connection, work.plan.query, columns))
    rows, lacking, surplus = differing(expected, work.lake.scan(), columns)
    floats = _float_columns(work)
    missing, unexpected = (_unlike(lacking, surplus, floats)) if floats else (len(lacking), len(surplus))
    return VerifyResult(work.view.view_name, rows, missing, unexpected)


def _count(connection: Connection[Any], query: str) -> int:
    row = connection.execute(f"select count(*) from ({query}) as q").fetchone()
    return 0 if row is None else int(row[0])


def _float_columns(work: ViewRefresh) -> set[int]:
    summed = work.plan.aggregates
    return {n for n, column in enumerate(work.types) if column.name in summed and column.type in _FLOATS}


def _tell_apart(work: ViewRefresh, output: Connection[Any], missing: str, unexpected: str) -> tuple[int, int]:
    """The rows that differ by more than the last digits of a float sum: how many are missing and unexpected."""
    floats = _float_columns(work)
    return _unlike(output.execute(missing).fetchall(), output.execute(unexpected).fetchall(), floats)


def _unlike(
    lacking: Sequence[tuple[Any, ...]], surplus: Sequence[tuple[Any, ...]], floats: set[int]
) -> tuple[int, int]:
    left: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for row in surplus:
        left.setdefault(_without(row, floats), []).append(row)
    close: Counter[bool] = Counter()
    for row in lacking:
        rivals = left.get(_without(row, floats), [])
        twin = next((other for other in rivals if _close(row, other, floats)), None)
        if twin is not None:
            rivals.remove(twin)
        close[twin is not None] += 1
    return close[False], len(surplus) - close[True]


def _without(row: tuple[Any, ...], floats: set[int]) -> tuple[Any, ...]:
    return tuple(value for n, value in enumerate(row) if n not in floats)


def _close(row: tuple[Any, ...], other: tuple[Any, ...], floats: set[int]) -> bool:
    pairs = [(row[n], other[n]) for n in floats]
    return all(a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9) for a, b in pairs)
