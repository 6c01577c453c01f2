"""Whether the changes of a view or a full load cost less, by what its past refreshes took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.view.view import ViewRun

# Full loads are taken for what the last few took; changes are not given up for a difference that may be chance: of
# three equal refreshes the slowest took 1.4 times the quickest in the median (python -m bench.keys).
_FULL_RUNS = 5
_MARGIN = 1.5

# A refresh expected to take no longer is not worth a choice. On Spark starting jobs alone takes seconds, more or less.
_SECONDS_MIN = 1.0
_SECONDS_MIN_SPARK = 15.0

# After this many full loads by choice in a row the changes are tried again: an index may have come. The pause is longer
# where a try would cost more than an eighth of the full loads before it, up to the part of the history that is read.
_TRY_AGAIN = 8
_TRY_AGAIN_MAX = 80

BY_COST = "full expected to cost less"


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether to load in full, and why as the history shows it; empty when nothing is known."""

    full: bool
    why: str


def choose(runs: Sequence[ViewRun], delta_rows: int, held: int, *, on_spark: bool = False) -> Choice:
    """Whether a refresh with `delta_rows` netted changes works from them or loads in full.

    `runs`: the view's history, newest first. `held`: about how many rows its tables hold now.
    """
    done = [run for run in runs if run.action in ("full", "delta", "none") and run.work_seconds is not None]
    loads = [float(run.work_seconds or 0) for run in _loads(done, delta_rows, held)][:_FULL_RUNS]
    deltas = [
        (run.delta_rows, float(run.work_seconds or 0)) for run in done if run.action == "delta" and run.delta_rows
    ]
    if not loads or not deltas:
        return Choice(False, "")
    full, expected = median(loads), _expected(deltas, delta_rows)
    why = f"{delta_rows} changes: {expected:.2g} s expected, full {full:.2g} s"
    if expected <= max(full * _MARGIN, _SECONDS_MIN_SPARK if on_spark else _SECONDS_MIN):
        return Choice(False, f"delta, {why}")
    pause = min(max(_TRY_AGAIN, round(_TRY_AGAIN * (expected - full) / max(full, 0.001))), _TRY_AGAIN_MAX)
    recent = [run for run in done if run.action != "none"][:pause]
    if len(recent) == pause and all((run.reason or "").startswith(BY_COST) for run in recent):
        return Choice(False, f"delta tried again, {why}")
    return Choice(True, f"{BY_COST}, {why}")


def rows_held(connection: Connection[Any], tables: Sequence[str]) -> int:
    """About how many rows these tables and their partitions hold, by the server's statistics; 0 without any."""
    query = """
        select coalesce(sum(greatest(pg_catalog.pg_stat_get_live_tuples(c.oid), c.reltuples::bigint, 0)), 0)::bigint
          from pg_catalog.pg_class c
         where c.relkind <> 'p' and c.oid in (
                 select n::pg_catalog.regclass from pg_catalog.unnest(%s::text[]) n
                 union select p.relid from pg_catalog.unnest(%s::text[]) n,
                                           pg_catalog.pg_partition_tree(n::pg_catalog.regclass) p)"""
    return int(scalar(connection, query, list(tables), list(tables)) or 0)


def _loads(done: Sequence[ViewRun], delta_rows: int, held: int) -> Iterator[ViewRun]:
    """The full loads but those of smaller tables: since them changed, and they read, less than half of `held`.

    What changed before a full load is not known: no more than what that read.
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
    """Seconds that a number of changes should take, on the line through the refreshes next to it in size.

    The fixed cost is that of the smallest; a smaller one costs no more than the next larger one did.
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
