"""The target of a view in PostgreSQL: its table and rows, the position that moves with them, and its staging tables.

Everything here runs in the target's database, on a connection whose transaction belongs to the caller.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

import psycopg
from psycopg import Connection

from gdq.call import rows, scalar
from gdq.consumers.views.optional_index import try_index
from gdq.consumers.views.own_objects import check_own_tables, check_tables_of_session
from gdq.errors import ForeignTarget, GdqError, RefreshConflict
from gdq.owner_sql import OwnerSql
from gdq.qualified_sql import qualified
from gdq.sql_text import literal, pin_transaction, quote, raw
from gdq.typed.pgtypes import FIRST_USER_OID

_CREATE_POSITION = """
create table if not exists gdq_target.position (
  view        pg_catalog.text primary key,
  source      pg_catalog.text not null,
  target      pg_catalog.text not null,
  plan        pg_catalog.text not null,
  position    pg_catalog.text not null,
  updated_at  pg_catalog.timestamptz not null default pg_catalog.now()
)"""


# Whoever refreshes first makes the table; the owner of gdq and all administrators may refresh.
_REFRESHERS = """
select pg_catalog.quote_ident(r.rolname) from pg_catalog.pg_roles r
 where r.rolname operator(pg_catalog.=) 'gdq_admin'
    or r.oid operator(pg_catalog.=) any (select n.nspowner from pg_catalog.pg_namespace n
                                          where n.nspname operator(pg_catalog.=) 'gdq')"""
_GRANT = """
grant usage, create on schema gdq_target to ROLE;
grant select, insert, update, delete on gdq_target.TABLE to ROLE"""

# A plan's fingerprint, then the number of the target's file: a TRUNCATE gives the table another file.
_PLAN_AND_FILE = (
    "pg_catalog.concat_ws('/', %s::pg_catalog.text, "
    "pg_catalog.pg_relation_filenode(pg_catalog.to_regclass(%s))::pg_catalog.text)"
)


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """The position of a target's rows: the view's `source`, the fingerprint of its `plan`, and the position in text.

    In PostgreSQL the number of the target's file follows the fingerprint.
    """

    source: str
    target: str
    plan: str
    position: str

    @property
    def text(self) -> str:
        """The position as text, for the commit of a lake table."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The position from its `text`."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class TargetState:
    """State of a target: its position (None before the first load) and a foreign change of its rows.

    A stored position whose text is empty is lost. `gone`: the target is missing although it was filled. `plan`: the
    fingerprint of the plan alone.
    """

    stored: StoredPosition | None
    foreign: str | None = None
    gone: bool = False
    plan: str = ""


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of the view and its type in the target."""

    name: str
    type: str


def target_types(columns: Sequence[tuple[str, int, str]], *, same_database: bool) -> tuple[TargetColumn, ...]:
    """Types of the target's columns for (name, type oid, type) of the view's."""
    return tuple(
        TargetColumn(name, kind if same_database or not text_elsewhere(oid, kind) else "text")
        for name, oid, kind in columns
    )


def grant_own_table(connection: Connection[Any], name: str) -> None:
    """Let the owner of gdq and all administrators use a table of gdq_target in the source's own database."""
    for (role,) in connection.execute(_REFRESHERS).fetchall():
        connection.execute(raw(_GRANT.replace("ROLE", role).replace("TABLE", name)))


def text_elsewhere(oid: int, kind: str) -> bool:
    """True for types that a target in another database keeps as text: user types, regclass and the other reg types."""
    return oid >= FIRST_USER_OID or kind.startswith("reg")


