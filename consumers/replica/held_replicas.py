"""What a replica's target tells of a replica, without its state: its tables, and what feeds it."""

from __future__ import annotations

from typing import Any

from psycopg import Connection

from gdq.consumers.replica.state import COPYING, SLOT, no_replica, read_own
from gdq.consumers.views.own_objects import check_own_tables
from gdq.qualified_sql import qualified
from gdq.source import Position
from gdq.sql_text import pinned


def is_fed_by_slot(target: Connection[Any], name: str) -> bool:
    """True if a target holds a replica of this name that a logical slot feeds."""
    check_own_tables(target, "replica")
    found = read_own(target, qualified("select position from gdq_target.replica where name = %s"), name)
    return found is not None and Position.parse(found[0]).kind == SLOT


def replica_tables(target: Connection[Any], queue: str, name: str) -> list[str]:
    """The tables that a replica has copied; GdqError if the target holds no such replica."""
    with pinned(target):
        check_own_tables(target, "replica", "replica_table")
    query = qualified(f"""
        select array(select t.table_name from gdq_target.replica_table t
                      where t.replica = r.name and t.source_oid is not null and not {COPYING} order by 1)
          from gdq_target.replica r where r.name = %s and r.queue = %s""")
    found = read_own(target, query, name, queue)
    if found is None:
        raise no_replica(name, queue)
    tables: list[str] = found[0]
    return tables
