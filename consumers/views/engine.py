"""Engines: the protocol of a refresh engine, its task, the phases it reports, and the effort for a view's history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from psycopg import Connection

from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.consumers.views.target import StoredPosition
from gdq.view.view import ViewInfo

if TYPE_CHECKING:
    from gdq.view.view import Plan

Kind = Literal["none", "incremental", "by-key", "full"]

# The phases of a refresh. A full load in the database of the tables computes and writes in one statement: writing.
Phase = Literal["netting", "computing", "writing"]

# Called with the phase that a refresh has come to, and with the number of rows written so far where these pass through
# this process.
Tell = Callable[[Phase, int], None]


# What pg_stat_xact_all_tables shows, of some tables with their partitions.
ROWS_READ = """
select coalesce(sum(pg_catalog.pg_stat_get_xact_tuples_returned(t.oid)
                    + pg_catalog.pg_stat_get_xact_tuples_fetched(t.oid)
                    + (select coalesce(sum(pg_catalog.pg_stat_get_xact_tuples_fetched(i.indexrelid)), 0)
                         from pg_catalog.pg_index i where i.indrelid = t.oid)), 0)::bigint
  from (select n::pg_catalog.regclass::oid as oid from pg_catalog.unnest(%s::text[]) n
        union select p.relid from pg_catalog.unnest(%s::text[]) n,
                                  pg_catalog.pg_partition_tree(n::pg_catalog.regclass) p) t"""


@dataclass(frozen=True, slots=True)
class Task:
    """One refresh of one view, as its engine needs to know it.

    `columns`: name, type oid and type of each column of the view. `choose`: called with the number of netted changes;
    raises NeedsFull where a full load is expected to cost less. `tell`: reports a phase. `write`: makes the relations
    that the SELECTs of log rows read. `grouped`: the target's transaction belongs to several views. `joined`: an
    earlier view of the group has given that transaction the held snapshot.
    """

    view: ViewInfo
    plan: Plan
    columns: Sequence[tuple[str, int, str]]
    holder: SnapshotHolder
    choose: Callable[[int], None]
    tell: Tell
    write: Callable[[Connection[Any]], None]
    grouped: bool = False
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Effort:
    """The work of one refresh: what was computed, the netted changes used, and the rows of tables read for them."""

    kind: Kind
    delta_rows: int | None = None
    rows_read: int | None = None


def rows_read(connection: Connection[Any], tables: Sequence[str]) -> int:
    """Rows of these tables that this session has read; it may hold those of transactions before this one."""
    row = connection.execute(ROWS_READ, [tables, tables], prepare=True).fetchone()
    return int(row[0]) if row else 0


class Engine(Protocol):
    """An engine computes what a refresh changes in a view, and changes the target.

    `s0`: the snapshot that the target stands for, None in a full load; `changed`: the tables that changed since, and
    the SELECTs of their log rows.
    """

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Do what takes long and leaves the target alone. NeedsFull when the recorded changes are not enough."""

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:
        """Change the target in the open transaction of its connection; the rows deleted plus the rows inserted."""

    def effort(self) -> Effort:
        """The work of the refresh, asked within its transaction."""


@runtime_checkable
class Committing(Protocol):
    """An engine whose target takes rows and position in one commit of its own: a lake table."""

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """As Engine.compute()."""

    def commit(self, stored: StoredPosition | None, new: StoredPosition) -> int:
        """Change the target and move its position in one commit; the rows deleted and inserted.

        RefreshConflict unless the position is still `stored`, Diverged when the rows are not those of that position.
        """

    def effort(self) -> Effort:
        """The work of the refresh, asked within its transaction."""
