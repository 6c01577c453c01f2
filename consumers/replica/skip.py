"""Changes that a replica passes over: counted by table, noted in the target, and left out by its position."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import rows, scalar
from gdq.consumers.replica.state import ReplicaState, check_replica
from gdq.errors import GdqError, mapped_errors
from gdq.qualified_sql import qualified
from gdq.shown import Shown
from gdq.source import Position
from gdq.sql_text import raw

# Changes of tables that rows do not show: TRUNCATE, DDL, gaps of capture.
_EVENTS = """
select e.tbl, array_agg(distinct e.kind order by e.kind)
  from gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot) e
 where e.kind <> 'message' and e.ev_id is not null group by 1"""

_NOTE = """
insert into gdq_target.replica_skip (replica, table_name, changes, events, tick_from, tick_to)
values (%s, %s, %s, %s, %s, %s)"""


@dataclass(frozen=True, slots=True, repr=False)
class SkipInfo(Shown):
    """What a replica has left out of a table between two ticks: rows of the log, and kinds of events beside them."""

    skip_id: int
    replica_name: str
    table_name: str
    changes: int
    events: list[str]
    tick_from: int
    tick_to: int
    skipped_at: datetime


def skip_changes(source: Connection[Any], state: ReplicaState, tick: int) -> list[SkipInfo]:
    """Move a replica's position in the target to a tick, and note what lies between; the notes.

    GdqError if the queue has no such tick, or the replica stands there or later. The consumer is moved by the caller.
    """
    if tick <= state.tick:
        raise GdqError(
            f'replica "{state.name}" stands at tick {state.tick}, which is not before tick {tick}',
            hint="The error that stops gdq replicate names the tick to skip to.",
        )
    position = scalar(source, "select gdq.tick_position(%s, %s)", state.queue, tick)
    if position is None:
        raise GdqError(f"queue {state.queue} has no tick {tick}")
    started = state.tick
    with source.transaction(), mapped_errors():
        source.execute("set transaction isolation level repeatable read")
        left_out = _left_out(source, state, position)
    with state.connection.transaction():
        state.hold()
        for table, (changes, events) in sorted(left_out.items()):
            state.connection.execute(_NOTE, [state.name, table, changes, events, started, tick])
        state.move(position)
    state.position = position
    return [note for note in skip_info(state.connection, state.name) if note.tick_to == tick]


def skip_info(target: Connection[Any], replica: str | None = None) -> list[SkipInfo]:
    """What a replica has skipped, or all replicas of the target, oldest first.

    GdqError if the target holds no replica of this name.
    """
    check_replica(target, replica)
    query = qualified("""
        select skip_id, replica as replica_name, table_name, changes, events, tick_from, tick_to, skipped_at
          from gdq_target.replica_skip where replica = coalesce(%s, replica) order by skip_id""")
    try:
        return rows(target, SkipInfo, query, replica)
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return []


def _left_out(source: Connection[Any], state: ReplicaState, position: str) -> dict[str, tuple[int, list[str]]]:
    """The number of changes and the kinds of events of each table between the target's position and a later one."""
    since, till = Position.parse(state.position or "").snapshot, Position.parse(position).snapshot
    events: dict[str, list[str]] = dict(source.execute(_EVENTS, [state.queue, since, till]).fetchall())
    found = {}
    for relid, name in state.names.items():
        table = state.tables[name]
        # a copy may be later than the position, and has what was changed before it
        begin = later_snapshot(since, table.snapshot)
        changes = 0
        if _age(begin) < _age(till):
            query = "select gdq.delta_sql(%s, %s::regclass, %s::pg_snapshot, %s::pg_snapshot, null)"
            log_rows = scalar(source, query, state.queue, str(relid), begin, till)
            changes = scalar(source, raw(f"select count(*) from ({log_rows}) d"))
        if changes or name in events:
            found[name] = (int(changes), events.get(name, []))
    return found


def later_snapshot(one: str, other: str) -> str:
    """The later one of two snapshots of one server."""
    return max(one, other, key=_age)


def _age(snapshot: str) -> tuple[int, int]:
    """What puts the snapshots of one server in order."""
    xmin, xmax, _ = snapshot.split(":")
    return int(xmax), int(xmin)