@dataclass(frozen=True, slots=True)
class Target:
    """The target table of one view. `table`: its quoted, qualified name; `source`: the view's unique mark.

    `in_source`: the table is in the source's own database. `owner`: the role that the view's code runs as, if it is not
    the session's.
    """

    view: str
    source: str
    table: str
    in_source: bool = True
    owner: str | None = None

    @property
    def state(self) -> str:
        """Name of the private table beside the target that keeps counts and sums."""
        return self._beside("gdq_state_")

    @property
    def key_index(self) -> str:
        """Name of the index on the columns by which rows of the target are found."""
        return self._beside("gdq_key_")

    @property
    def comment(self) -> str:
        """The comment that marks a table as this view's target."""
        return f"gdq: target of view {self.view}, {self.source}"

    def _beside(self, prefix: str) -> str:
        schema = self.table[: self.table.index('".') + 1]
        return f"{schema}.{quote(prefix + self._mark)}"

    @property
    def _mark(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()[:12]

    def function(self, task: str) -> str:
        """Name of the function of the view for this task, which CALL gdq.refresh() runs."""
        return f"gdq_target.{quote(f'{task}_{self._mark}')}"

    @property
    def functions(self) -> list[str]:
        """The names of all functions of the view."""
        return [self.function(task) for task in ("refresh", "load", "look")]

    def stage(self, attempt: str) -> str:
        """Name of one refresh's staging table; it contains the view's mark."""
        return f"gdq_target.{quote(f'stage_{self._mark}_{attempt}')}"

    def prepare(self, connection: Connection[Any]) -> None:
        """Create schema gdq_target and its position table if they are missing."""
        if scalar(connection, "select pg_catalog.to_regclass('gdq_target.position')") is not None:
            return
        connection.execute("select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq target', 0))")
        connection.execute("create schema if not exists gdq_target")
        connection.execute(_CREATE_POSITION)
        if self.in_source:
            grant_own_table(connection, "position")
        check_own_tables(connection, "position", in_source=self.in_source)

    def look(self, connection: Connection[Any], name: str) -> tuple[StoredPosition | None, bool, str | None]:
        """The stored position, True if the target table exists, and its file; on an idle autocommit connection.

        Sets the session's application_name to `name`. GdqError as position() and exists().
        """
        query = """select pg_catalog.set_config('application_name', %s, false), p.source, p.target, p.plan, p.position,
                          c.oid is not null, pg_catalog.obj_description(c.oid, 'pg_class'),
                          pg_catalog.pg_relation_filenode(c.oid)::pg_catalog.text
                     from (select) as one
                     left join gdq_target.position p on p.view operator(pg_catalog.=) %s
                     left join pg_catalog.pg_class c on c.oid operator(pg_catalog.=) pg_catalog.to_regclass(%s)"""
        check_own_tables(connection, "position", in_source=self.in_source)
        try:
            row = connection.execute(query, [name, self.view, self.table], prepare=True).fetchone()
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            with connection.transaction():
                self.prepare(connection)
            row = connection.execute(query, [name, self.view, self.table]).fetchone()
        if row is None:
            return None, False, None
        _, *stored, there, comment, file = row
        found = self._own(StoredPosition(*stored)) if stored[0] is not None else None
        return found, there and self._is_own(comment), file

    def position(self, connection: Connection[Any], *, lock: bool = False) -> StoredPosition | None:
        """The stored position, None before the first load; GdqError if it belongs to another view of this name."""
        query = qualified("select source, target, plan, position from gdq_target.position where view = %s")
        stored = rows(connection, StoredPosition, query + (" for update" if lock else ""), self.view)
        return self._own(stored[0]) if stored else None

    def _own(self, stored: StoredPosition) -> StoredPosition:
        if stored.source != self.source:
            raise GdqError(
                f'the target database holds a view "{self.view}" of another origin, in {stored.target}',
                hint="Give this view another name; or, if the other is gone, delete its row from gdq_target.position.",
            )
        return stored

    def move(self, connection: Connection[Any], before: StoredPosition | None, plan: str, position: str) -> None:
        """Store a position and the plan's fingerprint; RefreshConflict unless the stored one is still `before`."""
        if before is not None:
            moved = connection.execute(
                qualified(f"""update gdq_target.position
                      set target = %s, plan = {_PLAN_AND_FILE}, position = %s, updated_at = pg_catalog.now()
                    where (view, source, target, plan, position) = (%s, %s, %s, %s, %s)"""),
                [
                    self.table,
                    plan,
                    self.table,
                    position,
                    self.view,
                    before.source,
                    before.target,
                    before.plan,
                    before.position,
                ],
                prepare=True,
            ).rowcount
            if moved == 1:
                return
        connection.execute(
            qualified("select pg_advisory_xact_lock(hashtextextended('gdq target ' || %s, 0))"),
            [self.view],
        )
        if self.position(connection, lock=True) != before:
            raise RefreshConflict(f'another refresh of view "{self.view}" has moved its position meanwhile')
        connection.execute(
            f"""insert into gdq_target.position (view, source, target, plan, position)
               values (%s, %s, %s, {_PLAN_AND_FILE}, %s)
               on conflict (view) do update set target = excluded.target, plan = excluded.plan,
                 position = excluded.position, updated_at = pg_catalog.now()""",
            [self.view, self.source, self.table, plan, self.table, position],
        )

    def sql(self, connection: Connection[Any]) -> OwnerSql:
        """Runs SQL over the target, as the view's owner."""
        return OwnerSql(connection, self.owner)

    def hold(self, connection: Connection[Any]) -> None:
        """Lock the target and its state in the open transaction; GdqError if one is not a table of the session's role.

        Whoever owns a schema may put a table with a trigger, or a view, in the place of the target.
        """
        names = [self.table, self.state]
        found = check_tables_of_session(connection, names, in_source=self.in_source)
        if found:
            self.sql(connection).run(f"lock table only {', only '.join(found)} in row exclusive mode")
            check_tables_of_session(connection, names, in_source=self.in_source)

    def exists(self, connection: Connection[Any]) -> bool:
        """True if the target table exists; ForeignTarget if a table of that name is not this view's."""
        query = qualified("""select pg_catalog.obj_description(c.oid, 'pg_class')
                     from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass(%s)""")
        row = connection.execute(query, [self.table]).fetchone()
        return row is not None and self._is_own(row[0])

    def _is_own(self, comment: str | None) -> bool:
        if comment != self.comment:
            raise ForeignTarget(
                f"table {self.table} exists and is not the target of view {self.view}", hint="Choose another target."
            )
        return True

    def empty(self, connection: Connection[Any], types: Sequence[TargetColumn]) -> int:
        """Delete all rows of the target, or recreate it if missing or with other columns; returns the rows deleted."""
        if self.exists(connection):
            if self._columns(connection) == [(column.name, column.type) for column in types]:
                return self.sql(connection).run(f"delete from {self.table}")
            self.sql(connection).run(f"drop table {self.table}")
        for statement in self.made(types):
            self.sql(connection).run(statement)
        return 0

    def made(self, types: Sequence[TargetColumn]) -> list[str]:
        """The statements that create the target."""
        columns = ", ".join(f"{quote(column.name)} {column.type}" for column in types)
        comment = f"comment on table {self.table} is {literal(self.comment)}"
        return [f"create table {self.table} ({columns})", comment]

    def made_index(self, columns: str) -> list[str]:
        """The statements that create the index on `columns`, a list in SQL."""
        name, made = self.key_index.partition('".')[2], f"({columns})"
        return [
            f"create index {name} on {self.table} {made}",
            f"comment on index {self.key_index} is {literal(made)}",
        ]

    def _columns(self, connection: Connection[Any]) -> list[tuple[str, str]]:
        query = qualified("""select a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod)
                     from pg_catalog.pg_attribute a
                    where a.attrelid = %s::pg_catalog.regclass and a.attnum > 0 and not a.attisdropped
                    order by a.attnum""")
        with connection.transaction(force_rollback=True):
            pin_transaction(connection)
            return connection.execute(query, [self.table]).fetchall()

    def make_index(self, connection: Connection[Any], columns: str) -> None:
        """Create the index on `columns`, a list in SQL, unless it exists; drop it if `columns` is empty.

        A fitting index stays: DDL on a table that a queue captures would switch its capture off.
        """
        made = f"({columns})"
        query = "select pg_catalog.obj_description(pg_catalog.to_regclass(%s), 'pg_class')"
        if columns and scalar(connection, query, self.key_index) == made:
            return
        self.sql(connection).run(f"drop index if exists {self.key_index}")
        if columns:
            create, comment = self.made_index(columns)
            if try_index(self.sql(connection), create):
                self.sql(connection).run(comment)

    def fill(self, connection: Connection[Any], insert: Callable[[], int]) -> int:
        """Insert all rows of a full load; if a key is too long for the index, drop the index and insert again."""
        try:
            with connection.transaction():
                return insert()
        except psycopg.errors.ProgramLimitExceeded:
            self.sql(connection).run(f"drop index if exists {self.key_index}")
            return insert()

    def create_stage(self, connection: Connection[Any], stage: str, columns: Sequence[str]) -> None:
        """Create a staging table, after dropping those that earlier refreshes of this view left behind."""
        self.sweep(connection)
        listed = ", ".join(f"{column} text" for column in columns)
        connection.execute(raw(f"create unlogged table {stage} ({listed}, attempt text)"))
        if self.owner is not None:
            connection.execute(raw(f"grant usage on schema gdq_target to {quote(self.owner)}"))
            connection.execute(raw(f"grant select on table {stage} to {quote(self.owner)}"))

    def temporary_stage(
        self, connection: Connection[Any], columns: Sequence[str], rows: Iterable[Sequence[str | None]]
    ) -> str:
        """Put `rows` into a staging table that ends with the transaction; returns its name."""
        listed = ", ".join(f"{column} text" for column in columns)
        connection.execute(raw(f"create temp table gdq_stage ({listed}) on commit drop"))
        with connection.cursor().copy("copy pg_temp.gdq_stage from stdin") as copy:
            for row in rows:
                copy.write_row(row)
        return "pg_temp.gdq_stage"

    def sweep(self, connection: Connection[Any]) -> None:
        """Drop this view's staging tables, except those that a dying writer still locks."""
        query = qualified(r"""select pg_catalog.format('gdq_target.%%I', c.relname) from pg_catalog.pg_class c
                     where c.relnamespace = pg_catalog.to_regnamespace('gdq_target')
                       and pg_catalog.starts_with(c.relname, %s) and c.relkind = 'r'""")
        for (name,) in connection.execute(query, [f"stage_{self._mark}_"]).fetchall():
            try:
                with connection.transaction():
                    connection.execute("set local lock_timeout = '1s'")
                    connection.execute(raw(f"drop table if exists {name}"))
            except psycopg.errors.LockNotAvailable:
                continue

    def drop(self, connection: Connection[Any]) -> None:
        """Drop the target table with its state and staging tables, and delete the position.

        A table of that name that is not the view's own stays.
        """
        pin_transaction(connection)
        connection.execute("set local client_min_messages = warning")
        with suppress(ForeignTarget):
            if self.exists(connection):
                self.sql(connection).run(f"drop table {self.table}")
        self.sql(connection).run(f"drop table if exists {self.state}")
        for function in self.functions:
            self.sql(connection).run(f"drop function if exists {function}")
        self.sweep(connection)
        if scalar(connection, "select pg_catalog.to_regclass('gdq_target.position')") is not None:
            check_own_tables(connection, "position", in_source=self.in_source)
            connection.execute(
                qualified("delete from gdq_target.position where view = %s and source = %s"), [self.view, self.source]
            )
