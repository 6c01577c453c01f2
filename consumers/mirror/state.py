"""What the source keeps of a mirror, in gdq_target.mirror: its target, its form, and where its lake tables stood.

The position of a lake table stands in the lake, in the commit that wrote the rows. A table without changes gets no
commit, so that its position stays behind while the consumer goes on. That it has nothing to catch up with is what the
note here says, which is written in the transaction that moves the consumer: up to `tick` each table had all changes
at the position that is noted for it. A table at another position than that one, or a consumer that does not stand at
`tick`, was moved by somebody else, and each table then goes on from its own position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from psycopg import Connection
from psycopg.types.json import Jsonb

from gdq.call import scalar
from gdq.consumers.replica.origin import origin_of
from gdq.consumers.views.own_objects import check_own_tables
from gdq.consumers.views.target import grant_own_table
from gdq.errors import GdqError

# What a lake table is that keeps what has been: the change feed of its table, or the versions of its rows.
History = Literal["feed", "scd2"]

_CREATE = """
create table if not exists gdq_target.mirror (
  name        pg_catalog.text primary key,
  queue       pg_catalog.text not null,
  target      pg_catalog.text not null,
  history     pg_catalog.text,
  tick        pg_catalog.int8,
  positions   pg_catalog.jsonb not null,
  updated_at  pg_catalog.timestamptz not null default pg_catalog.now()
)"""


@dataclass(slots=True)
class MirrorState:
    """The note of one mirror, as read by load() and changed since. `tick` is None until the first batch."""

    connection: Connection[Any]
    queue: str
    name: str
    target: str | None = field(default=None, init=False)
    history: History | None = field(default=None, init=False)
    tick: int | None = field(default=None, init=False)
    positions: dict[str, str] = field(default_factory=dict, init=False)

    def load(self) -> bool:
        """Read the note; False if there is no such mirror. GdqError if it is of another queue."""
        if not has_mirrors(self.connection):
            return False
        query = (
            "select queue, target, history, tick, positions from gdq_target.mirror where name operator(pg_catalog.=) %s"
        )
        row = self.connection.execute(query, [self.name]).fetchone()
        if row is None:
            return False
        queue, self.target, self.history, self.tick, self.positions = row
        if queue != self.queue:
            raise GdqError(f'mirror "{self.name}" is of another queue, "{queue}"', hint="Choose another --name.")
        return True

    def begin(self, target: str, history: History | None) -> None:
        """Note that the mirror exists, in the open transaction, which registers its consumer."""
        if not has_mirrors(self.connection):
            self.connection.execute(
                "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq target', 0))"
            )
            self.connection.execute("set local client_min_messages = warning")
            self.connection.execute("create schema if not exists gdq_target")
            self.connection.execute(_CREATE)
            grant_own_table(self.connection, "mirror")
            check_own_tables(self.connection, "mirror", in_source=True)
        self.connection.execute(
            """insert into gdq_target.mirror (name, queue, target, history, positions) values (%s, %s, %s, %s, '{}')
               on conflict (name) do update set tick = null, positions = '{}'""",
            [self.name, self.queue, target, history],
        )
        self.target, self.history, self.tick, self.positions = target, history, None, {}

    def note(self, tick: int, positions: dict[str, str]) -> None:
        """Note where the tables stand at the end of a batch, in the batch's transaction."""
        self.connection.execute(
            """update gdq_target.mirror set tick = %s, positions = %s, updated_at = pg_catalog.now()
                where name operator(pg_catalog.=) %s""",
            [tick, Jsonb(positions), self.name],
        )
        self.tick, self.positions = tick, positions

    def drop(self) -> None:
        """Delete the note."""
        self.connection.execute("delete from gdq_target.mirror where name operator(pg_catalog.=) %s", [self.name])


def mirror_mark(connection: Connection[Any], queue: str, name: str) -> str:
    """What a mirror's lake tables know it by."""
    return f"{origin_of(connection)}/{queue}/{name}"


def has_mirrors(connection: Connection[Any]) -> bool:
    """True if the database has the table of mirrors; GdqError if it is not as gdq makes it."""
    if scalar(connection, "select pg_catalog.to_regclass('gdq_target.mirror') is null"):
        return False
    check_own_tables(connection, "mirror", in_source=True)
    return True
