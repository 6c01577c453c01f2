"""What a replica's target keeps of it, in schema gdq_target: its position, and at which snapshot each table was copied.

The position moves in the transaction that changes the rows, so it alone says what the target holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.copy.chunk_progress import forget_progress, rename_progress
from gdq.consumers.replica.column_changes import SourceColumns
from gdq.consumers.replica.dead_letters import forget_dead_letters, rename_dead_letters
from gdq.consumers.replica.own_tables import CREATE_TABLES, REPLICA_TABLES
from gdq.consumers.replica.staging_ahead import drop_stages
from gdq.consumers.views.own_objects import check_own_tables
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.source import Position
from gdq.sql_text import pinned

# The kind of positions in a slot; the other kind is the queue.
SLOT = "slot"

# Condition that the row t of replica_table is of a table whose copy is not whole.
COPYING = "coalesce(t.columns #>> '{mark,copying}' = 'yes', false)"


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table of a replica: the snapshot of its copy, and whether the source knows that changes begin there.

    `relid`: the oid of the source's table, by which it is known under any name; None once that was dropped, and the
    target's stays. `columns`: the version of the source's columns that the target's are in line with.
    """

    table_name: str
    relid: int | None
    snapshot: str
    columns: SourceColumns
    handed_over: bool


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """Where a replica's table stands: the replica's position, and the snapshot of the table's copy.

    The later of the two is the state of the source that the table is equal to.
    """

    position: str
    copied: str


