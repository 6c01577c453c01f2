"""The replicas that a target holds, as they are listed: where each stands, and how far it is behind its source."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumer import ConsumerInfo, consumer_info
from gdq.consumers.replica.own_tables import REPLICA_TABLES
from gdq.consumers.replica.state import COPYING, SLOT
from gdq.consumers.views.own_objects import check_own_tables
from gdq.qualified_sql import qualified
from gdq.shown import Shown
from gdq.source import Position
from gdq.sql_text import pinned

# A number of bytes, as an LSN is.
_LOGGED = qualified("""
    select ((case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()
                  else pg_catalog.pg_current_wal_lsn() end) - '0/0'::pg_catalog.pg_lsn)::bigint""")


@dataclass(frozen=True, slots=True, repr=False)
class ReplicaInfo(Shown):
    """One replica of a target, which a queue or a slot feeds (`source`).

    `lag` and `unread_events`: of its consumer, None if the source has no such consumer. If a slot feeds it, `tick` is
    an LSN, and `lag_bytes` what the source has logged since. `state`: `running` while a program applies its changes,
    `stopped`, `paused` by gdq.pause(), or `no consumer`.
    """

    replica_name: str
    queue_name: str
    source: str
    tables: list[str]
    state: str
    tick: int
    updated_at: datetime
    lag: timedelta | None
    unread_events: int | None
    lag_bytes: int | None
    conflicts: int
    dead_letters: int
    skipped_changes: int


def replica_info(source: Connection[Any], target: Connection[Any]) -> list[ReplicaInfo]:
    """The replicas that a target holds, with the lag of their consumers in the source."""
    with pinned(target):
        check_own_tables(target, *REPLICA_TABLES)
    query = qualified(f"""
        select r.name, r.queue, r.position, r.updated_at,
               array(select t.table_name from gdq_target.replica_table t
                      where t.replica = r.name and t.source_oid is not null and not {COPYING} order by 1),
               (select count(*) from gdq_target.replica_conflict c where c.replica = r.name),
               (select count(*) from gdq_target.replica_dead_letter d where d.replica = r.name),
               (select coalesce(sum(s.changes), 0)::bigint from gdq_target.replica_skip s where s.replica = r.name),
               exists (select from pg_catalog.pg_stat_activity a
                        where a.datname = current_database()
                          and a.application_name = left('gdq:' || r.queue || '/' || r.name, 63))
          from gdq_target.replica r order by 1""")
    try:
        found = target.execute(query).fetchall()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return []
    consumers = {(info.queue_name, info.consumer_name): info for info in consumer_info(source)}
    replicas = []
    for name, queue, position, updated_at, tables, conflicts, dead_letters, skipped, connected in found:
        stands = Position.parse(position)
        by_slot = stands.kind == SLOT
        info = None if by_slot else consumers.get((queue, name))
        replicas.append(
            ReplicaInfo(
                replica_name=name,
                queue_name=queue,
                source=stands.kind,
                tables=tables,
                state=_state(info, connected=connected, needs_consumer=not by_slot),
                tick=stands.tick,
                updated_at=updated_at,
                lag=info.lag if info else None,
                unread_events=info.unread_events if info else None,
                lag_bytes=scalar(source, _LOGGED) - stands.tick if by_slot else None,
                conflicts=conflicts,
                dead_letters=dead_letters,
                skipped_changes=skipped,
            )
        )
    return replicas


def _state(consumer: ConsumerInfo | None, *, connected: bool, needs_consumer: bool) -> str:
    """The state of a replica, by its consumer and by whether a program of its name is connected to the target."""
    if consumer is None and needs_consumer:
        return "no consumer"
    if consumer is not None and consumer.paused:
        return "paused"
    return "running" if connected else "stopped"
