"""Compares a view with its query at one snapshot, while writers go on: `gdq verify-view NAME`."""

from __future__ import annotations

from dataclasses import dataclass

from gdq.conninfo import Connectable
from gdq.consumers.refresh.comparison import IN_ORDER, compare_target, float_columns, rows_unlike
from gdq.consumers.refresh.groups import refresh_groups
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.view_refresh import ViewRefresh
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.owner_sql import OwnerSql
from gdq.shown import Shown
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings


@dataclass(frozen=True, slots=True, repr=False)
class VerifyResult(Shown):
    """Result of verify_view(): rows in the target, rows missing there, and rows there that the query does not give."""

    view_name: str
    rows: int
    missing: int
    unexpected: int

    @property
    def equal(self) -> bool:
        return not self.missing and not self.unexpected


def verify_view(connection: Connectable, name: str, *, slot: bool = False) -> VerifyResult:
    """Refresh a view and compare it with its query at the refresh's snapshot.

    A given connection, like that of Refresher, is idle. PostgreSQL compares both sides as multisets; a lake table is
    compared after its commit. `slot`: as for Refresher.refresh(). Writes what a refresh writes.
    """
    with Refresher(connection) as refresher:
        return verify_with(refresher, name, slot=slot)


def verify_with(refresher: Refresher, name: str, *, slot: bool = False) -> VerifyResult:
    """Refresh a view and, before that is committed, compare its target with its query at the refresh's snapshot.

    A lake table is compared after its commit. A view of a group is refreshed with its group. `slot`: as for
    Refresher.refresh(). PostgreSQL compares both sides as multisets (EXCEPT ALL, both ways). Sums of floats may differ
    by one part in 10^9, since PostgreSQL adds them in no fixed order. Writes what a refresh writes.
    """
    found: list[VerifyResult] = []
    (unit,) = refresh_groups(refresher.control, [name])
    check = {name: lambda work, holder: found.append(compare_with_query(work, holder))}
    refresher.refresh_group(unit, check=check, slot=slot)
    return found[-1]


def compare_with_query(work: ViewRefresh, holder: SnapshotHolder) -> VerifyResult:
    """Compare a refreshed target with its query at the held snapshot; for the argument `check` of a refresh.

    The query's rows are copied into a table beside the target, and compared there.
    """
    if work.lake is not None:
        return _compare_lake(work, holder)
    return VerifyResult(work.view.view_name, *compare_target(work, holder, work.plan.query).counts())


def _compare_lake(work: ViewRefresh, holder: SnapshotHolder) -> VerifyResult:
    """Read both sides into memory with the lake table's types, and count equal rows."""
    from gdq.consumers.lake.types import differing_lake_rows, lake_columns, read_lake_rows  # noqa: PLC0415 (pyarrow is slow to load)

    assert work.lake is not None
    assert work.view.lake is not None
    columns = lake_columns(work.columns, work.view.lake.kind)
    with holder.connection.transaction():
        apply_view_settings(holder.connection, READ_SETTINGS | work.view.settings | IN_ORDER)
        expected = list(read_lake_rows(OwnerSql(holder.connection, work.view.acts_as), work.plan.query, columns))
    rows, lacking, surplus = differing_lake_rows(expected, work.lake.scan(), columns)
    missing, unexpected = rows_unlike(lacking, surplus, float_columns(work, work.types))
    return VerifyResult(work.view.view_name, rows, len(missing), len(unexpected))
