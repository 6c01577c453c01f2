"""What the log has of a mirror's tables between two snapshots: rows, the last TRUNCATE, and what asks for a copy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.replica.source_tables import SourceTable
from gdq.errors import TruncatedPosition, mapped_errors
from gdq.qualified_sql import qualified

_ANY_EVENT = """
select exists (select from gdq.delta_events(%s, %s::pg_catalog.pg_snapshot, %s::pg_catalog.pg_snapshot,
                                            %s::pg_catalog.oid[]::pg_catalog.regclass[]) e
                where e.kind <> 'message' and e.ev_id is not null)"""

# An event without a number says that capture is off: the gap comes later.
_EVENTS = qualified("""
select t.relid::bigint, e.ev_id, e.kind, coalesce(e.data, '{}')
  from unnest(%s::oid[]) t(relid),
       gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot, array[t.relid::regclass]) e
 where e.kind <> 'message' and e.ev_id is not null order by e.ev_id""")

_LOG_ROWS = qualified("""
select gdq.delta_sql(%(queue)s, %(relid)s::oid::regclass, %(since)s::pg_snapshot, %(till)s::pg_snapshot)""")

_LOG_SETTINGS = "set local enable_seqscan = off; set local max_parallel_workers_per_gather = 0"


class CopyAgain(Exception):  # noqa: N818 (a signal)
    """These tables have to be copied before a batch can be applied."""

    def __init__(self, *tables: str) -> None:
        super().__init__(*tables)
        self.tables = set(tables)


@dataclass(slots=True)
class TableEvents:
    """What a table has besides rows: the number of its last TRUNCATE, and what no row tells, which asks for a copy."""

    truncated: int | None = None
    stale: str | None = None


def table_events(
    source: Connection[Any], queue: str, tables: Collection[SourceTable], since: str, till: str
) -> dict[int, TableEvents]:
    """The events of tables between two snapshots, by the tables' oids; TruncatedPosition if they may be gone."""
    relids = [table.relid for table in tables]
    found: dict[int, TableEvents] = {}
    with mapped_errors():
        if not relids or not scalar(source, _ANY_EVENT, queue, since, till, relids):
            return found
        for relid, ev_id, kind, data in source.execute(_EVENTS, [relids, queue, since, till]).fetchall():
            events = found.setdefault(relid, TableEvents())
            if kind == "truncate" and "partition" not in data:
                events.truncated = ev_id
            elif kind == "truncate":
                events.stale = "a partition was truncated"
            elif kind != "ddl":
                events.stale = str(data.get("reason") or "a gap in its capture")
            elif data.keys() & {"options", "new_version"}:
                events.stale = "DDL"
    return found


def log_rows(source: Connection[Any], queue: str, table: SourceTable, since: str, till: str) -> str:
    """The SELECT of a table's log rows between two snapshots, in the open transaction.

    CopyAgain if changes are gone, or if DDL changed the type of a column among them.
    """
    source.execute(_LOG_SETTINGS)
    values = {"queue": queue, "relid": table.relid, "since": since, "till": till}
    try:
        with mapped_errors():
            row = source.execute(_LOG_ROWS, values).fetchone()
    except (TruncatedPosition, psycopg.errors.ObjectNotInPrerequisiteState) as error:
        raise CopyAgain(table.table_name) from error
    assert row is not None
    return str(row[0])
