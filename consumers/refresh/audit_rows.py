"""The rows of a probe: those of the view's query and those of its target, compared."""

from __future__ import annotations

from collections import Counter

from gdq.consumers.refresh.audit_sample import Probe
from gdq.consumers.refresh.comparison import Rows, compare_target
from gdq.consumers.refresh.view_refresh import ViewRefresh
from gdq.consumers.views.difference import row_image_sql
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.consumers.views.target import text_elsewhere
from gdq.owner_sql import OwnerSql
from gdq.sql_text import quote

# What PostgreSQL's planner estimates for a second of work, carefully.
_COST_OF_SECOND = 200_000

# Rows that an audit reads of either side at most.
ROWS_MAX = 2_000

# Rows and letters of a value that the report of a difference shows.
_SHOWN, _LETTERS = 5, 40


class TooDear(Exception):  # noqa: N818 (it says what happened, as the signals do)
    """An audit would take longer, or read more rows, than it may."""


def differing_rows(work: ViewRefresh, holder: SnapshotHolder, probe: Probe, seconds: float) -> tuple[int, str | None]:
    """Compare a probe's rows; returns the number of keys compared, perhaps not all, and what differs, or None.

    TooDear if even a single key would cost too much.
    """
    left_out = _left_out(work)
    names = [column.name for number, column in enumerate(work.types) if number not in left_out]
    while True:
        probe, query = restricted_query(work, holder, probe, seconds)
        there = probe.condition(holder.connection, target=True)
        expected = _images(OwnerSql(holder.connection, work.view.acts_as), f"({query})", names, "")
        found = _images(work.target.sql(work.output), work.view.target, names, there)
        if max(expected.total(), found.total()) <= ROWS_MAX:
            break
        smaller = probe.smaller()
        if smaller is None:
            raise TooDear("too many rows")
        probe = smaller
    size = probe.size if probe.values else expected.total()
    if expected == found:
        return size, None
    # equal values may be written differently: 1.0 and 1.00
    missing, unexpected = compare_target(work, holder, query, there, left_out).rows()
    return size, report_difference(names, probe, missing, unexpected) if missing or unexpected else None


def restricted_query(work: ViewRefresh, holder: SnapshotHolder, probe: Probe, seconds: float) -> tuple[Probe, str]:
    """The view's query for a probe, perhaps for a part of its keys so that it costs less; TooDear if a key is too much.

    The server pushes the condition on the rows down into the query.
    """
    names = ", ".join(quote(column.name) for column in work.types)
    whole = f"select * from ({work.plan.query}) as q({names})" if names else work.plan.query
    while True:
        where = probe.condition(holder.connection, target=False)
        query = f"{whole} where {where}" if where else whole
        cost = OwnerSql(holder.connection, work.view.acts_as).cost(query)
        if cost <= seconds * _COST_OF_SECOND:
            return probe, query
        smaller = probe.smaller()
        if smaller is None:
            raise TooDear(f"estimated cost {cost:.0f}")
        probe = smaller


def _left_out(work: ViewRefresh) -> frozenset[int]:
    """The columns that are not compared: those that the query leaves open, and texts of values that are not."""
    settled = work.plan.settled
    texts = {
        number
        for number, (_, oid, kind) in enumerate(work.columns)
        if settled.loose and work.view.elsewhere and text_elsewhere(oid, kind)
    }
    return settled.open_columns | texts


def _images(owned: OwnerSql, relation: str, names: list[str], where: str) -> Counter[str]:
    """How often each row occurs, as text."""
    condition = f" where {where}" if where else ""
    query = f"select {row_image_sql(names)} as image from {relation} as r{condition} limit {ROWS_MAX + 1}"
    return Counter(image for (image,) in owned.rows(query))


def report_difference(names: list[str], probe: Probe, missing: Rows, unexpected: Rows) -> str:
    """What differs, in one line: the numbers of rows, and the keys of some."""
    keys = [name for name in names if name in probe.values] or names[:3]
    shown = dict.fromkeys(
        "(" + ", ".join(_short(row[names.index(name)]) for name in keys) + ")" for row in [*missing, *unexpected]
    )
    listed = ", ".join([*shown][:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")
    return f"{len(missing)} rows missing, {len(unexpected)} unexpected, where ({', '.join(keys)}) is {listed}"


def _short(value: object) -> str:
    text = "NULL" if value is None else str(value).replace("\n", " ")
    return text if len(text) <= _LETTERS else text[:_LETTERS] + "..."
