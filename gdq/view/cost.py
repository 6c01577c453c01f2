"""Choice between an incremental refresh and a full load of a view, by the seconds of its past refreshes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.qualified_sql import qualified
from gdq.view.view import ViewRun

# The last few full loads count. The margin excludes chance: of three equal refreshes the slowest took 1.4 times as long
# as the quickest in the median (python -m bench.keys).
_FULL_RUNS = 5
_MARGIN = 1.5

# A refresh expected to take at most this long needs no choice. On Spark the start of jobs alone takes seconds.
_SECONDS_MIN = 1.0
_SECONDS_MIN_SPARK = 15.0

# After this many chosen full loads in a row an incremental refresh is tried again: there may be a new index. The pause
# is longer if a try costs more than an eighth of the full loads before it; at most the read part of the history.
_TRY_AGAIN = 8
_TRY_AGAIN_MAX = 80

BY_COST = "full expected to cost less"


@dataclass(frozen=True, slots=True)
class PastRun:
    """What the choice looks at of a past refresh: fields of ViewRun."""

    action: str | None
    reason: str | None
    delta_rows: int | None
    rows_read: int | None
    work_seconds: float | None


@dataclass(frozen=True, slots=True)
class CostChoice:
    """The choice of choose(): `full` for a full load, and `why` by the history, empty if that says nothing."""

    full: bool
    why: str


def choose_by_cost(
    runs: Sequence[PastRun | ViewRun], delta_rows: int, held: int, *, on_spark: bool = False
) -> CostChoice:
    """Choose between a refresh from `delta_rows` netted changes and a full load.

    `runs`: the view's history, newest first. `held`: the estimated number of rows in its tables.
    """
    done = [run for run in runs if run.action in ("full", "delta", "none") and run.work_seconds is not None]
    loads = [float(run.work_seconds or 0) for run in _loads(done, delta_rows, held)][:_FULL_RUNS]
    deltas = [
        (run.delta_rows, float(run.work_seconds or 0)) for run in done if run.action == "delta" and run.delta_rows
    ]
    if not loads or not deltas:
        return CostChoice(False, "")
    full, expected = median(loads), _expected(deltas, delta_rows)
    why = f"{delta_rows} changes: {expected:.2g} s expected, full {full:.2g} s"
    if expected <= max(full * _MARGIN, _SECONDS_MIN_SPARK if on_spark else _SECONDS_MIN):
        return CostChoice(False, f"delta, {why}")
    pause = min(max(_TRY_AGAIN, round(_TRY_AGAIN * (expected - full) / max(full, 0.001))), _TRY_AGAIN_MAX)
    recent = [run for run in done if run.action != "none"][:pause]
    if len(recent) == pause and all((run.reason or "").startswith(BY_COST) for run in recent):
        return CostChoice(False, f"delta tried again, {why}")
    return CostChoice(True, f"{BY_COST}, {why}")


def rows_held(connection: Connection[Any], tables: Sequence[str]) -> int:
    """Estimated rows in these tables and their partitions, by the server's statistics; 0 without statistics."""
    query = qualified("""
        select coalesce(sum(greatest(pg_catalog.pg_stat_get_live_tuples(c.oid), c.reltuples::bigint, 0)), 0)::bigint
          from pg_catalog.pg_class c
         where c.relkind <> 'p' and c.oid = any (array(
                 select n::pg_catalog.regclass::oid from pg_catalog.unnest(%s::text[]) n
                 union select p.relid::oid from pg_catalog.unnest(%s::text[]) n,
                                           pg_catalog.pg_partition_tree(n::pg_catalog.regclass) p))""")
    return int(scalar(connection, query, list(tables), list(tables)) or 0)


def _loads(done: Sequence[PastRun | ViewRun], delta_rows: int, held: int) -> Iterator[PastRun | ViewRun]:
    """The full loads that tell the cost of one now, that is without those of much smaller tables.

    A load counts if it read at least half of `held`, or if at most half of `held` changed since. The changes before a
    later full load are unknown; at most they are the rows that it read.
    """
    changed = delta_rows
    for run in done:
        if run.action != "full":
            changed += run.delta_rows or 0
            continue
        read = run.rows_read or 0
        if 2 * changed <= held or 2 * read >= held:
            yield run
        changed += read


def _expected(deltas: Sequence[tuple[int, float]], rows: int) -> float:
    """Expected seconds for a number of changes, interpolated between the refreshes nearest in size.

    Above the largest refresh the cost grows in proportion, from a fixed part that is the cheapest refresh. Below the
    smallest refresh the cost is that refresh's.
    """
    by_size: dict[int, list[float]] = {}
    for size, seconds in deltas:
        by_size.setdefault(size, []).append(seconds)
    points = sorted((size, median(seconds)) for size, seconds in by_size.items())
    smaller = [point for point in points if point[0] <= rows]
    larger = [point for point in points if point[0] > rows]
    if not smaller:
        return larger[0][1]
    below = smaller[-1]
    if larger:
        share = (rows - below[0]) / (larger[0][0] - below[0])
        return below[1] + share * (larger[0][1] - below[1])
    fixed = min(seconds for _, seconds in points)
    return fixed + (below[1] - fixed) * rows / below[0] if below[1] > fixed else below[1]
