"""What the log has of a mirror's tables between two snapshots: rows, the last TRUNCATE, and what asks for a copy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.replica.source_tables import SourceTable
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.errors import TruncatedPosition, mapped_errors
from gdq.qualified_sql import qualified
from gdq.source import Position

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

_TICKS = qualified("""
select p.position
  from (select %s::text as queue) q, generate_series(%s::int8, %s::int8) t,
       lateral (select gdq.tick_position(q.queue, t) offset 0) p(position)
 where p.position is not null order by t""")

_LOG_SETTINGS = "set local enable_seqscan = off; set local max_parallel_workers_per_gather = 0"


class CopyAgain(Exception):  # noqa: N818 (a signal)
    """These tables have to be copied before a batch can be applied."""

    def __init__(self, *tables: str) -> None:
        super().__init__(*tables)
        self.tables = set(tables)


@dataclass(frozen=True, slots=True)
class TableLog:
    """What the log has of a table between two snapshots: the SELECT of its rows, and the numbers of TRUNCATEs.

    `tick_from`: the tick that the lake table stands at; `tick_to`: that of the end.
    """

    table: SourceTable
    select: str
    truncates: tuple[int, ...]
    since: str
    till: str
    tick_from: int
    tick_to: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick of the queue, and what it sees."""

    number: int
    snapshot: PgSnapshot


@dataclass(slots=True)
class TableEvents:
    """What a table has besides rows: the numbers of TRUNCATEs, and what no row tells, which asks for a copy."""

    truncates: list[int] = field(default_factory=list)
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
                events.truncates.append(ev_id)
            elif kind == "truncate":
                events.stale = "a partition was truncated"
            elif kind != "ddl":
                events.stale = str(data.get("reason") or "a gap in its capture")
            elif "options" in data:
                events.stale = "it is captured otherwise"
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


def ticks_of(source: Connection[Any], queue: str, log: TableLog) -> list[Tick]:
    """The ticks up to the end of a table's log, in order; the last one is that of the end.

    Left out are those of copies and refreshes that were noted after a later one.
    """
    found: list[Tick] = []
    for position, *_ in source.execute(_TICKS, [queue, log.tick_from + 1, log.tick_to]).fetchall():
        known = Position.parse(position)
        tick = Tick(known.tick, PgSnapshot.parse(known.snapshot))
        if not found or tick.snapshot.covers(found[-1].snapshot):
            found.append(tick)
    end = PgSnapshot.parse(log.till)
    numbered = [tick for tick in found if end.covers(tick.snapshot) and tick.number < log.tick_to]
    return [*numbered, Tick(max(log.tick_from, log.tick_to), end)]


def truncate_tick(source: Connection[Any], queue: str, log: TableLog, ticks: Sequence[Tick], event: int) -> int:
    """The number of the first tick that sees a TRUNCATE."""
    since = PgSnapshot.parse(log.since)
    for tick in ticks:
        if tick.snapshot.covers(since):
            events = table_events(source, queue, [log.table], log.since, tick.snapshot.text).get(log.table.relid)
            if events is not None and event in events.truncates:
                return tick.number
    return ticks[-1].number