@dataclass(slots=True)
class ReplicaState:
    """The stored state of one replica, as read by load() and changed since.

    `tables`: those that were copied. `begun`: those whose copy in chunks is not whole; they may have rows.
    `source`: the origin of the source; `read_from`: what it was at the last start. `two_ways`: the target replicates to
    the source, too.
    """

    connection: Connection[Any]
    queue: str
    name: str
    source: str
    read_from: str = field(default="", init=False)
    two_ways: bool = field(default=False, init=False)
    position: str | None = field(default=None, init=False)
    tables: dict[str, CopiedTable] = field(default_factory=dict, init=False)
    begun: dict[str, CopiedTable] = field(default_factory=dict, init=False)

    @property
    def tick(self) -> int:
        """The tick that the target stands at."""
        return Position.parse(self.position or "").tick

    @property
    def names(self) -> dict[int, str]:
        """The names of the tables that the source has, too, by their oids there."""
        return {table.relid: name for name, table in self.tables.items() if table.relid is not None}

    @property
    def begun_names(self) -> dict[int, str]:
        """As `names`, of the tables whose copy is not whole."""
        return {table.relid: name for name, table in self.begun.items() if table.relid is not None}

    @property
    def copy_name(self) -> str:
        """The name of the replica's copy in chunks."""
        return f"replica {self.name}"

    def known(self, table: str) -> CopiedTable | None:
        """A table that this replica has copied, or has begun to copy."""
        return self.tables.get(table) or self.begun.get(table)

    def load(self) -> None:
        """Make the tables of gdq_target if they are missing, and read this replica's state."""
        if not _exist(self.connection, *REPLICA_TABLES):
            with self.connection.transaction():
                self.connection.execute(
                    "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq target', 0))"
                )
                self.connection.execute("set local client_min_messages = warning")
                self.connection.execute(CREATE_TABLES)
        check_own_tables(self.connection, *REPLICA_TABLES)
        query = qualified("select queue, position, source from gdq_target.replica where name = %s")
        row = self.connection.execute(query, [self.name]).fetchone()
        queue, self.position, self.read_from = row or (self.queue, None, self.source)
        if queue != self.queue:
            raise GdqError(
                f'the target holds a replica "{self.name}" of another queue, "{queue}"', hint="Choose another name."
            )
        query = qualified(
            "select table_name, source_oid, snapshot, columns, handed_over from gdq_target.replica_table "
            "where replica = %s"
        )
        stored = {
            table: CopiedTable(table, relid, snapshot, SourceColumns.stored(columns), handed_over)
            for table, relid, snapshot, columns, handed_over in self.connection.execute(query, [self.name])
        }
        self.begun = {name: table for name, table in stored.items() if table.columns.copying}
        self.tables = {name: table for name, table in stored.items() if name not in self.begun}

    def begin(self, position: str) -> None:
        """Store the position of a replica that has copied nothing yet."""
        self.connection.execute(
            """insert into gdq_target.replica (name, queue, source, position) values (%s, %s, %s, %s)
               on conflict (name) do update set source = excluded.source, position = excluded.position,
                 updated_at = pg_catalog.now()""",
            [self.name, self.queue, self.source, position],
        )
        self.position = position

    def note_source(self) -> None:
        """Store the origin of the source, which an upgrade of its server changes."""
        query = qualified("update gdq_target.replica set source = %s where name = %s and source <> %s")
        self.connection.execute(query, [self.source, self.name, self.source])

    def shared_with(self, table: str) -> str | None:
        """A replica that brings rows of another source to the same table; None where all sides have the same rows."""
        query = qualified("select min(replica) from gdq_target.replica_table where table_name = %s and replica <> %s")
        return None if self.two_ways else scalar(self.connection, query, table, self.name)

    def hold(self) -> None:
        """Lock the position in the open transaction; GdqError if another program has moved it."""
        query = qualified("select position from gdq_target.replica where name = %s for update")
        if scalar(self.connection, query, self.name) != self.position:
            raise GdqError(f'another program has moved replica "{self.name}" meanwhile', hint="Run one at a time.")

    def move(self, position: str) -> None:
        """Store a position in the open transaction, which hold() has begun; note it by moved() after the commit."""
        query = qualified("update gdq_target.replica set position = %s, updated_at = now() where name = %s")
        self.connection.execute(query, [position, self.name], prepare=True)

    def copied(self, table: str, relid: int, snapshot: str, columns: SourceColumns) -> None:
        """Store in the open transaction that the table was copied at a snapshot which the source does not know yet.

        Or that its copy has begun, if `columns` say so.
        """
        self.connection.execute(
            """insert into gdq_target.replica_table (replica, table_name, source_oid, snapshot, columns, handed_over)
               values (%s, %s, %s, %s, %s, false)
               on conflict (replica, table_name) do update set source_oid = excluded.source_oid,
                 snapshot = excluded.snapshot, columns = excluded.columns, handed_over = false,
                 copied_at = pg_catalog.now()""",
            [self.name, table, relid, snapshot, columns.to_store()],
        )
        forget_dead_letters(self.connection, self.name, table)
        if not columns.copying:
            forget_progress(self.connection, self.copy_name, table)
        here, other = (self.begun, self.tables) if columns.copying else (self.tables, self.begun)
        here[table] = CopiedTable(table, relid, snapshot, columns, handed_over=False)
        other.pop(table, None)

    def store_moved(self, table: str, snapshot: str) -> None:
        """Store in the open transaction that changes have brought a table to a snapshot, as if it was copied then."""
        self._set(table, "snapshot = %s, handed_over = false", snapshot)

    def moved(self, table: str, snapshot: str) -> None:
        """As store_moved(), and note it."""
        self.store_moved(table, snapshot)
        self.tables[table] = replace(self.tables[table], snapshot=snapshot, handed_over=False)

    def brought(self, table: str, snapshot: str) -> None:
        """Note what another session has committed by store_moved(), and store in the open transaction that it counts.

        The position that this transaction stores is the same snapshot.
        """
        self.tables[table] = replace(self.tables[table], snapshot=snapshot)
        self.handed_over(table)

    def renamed(self, table: str, name: str) -> None:
        """Store in the open transaction that a table has another name in the target."""
        self._set(table, "table_name = %s", name)
        here = self._home(table)
        here[name] = replace(here.pop(table), table_name=name)
        rename_progress(self.connection, self.copy_name, table, name)
        rename_dead_letters(self.connection, self.name, table, name)

    def left(self, table: str) -> None:
        """Store in the open transaction that the source has the table no longer; its rows stay."""
        self._set(table, "source_oid = null")
        here = self._home(table)
        here[table] = replace(here[table], relid=None)
        forget_progress(self.connection, self.copy_name, table)

    def altered(self, table: str, columns: SourceColumns) -> None:
        """Store in the open transaction that the target's columns are in line with another version of the source's."""
        self._set(table, "columns = %s", columns.to_store())
        self.tables[table] = replace(self.tables[table], columns=columns)

    def handed_over(self, table: str) -> None:
        """Store that the source gives this table's changes from the copy's snapshot on."""
        self._set(table, "handed_over = true")
        self.tables[table] = replace(self.tables[table], handed_over=True)

    def _set(self, table: str, assigned: str, *values: Any) -> None:
        query = qualified(f"update gdq_target.replica_table set {assigned} where (replica, table_name) = (%s, %s)")
        self.connection.execute(query, [*values, self.name, table])

    def forget(self, table: str) -> None:
        """Delete what is stored of a table that the replica takes no longer; its rows stay."""
        query = qualified("delete from gdq_target.replica_table where (replica, table_name) = (%s, %s)")
        self.connection.execute(query, [self.name, table])
        forget_dead_letters(self.connection, self.name, table)
        forget_progress(self.connection, self.copy_name, table)
        del self._home(table)[table]

    def _home(self, table: str) -> dict[str, CopiedTable]:
        return self.begun if table in self.begun else self.tables

    def drop(self) -> bool:
        """Delete what is stored of the replica, in the open transaction; False if nothing was. Its tables stay."""
        forget_progress(self.connection, self.copy_name)
        drop_stages(self.connection)
        for query in (
            "delete from gdq_target.replica_table where replica = %s",
            "delete from gdq_target.replica_conflict where replica = %s",
            "delete from gdq_target.replica_dead_letter where replica = %s",
            "delete from gdq_target.replica_skip where replica = %s",
            "delete from gdq_target.replica_definition where replica = %s",
            "delete from gdq_target.replica where name = %s",
        ):
            known = self.connection.execute(qualified(query), [self.name]).rowcount
        return known > 0


