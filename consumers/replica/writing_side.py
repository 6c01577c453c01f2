"""Which of the two databases of a switchover takes the application's writes: a row in gdq_target.switchover of each.

Both rows say `target` only while a switch is half done. Then the database that has made fewer turns is the one that is
to take the writes: its row is written last.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import psycopg
from psycopg import Connection
from psycopg.rows import class_row

from gdq.consumers.views.own_objects import check_own_tables
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.sql_text import pinned

Side = Literal["source", "target"]

_CREATE = """
create schema if not exists gdq_target;
create table if not exists gdq_target.switchover (
  replica     pg_catalog.text primary key,
  queue       pg_catalog.text not null,
  side        pg_catalog.text not null,
  turns       pg_catalog.int4 not null,
  other       pg_catalog.text not null,
  changed_at  pg_catalog.timestamptz not null default pg_catalog.now()
)"""


@dataclass(frozen=True, slots=True)
class SwitchoverState:
    """What a database knows of its switchover. `side`: source where the application writes, target on the other one.

    `turns`: the number of switches that it has taken part in. `other`: where the other database is.
    """

    replica: str
    queue: str
    side: Side
    turns: int
    other: str
    changed_at: datetime

    @property
    def since(self) -> str:
        """Since when the application writes where it does, for people."""
        if self.turns == 0:
            return "its switchover is prepared, and no switch was made"
        return f"since the switch of {self.changed_at:%Y-%m-%d %H:%M}"


def read_state(connection: Connection[Any]) -> SwitchoverState | None:
    """What a database knows of its switchover; None if it is prepared for none."""
    with pinned(connection):
        check_own_tables(connection, "switchover")
    query = qualified("select replica, queue, side, turns, other, changed_at from gdq_target.switchover")
    try:
        with connection.transaction(), connection.cursor(row_factory=class_row(SwitchoverState)) as cursor:
            return cursor.execute(query).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return None


def make_state(connection: Connection[Any]) -> None:
    """Make the table of states, in the open transaction, if it is missing."""
    connection.execute("set local client_min_messages = warning")
    connection.execute(_CREATE)
    check_own_tables(connection, "switchover")


def store_state(connection: Connection[Any], queue: str, replica: str, *, side: Side, turns: int, other: str) -> None:
    """Store what a database knows of its switchover, in the open transaction."""
    connection.execute(
        """insert into gdq_target.switchover (replica, queue, side, turns, other) values (%s, %s, %s, %s, %s)
           on conflict (replica) do update set queue = excluded.queue, side = excluded.side, turns = excluded.turns,
             other = excluded.other,
             changed_at = case when switchover.turns operator(pg_catalog.=) excluded.turns then switchover.changed_at
                               else pg_catalog.now() end""",
        [replica, queue, side, turns, other],
    )


def forget_state(connection: Connection[Any]) -> bool:
    """Delete what a database knows of its switchover; False if it knew nothing."""
    return connection.execute("delete from gdq_target.switchover").rowcount > 0


def refuse_source(target: Connection[Any], queue: str, replica: str) -> None:
    """GdqError for a replica's target that takes the application's writes, by what it knows of a switchover."""
    state = read_state(target)
    if state is not None and (state.replica, state.side) == (replica, "source"):
        raise GdqError(
            f"the application writes to this target ({state.since}): it is no replica",
            hint=f"Replicate the other way: gdq replicate {queue} {replica} -d (this target) --to (the other database)",
        )
