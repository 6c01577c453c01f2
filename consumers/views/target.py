"""The target of a view in PostgreSQL: its table and rows, the position that moves with them, and its staging tables.

Everything here runs in the target's database, on a connection whose transaction belongs to the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection, sql

from gdq.call import rows, scalar
from gdq.consumers.views.difference import OUT, Difference, KeySet, image_of
from gdq.consumers.views.signals import Diverged
from gdq.errors import GdqError, RefreshConflict
from gdq.sql_text import quote
from gdq.typed.pgtypes import FIRST_USER_OID

_CREATE_POSITION = """
create table if not exists gdq_target.position (
  view        text primary key,
  source      text not null,
  target      text not null,
  plan        text not null,
  position    text not null,
  updated_at  timestamptz not null default pg_catalog.now()
)"""


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """The position of a target's rows: the view's `source`, the fingerprint of its `plan`, and the position in text."""

    source: str
    target: str
    plan: str
    position: str


@dataclass(frozen=True, slots=True)
class TargetState:
    """The state that a target declares: its position, None before the first load, and who else has changed its rows.

    A position without a text is one that is lost. `gone`: the target is not there although it was filled.
    """

    stored: StoredPosition | None
    foreign: str | None = None
    gone: bool = False


@dataclass(frozen=True, slots=True)
class OutputType:
    """A column of the view and its type in the target."""

    name: str
    type: str


def target_types(columns: Sequence[tuple[str, int, str]], *, same_database: bool) -> tuple[OutputType, ...]:
    """Types of the target's columns for (name, type oid, type) of the view's."""
    return tuple(
        OutputType(name, kind if same_database or not text_elsewhere(oid, kind) else "text")
        for name, oid, kind in columns
    )


def text_elsewhere(oid: int, kind: str) -> bool:
    """True for a type whose values a target in another database keeps as text.

    User types, and regclass and its like, which stand for objects of this database.
    """
    return oid >= FIRST_USER_OID or kind.startswith("reg")


@dataclass(frozen=True, slots=True)
class Target:
    """The table of one view. `table` is quoted and qualified, `source` the view's own mark."""

    view: str
    source: str
    table: str

    @property
    def state(self) -> str:
        """The private table beside the target that holds a group's numbers."""
        return self._beside("gdq_state_")

    @property
    def key_index(self) -> str:
        """The index on the columns by which rows of the target are found."""
        return self._beside("gdq_key_")

    @property
    def comment(self) -> str:
        """The comment by which a table is known as this view's target."""
        return f"gdq: target of view {self.view}, {self.source}"

    def _beside(self, prefix: str) -> str:
        schema = self.table[: self.table.index('".') + 1]
        return f"{schema}.{quote(prefix + self._mark)}"

    @property
    def _mark(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()[:12]

    def stage(self, attempt: str) -> str:
        """The staging table of one refresh; its name starts with the view's own mark."""
        return f"gdq_target.{quote(f'stage_{self._mark}_{attempt}')}"

    def prepare(self, connection: Connection[Any]) -> None:
        """Create schema gdq_target and its position table where they are missing."""
        if scalar(connection, "select pg_catalog.to_regclass('gdq_target.position')") is not None:
            return
        connection.execute("select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq target', 0))")
        connection.execute("create schema if not exists gdq_target")
        connection.execute(_CREATE_POSITION)

    def look(self, connection: Connection[Any], name: str) -> tuple[StoredPosition | None, bool]:
        """The stored position and whether the target table is there, in one statement of an idle autocommit connection.

        Its session is called `name` from now on. GdqError as position() and exists().
        """
        query = """select pg_catalog.set_config('application_name', %s, false), p.source, p.target, p.plan, p.position,
                          c.oid is not null, pg_catalog.obj_description(c.oid, 'pg_class')
                     from (select) as one
                     left join gdq_target.position p on p.view = %s
                     left join pg_catalog.pg_class c on c.oid = pg_catalog.to_regclass(%s)"""
        try:
            row = connection.execute(query, [name, self.view, self.table], prepare=True).fetchone()
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            with connection.transaction():
                self.prepare(connection)
            row = connection.execute(query, [name, self.view, self.table]).fetchone()
        if row is None:
            return None, False
        _, *stored, there, comment = row
        return self._own(StoredPosition(*stored)) if stored[0] is not None else None, there and self._is_own(comment)

    def position(self, connection: Connection[Any], *, lock: bool = False) -> StoredPosition | None:
        """The stored position, None before the first load. GdqError when another view of this name has it."""
        query = "select source, target, plan, position from gdq_target.position where view = %s"
        stored = rows(connection, StoredPosition, query + (" for update" if lock else ""), self.view)
        return self._own(stored[0]) if stored else None

    def _own(self, stored: StoredPosition) -> StoredPosition:
        if stored.source != self.source:
            raise GdqError(
                f'the target database holds a view "{self.view}" of another origin, in {stored.target}',
                hint="Give the view another name; or, if that one is gone, delete its row from gdq_target.position.",
            )
        return stored

    def move(self, connection: Connection[Any], before: StoredPosition | None, plan: str, position: str) -> None:
        """Move the position in the caller's transaction; `plan` is its fingerprint.

        RefreshConflict unless the position is still `before`.
        """
        if before is not None:
            moved = connection.execute(
                """update gdq_target.position
                      set target = %s, plan = %s, position = %s, updated_at = pg_catalog.now()
                    where (view, source, target, plan, position) = (%s, %s, %s, %s, %s)""",
                [self.table, plan, position, self.view, before.source, before.target, before.plan, before.position],
                prepare=True,
            ).rowcount
            if moved == 1:
                return
        connection.execute(
            "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq target ' || %s, 0))", [self.view]
        )
        if self.position(connection, lock=True) != before:
            raise RefreshConflict(f'another refresh of view "{self.view}" has moved its position meanwhile')
        connection.execute(
            """insert into gdq_target.position (view, source, target, plan, position) values (%s, %s, %s, %s, %s)
               on conflict (view) do update set target = excluded.target, plan = excluded.plan,
                 position = excluded.position, updated_at = pg_catalog.now()""",
            [self.view, self.source, self.table, plan, position],
        )

    def exists(self, connection: Connection[Any]) -> bool:
        """True if the target table is there. GdqError when a table of that name is not this view's target."""
        query = """select pg_catalog.obj_description(c.oid, 'pg_class')
                     from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass(%s)"""
        row = connection.execute(query, [self.table]).fetchone()
        return row is not None and self._is_own(row[0])

    def _is_own(self, comment: str | None) -> bool:
        if comment != self.comment:
            raise GdqError(
                f"table {self.table} exists and is not the target of view {self.view}", hint="Choose another target."
            )
        return True

    def empty(self, connection: Connection[Any], types: Sequence[OutputType]) -> int:
        """Delete all rows of the target, or make it anew where it is missing or has other columns; the rows deleted."""
        if self.exists(connection):
            if self._columns(connection) == [(column.name, column.type) for column in types]:
                return run(connection, f"delete from {self.table}")
            run(connection, f"drop table {self.table}")
        columns = ", ".join(f"{quote(column.name)} {column.type}" for column in types)
        run(connection, f"create table {self.table} ({columns})")
        comment = sql.Literal(self.comment).as_string(connection)
        run(connection, f"comment on table {self.table} is {comment}")
        return 0

    def _columns(self, connection: Connection[Any]) -> list[tuple[str, str]]:
        query = """select a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod)
                     from pg_catalog.pg_attribute a
                    where a.attrelid = %s::pg_catalog.regclass and a.attnum > 0 and not a.attisdropped
                    order by a.attnum"""
        with connection.transaction(force_rollback=True):
            run(connection, "set local search_path = pg_catalog")
            return connection.execute(query, [self.table]).fetchall()

    def make_index(self, connection: Connection[Any], columns: str) -> None:
        """Make the index on the target's key columns, SQL of an index, unless it is there; without columns drop it.

        One that fits stays: DDL on a table that a queue captures would switch its capture off.
        """
        made = f"({columns})"
        query = "select pg_catalog.obj_description(pg_catalog.to_regclass(%s), 'pg_class')"
        if columns and scalar(connection, query, self.key_index) == made:
            return
        run(connection, f"drop index if exists {self.key_index}")
        if columns:
            name = self.key_index.partition('".')[2]
            if try_index(connection, f"create index {name} on {self.table} {made}"):
                run(connection, f"comment on index {self.key_index} is {sql.Literal(made).as_string(connection)}")

    def fill(self, connection: Connection[Any], insert: Callable[[], int]) -> int:
        """Insert all rows of a full load; the index on the key goes where a row's key is too long for it."""
        try:
            with connection.transaction():
                return insert()
        except psycopg.errors.ProgramLimitExceeded:
            run(connection, f"drop index if exists {self.key_index}")
            return insert()

    def create_stage(self, connection: Connection[Any], stage: str, columns: Sequence[str]) -> None:
        """Create a staging table after dropping what earlier refreshes of this view have left."""
        self.sweep(connection)
        listed = ", ".join(f"{column} text" for column in columns)
        run(connection, f"create unlogged table {stage} ({listed}, attempt text)")

    def temporary_stage(
        self, connection: Connection[Any], columns: Sequence[str], rows: Iterable[Sequence[str | None]]
    ) -> str:
        """Put `rows` into a staging table that ends with the transaction; returns its name."""
        listed = ", ".join(f"{column} text" for column in columns)
        run(connection, f"create temp table gdq_stage ({listed}) on commit drop")
        with connection.cursor().copy("copy pg_temp.gdq_stage from stdin") as copy:
            for row in rows:
                copy.write_row(row)
        return "pg_temp.gdq_stage"

    def sweep(self, connection: Connection[Any]) -> None:
        """Drop staging tables of this view; one that a dying writer still holds is left for the next time."""
        query = r"""select pg_catalog.format('gdq_target.%%I', c.relname) from pg_catalog.pg_class c
                     where c.relnamespace = pg_catalog.to_regnamespace('gdq_target')
                       and pg_catalog.starts_with(c.relname, %s) and c.relkind = 'r'"""
        for (name,) in connection.execute(query, [f"stage_{self._mark}_"]).fetchall():
            try:
                with connection.transaction():
                    connection.execute("set local lock_timeout = '1s'")
                    run(connection, f"drop table if exists {name}")
            except psycopg.errors.LockNotAvailable:
                continue

    def drop(self, connection: Connection[Any]) -> None:
        """Drop the target table with its state and staging tables, and forget the position."""
        connection.execute("set local client_min_messages = warning")
        if self.exists(connection):
            run(connection, f"drop table {self.table}")
        run(connection, f"drop table if exists {self.state}")
        self.sweep(connection)
        if scalar(connection, "select pg_catalog.to_regclass('gdq_target.position')") is not None:
            connection.execute(
                "delete from gdq_target.position where view = %s and source = %s", [self.view, self.source]
            )


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The rows of `target`, in the transaction of `output`; `types` are the target's."""

    output: Connection[Any]
    target: Target
    types: Sequence[OutputType]

    @property
    def columns(self) -> str:
        """The target's columns, for a list in SQL."""
        return ", ".join(quote(column.name) for column in self.types)

    def change(self, difference: Difference) -> int:
        """Apply a difference, a signed one from OUT; the rows deleted plus the rows inserted.

        Diverged when rows that should go are missing.
        """
        if difference.kind == "none":
            return 0
        if difference.kind == "signed":
            return self._delete(difference.match) + self._insert(self._came())
        if difference.kind == "replace":
            where = " and ".join(self._among(key) for key in difference.keys)
            return run(self.output, f"delete from {self.target.table} where {where}") + self._insert(difference.rows)
        deleted = self.target.empty(self.output, self.types)
        inserted = self.target.fill(self.output, lambda: self._insert(difference.rows))
        self.loaded(difference)
        return deleted + inserted

    def loaded(self, difference: Difference) -> None:
        """Make the index and the statistics of a target that was loaded in full."""
        indexed = ", ".join(quote(column) for column in difference.match)
        self.target.make_index(self.output, indexed)
        run(self.output, f"analyze {self.target.table}")

    def _insert(self, rows: str) -> int:
        return run(self.output, f"insert into {self.target.table} ({self.columns}) {rows}")

    def _came(self) -> str:
        names = ", ".join(f"c{n}" for n in range(1, len(self.types) + 1))
        return f"select {names} from {OUT}, generate_series(1, net) where net > 0"

    def _among(self, key: KeySet) -> str:
        name = quote(key.column)
        among = f"{name} = any ({sql.Literal(key.array).as_string(self.output)}::{key.array_type})"
        return f"({among} or {name} is null)" if key.null else among

    def _delete(self, match: Sequence[str]) -> int:
        """Delete exactly as many equal rows as those in OUT take away."""
        row = self.output.execute(f"select coalesce(-sum(net), 0)::bigint from {OUT} where net < 0").fetchone()
        expected = int(row[0]) if row else 0
        if not expected:
            return 0
        numbers = {column.name: n for n, column in enumerate(self.types, 1)}
        pairs = [(quote(name), f"d.c{numbers[name]}") for name in match]
        some = " or ".join(f"{value} is null" for _, value in pairs)
        same = "".join(f" and t.{name} = {value}" for name, value in pairs)
        alike = "".join(f" and t.{name} is not distinct from {value}" for name, value in pairs)
        image = image_of([column.name for column in self.types], "t.")
        joined = (
            f"select t.ctid, row_number() over (partition by d.image) as copy, -d.net as n "
            f"from {self.target.table} as t join {OUT} as d on d.net < 0 and d.image = {image}"
        )
        parts = [f"{joined}{same}"] + ([f"{joined}{alike} and ({some})"] if pairs else [])
        found = " union all ".join(f"({part})" for part in parts)
        gone = f"array(select ctid from ({found}) as f where copy <= n)"
        deleted = run(self.output, f"delete from {self.target.table} where ctid = any ({gone})")
        if deleted != expected:
            raise Diverged(f"{self.target.table} held {deleted} of the {expected} rows that went")
        return deleted


def run(connection: Connection[Any], statement: str) -> int:
    """Execute SQL built from a plan and quoted names; the number of rows that it touched, -1 when it counts none."""
    return connection.execute(statement).rowcount


def try_index(connection: Connection[Any], statement: str) -> bool:
    """Make an index unless a value is too long for one (a third of a page): what it serves works without it."""
    try:
        with connection.transaction():
            run(connection, statement)
    except psycopg.errors.ProgramLimitExceeded:
        return False
    return True