def check_replica(target: Connection[Any], name: str | None) -> None:
    """GdqError if the target holds no replica of a name, or if its tables of gdq_target are not gdq's own."""
    with pinned(target):
        check_own_tables(target, *REPLICA_TABLES)
    known = qualified("select count(*) from gdq_target.replica where name = %s")
    if name is not None and read_own(target, known, name) in (None, (0,)):
        raise no_replica(name)


def stored_position(
    target: Connection[Any], queue: str, name: str, table: str, *, locked: bool = False
) -> StoredPosition:
    """Where a table of a replica stands, as the open transaction of the target sees it.

    GdqError if the target holds no such replica, or no copy of the table. `locked`: no batch is applied until the
    transaction ends; needs READ COMMITTED.
    """
    check_own_tables(target, "replica", "replica_table")
    for_update = "for update of r" if locked else ""
    query = qualified(
        f"""select r.position, case when not {COPYING} then t.snapshot end from gdq_target.replica r
              left join gdq_target.replica_table t on t.replica = r.name and t.table_name = %s
             where r.name = %s and r.queue = %s {for_update}"""
    )
    row = read_own(target, query, table, name, queue)
    if row is None:
        raise no_replica(name, queue)
    if Position.parse(row[0]).kind == SLOT:
        raise GdqError(
            f'replica "{name}" is fed by a slot, which has no log of changes to compare it by',
            hint="Compare the two databases: leave QUEUE and REPLICA out, and name the tables by --tables.",
        )
    if row[1] is None:
        raise GdqError(f'replica "{name}" has not copied table {table} yet', hint=f"gdq replicate {queue} {name} ...")
    return StoredPosition(*row)


def read_own(target: Connection[Any], query: str, *values: Any) -> Any:
    """The first row that a query finds in the tables of gdq_target; None without one, or without these tables."""
    try:
        with target.transaction():
            return target.execute(query, values).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return None


def _exist(target: Connection[Any], *names: str) -> bool:
    """True if all these tables of gdq_target exist."""
    query = qualified("select bool_and(to_regclass('gdq_target.' || n) is not null) from unnest(%s::text[]) n")
    return bool(scalar(target, query, list(names)))


def no_replica(name: str, queue: str | None = None) -> GdqError:
    of_queue = "" if queue is None else f" of queue {queue}"
    return GdqError(f'the target holds no replica "{name}"{of_queue}', hint="gdq replicas lists those that it holds.")
