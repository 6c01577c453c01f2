"""What does the work of a refresh, what it is at, and what that work was, as the history of a view shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from psycopg import Connection
from psycopg.rows import scalar_row

from gdq.consumers.views.target import StoredPosition

Kind = Literal["none", "incremental", "by-key", "full"]

# What a refresh is at. A full load in the database of the tables computes and writes in one statement: writing.
Phase = Literal["netting", "computing", "writing"]

# Told when a refresh comes to a phase, and in the last one of the rows that have been written so far, where these pass
# through this process: phase, rows.
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


def tell_nobody(_phase: Phase, _rows: int) -> None:
    """For a refresh that nobody watches."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What a refresh computed, of how many netted changes, and how many rows of the tables it read for that."""

    kind: Kind
    delta_rows: int | None = None
    rows_read: int | None = None


def rows_read(connection: Connection[Any], tables: Sequence[str]) -> int:
    """Rows of these tables that this session has read; it may hold those of transactions before this one."""
    with connection.cursor(row_factory=scalar_row) as cursor:
        return int(cursor.execute(ROWS_READ, [tables, tables], prepare=True).fetchone() or 0)


class Engine(Protocol):
    """What computes the rows of a view and brings them into the target.

    `s0`: the snapshot that the target stands for, None in a full load; `changed`: the tables that changed since, and
    the SELECTs of their log rows.
    """

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """What takes long and does not touch the target. NeedsFull when the changes do not do."""

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:
        """Change the target in the transaction that its connection is in; the rows deleted plus the rows inserted."""

    def effort(self) -> Effort:
        """What the refresh at hand took, asked in its transaction."""


@runtime_checkable
class Committing(Protocol):
    """An engine whose target takes the rows and the position in a commit of its own."""

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """As of an Engine."""

    def commit(self, stored: StoredPosition | None, new: StoredPosition) -> int:
        """Change the target and move its position in one commit; the rows deleted and inserted.

        RefreshConflict unless the position is still `stored`, Diverged when the rows are not those of that position.
        """

    def effort(self) -> Effort:
        """What the refresh at hand took, asked in its transaction."""
