"""Engines: the protocol of a refresh engine, its task, the phases it reports, and the effort for a view's history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from psycopg import Connection

from gdq.consumers.views.change_source import LogColumn
from gdq.consumers.views.difference import KeySet
from gdq.consumers.views.progress import Progress
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.consumers.views.target import StoredPosition, TargetColumn
from gdq.view.view import ViewInfo

if TYPE_CHECKING:
    from gdq.plan.postgres import PostgresPlan
    from gdq.view.view import Plan

EffortKind = Literal["none", "incremental", "by-key", "full"]

# The counters behind pg_stat_xact_all_tables, for given tables with their partitions.
ROWS_READ_SQL = """
select coalesce(sum(pg_catalog.pg_stat_get_xact_tuples_returned(t.oid)
                    + pg_catalog.pg_stat_get_xact_tuples_fetched(t.oid)
                    + (select coalesce(sum(pg_catalog.pg_stat_get_xact_tuples_fetched(i.indexrelid)), 0)
                         from pg_catalog.pg_index i where i.indrelid = t.oid)), 0)::bigint
  from (select n::pg_catalog.regclass::oid as oid from pg_catalog.unnest(%s::text[]) n
        union select p.relid from pg_catalog.unnest(%s::text[]) n,
                                  pg_catalog.pg_partition_tree(n::pg_catalog.regclass) p) t"""


@dataclass(frozen=True, slots=True)
class EngineTask:
    """One refresh of one view, described for its engine.

    `columns`: name, type oid and type of each view column. `choose` gets the number of netted changes and raises
    NeedsFull if a full load is expected to cost less. `tell`: its progress. `write` creates the relations that the
    SELECTs of log rows read. `grouped`: the target's transaction serves several views. `joined`: an earlier view of the
    group, computed in that transaction, has given it the held snapshot. `audited`: an audit follows in the transaction.
    `few`: one statement may serve few changes. `log_columns` gives the logged columns of tables, by their names.
    """

    view: ViewInfo
    plan: Plan
    columns: Sequence[tuple[str, int, str]]
    holder: SnapshotHolder
    choose: Callable[[int], None]
    tell: Progress
    write: Callable[[Connection[Any]], None]
    log_columns: Callable[[Sequence[str]], Mapping[str, Sequence[LogColumn]]]
    grouped: bool = False
    joined: bool = False
    audited: bool = False
    few: bool = False


@dataclass(frozen=True, slots=True)
class EngineEffort:
    """The work of one refresh: the way of computing, the netted changes used, and the rows read from tables."""

    kind: EffortKind
    delta_rows: int | None = None
    rows_read: int | None = None


def rows_read(connection: Connection[Any], tables: Sequence[str]) -> int:
    """Rows of these tables that this session has read, perhaps also in earlier transactions."""
    row = connection.execute(ROWS_READ_SQL, [tables, tables], prepare=True).fetchone()
    return int(row[0]) if row else 0


class NettedChanges(Protocol):
    """What the session that computed a refresh still holds: the changes of the tables and of the view, netted.

    `made`: its temporary tables. `replaced`: the keys of the view's rows that were replaced. `types`: the view's
    columns.
    """

    connection: Connection[Any]
    plan: PostgresPlan
    types: Sequence[TargetColumn]
    made: list[str]
    replaced: tuple[KeySet, ...]


class Engine(Protocol):
    """An engine computes the changes of a view in one refresh and applies them to the target.

    `s0`: the snapshot of the target's rows, None in a full load. `changed`: the tables changed since s0, each with the
    SELECT of its log rows. `computation`: what still holds the netted changes, for an audit.
    """

    @property
    def computation(self) -> NettedChanges | None: ...

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Compute without touching the target; NeedsFull if the recorded changes are not enough."""

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:
        """Change the target in its connection's open transaction; returns the rows deleted plus the rows inserted."""

    def effort(self) -> EngineEffort:
        """The work of the refresh; call it before the transaction ends."""


@runtime_checkable
class CommittingEngine(Protocol):
    """An engine whose target, a lake table, takes rows and position in one commit of its own.

    `computation`: as for Engine.
    """

    @property
    def computation(self) -> NettedChanges | None: ...

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """As Engine.compute()."""

    def commit(self, stored: StoredPosition | None, new: StoredPosition) -> int:
        """Change the target and its position in one commit; returns the rows deleted plus the rows inserted.

        RefreshConflict unless the position is still `stored`, Diverged if the rows do not match that position.
        """

    def effort(self) -> EngineEffort:
        """As Engine.effort()."""
