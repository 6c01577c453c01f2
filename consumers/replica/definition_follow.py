"""Indexes, constraints, defaults and NOT NULL of the source's tables made and dropped in a replica's target, too.

They are looked at in the source's catalog, whatever command has changed them, and what was seen is noted in the target.
What the source has no longer is dropped before the next batch, whose rows may need that; what is new is made when the
target has arrived at what the source was then, since its rows satisfy it then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import psycopg
from psycopg.rows import class_row

from gdq.call import scalar
from gdq.consumers.replica.definitions import Definition, Kind, definitions, definitions_mark
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.errors import GdqError
from gdq.source import Position
from gdq.sql_text import raw

# What becomes of such definitions in the target: they are left to its owner; they follow the source's; they must.
OnDdl = Literal["keep", "follow", "require"]

# What others need comes first.
_ORDER: tuple[Kind, ...] = ("default", "not null", "index", "unique", "exclusion", "check", "foreign key")

_LOOK_SECONDS = 1.0

_NOTED = """
select source_oid as relid, kind, source_id as id, name, definition, unique_columns, made
  from gdq_target.replica_definition where replica = %s"""

_NOTE = """
insert into gdq_target.replica_definition (replica, source_oid, kind, source_id, name, definition, unique_columns, made)
values (%s, %s, %s, %s, %s, %s, %s, %s)
on conflict (replica, source_oid, kind, source_id) do update
   set name = excluded.name, definition = excluded.definition, unique_columns = excluded.unique_columns,
       made = excluded.made"""

_FORGET = """
delete from gdq_target.replica_definition
 where replica = %s and source_oid = %s and kind = %s and source_id = %s"""

Key = tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class _Noted(Definition):
    """A definition as it was seen in the source. `made`: the target has it, or had it when it was seen."""

    made: bool = False


class DefinitionFeed(Protocol):
    """What feeds a replica, as its follower of definitions sees it: the source, the target's state, both compared."""

    @property
    def source(self) -> psycopg.Connection[Any]: ...

    @property
    def state(self) -> ReplicaState: ...

    def now(self) -> Callable[[], bool]:
        """A function that says whether the target has arrived at what the source is now, rows and columns."""

    def key(self, relid: int) -> list[str]:
        """The columns by which rows of a table are found, sorted."""


@dataclass(frozen=True, slots=True)
class QueueDefinitions:
    """A queue's feed: the target stands at a tick's snapshot, and columns change in their place among the rows."""

    source: psycopg.Connection[Any]
    state: ReplicaState

    def now(self) -> Callable[[], bool]:
        seen = PgSnapshot.parse(scalar(self.source, "select pg_current_snapshot()::text"))
        return lambda: PgSnapshot.parse(Position.parse(self.state.position or "").snapshot).covers(seen)

    def key(self, relid: int) -> list[str]:
        query = "select array(select unnest(key) order by 1) from gdq.consumer_tables(%s, %s) where tbl = %s::oid"
        found: list[str] | None = scalar(self.source, query, self.state.queue, self.state.name, relid)
        return found or []


@dataclass(slots=True)
class DefinitionFollower:
    """Keeps the definitions of a replica's tables in line with the source's; `tell` gets a line for each change.

    `changed` is called after each.
    """

    feed: DefinitionFeed
    on_ddl: OnDdl
    tell: Callable[[str], None]
    changed: Callable[[], None]
    _mark: str | None = None
    _seen: dict[Key, Definition] = field(default_factory=dict)
    _arrived: Callable[[], bool] | None = None
    _noted: dict[Key, _Noted] | None = None
    _tried: set[tuple[Key, str]] = field(default_factory=set)
    _looked: float = 0.0

    def drop_gone(self) -> None:
        """Drop in the target what the source has no longer. Call it before a batch is applied, outside of it."""
        if self.on_ddl == "keep":
            return
        self.look()
        names = self.feed.state.names
        # REINDEX CONCURRENTLY, and ALTER TYPE, make the same anew
        remade = {(seen.relid, seen.kind, seen.name, seen.definition) for seen in self._seen.values()}
        for noted in [one for key, one in self._all_noted().items() if key not in self._seen]:
            table = names.get(noted.relid)
            same = (noted.relid, noted.kind, noted.name, noted.definition) in remade
            if noted.made and table is not None and not same and not self._finds_rows(noted):
                there = self._there(table)
                if any(one.kind == noted.kind and one.name == noted.name for one in there):
                    self._change(noted, table, noted.drop_sql(table, _schema(self.feed.state, table)), "dropped")
            self._forget(noted)

    def make_new(self) -> None:
        """Make in the target what is new in the source, if the target has arrived there. Call it between batches."""
        if self.on_ddl == "keep" or self._arrived is None or not self._arrived():
            return
        self._arrived = None
        noted, names = self._all_noted(), self.feed.state.names
        there: dict[str, list[Definition]] = {}
        for seen in sorted(self._seen.values(), key=lambda one: (_ORDER.index(one.kind), one.relid, one.name)):
            table = names.get(seen.relid)
            before = noted.get(seen.key)
            if table is None or (before is not None and before.made and _same(before, seen)):
                continue
            if table not in there:
                there[table] = self._there(table)
            self._follow(seen, before, table, there[table])

    def watched(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """`stop` of a loop that calls it between batches and while waiting; definitions are looked at every second."""

        def look() -> bool:
            if time.monotonic() - self._looked >= _LOOK_SECONDS:
                self.look()
                self.make_new()
            return stop()

        return look

    def look(self) -> None:
        """See what the source has, if that has changed since it was seen last."""
        self._looked = time.monotonic()
        if self.on_ddl == "keep":
            return
        relids = sorted(self.feed.state.names)
        try:
            with self.feed.source.transaction():
                # behind ALTER TABLE the server may wait for the table; the next look will see it
                self.feed.source.execute("set local lock_timeout = '500ms'")
                mark = f"{relids} {definitions_mark(self.feed.source, relids)}"
                seen = None if mark == self._mark else definitions(self.feed.source, relids)
                self.feed.source.execute("set local lock_timeout to default")
        except psycopg.errors.LockNotAvailable:
            return
        if seen is None:
            return
        self._seen = seen
        self._arrived = self.feed.now()  # after that: whatever was seen is committed
        self._mark = mark

    def _follow(self, seen: Definition, before: _Noted | None, table: str, there: Iterable[Definition]) -> None:
        """Have the target's table have a definition. `before`: as it was noted; `there`: what the table has."""
        same = [one for one in there if _same(one, seen) or _serves(one, seen)]
        if same:
            self._note(seen, made=True)
            return
        if (seen.key, seen.definition) in self._tried:
            return
        self._tried.add((seen.key, seen.definition))
        schema = _schema(self.feed.state, table)
        named = [one for one in there if one.kind == seen.kind and one.name == (before or seen).name]
        if before is not None and before.made and not named and before.definition == seen.definition:
            self._note(seen, made=True)  # somebody has dropped it in the target
            return
        statements = [seen.create_sql(table)]
        if named and before is not None and before.made:
            if before.definition == named[0].definition == seen.definition:
                statements = [before.rename_sql(table, schema, seen.name)]
            elif seen.kind not in ("default", "not null"):
                statements.insert(0, before.drop_sql(table, schema))
        elif named:
            self.tell(f"{seen.shown(table)} is another one in the target, and stays")
            self._note(seen, made=False)
            return
        self._note(seen, made=self._change(seen, table, "; ".join(statements), "made"))

    def _change(self, one: Definition, table: str, statement: str, done: str) -> bool:
        """Run DDL in the target, and tell; False if it refuses. GdqError then if definitions are required."""
        try:
            with self.feed.state.connection.transaction():
                self.feed.state.connection.execute(raw(statement))
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            told = f"{one.shown(table)} was not {done} in the target: {error.diag.message_primary}"
            if self.on_ddl == "require":
                raise GdqError(
                    told, hint="Mend it there, or leave such objects to the target's owner: --on-ddl keep"
                ) from error
            self.tell(told)
            return False
        self.changed()
        self.tell(f"{one.shown(table)} was {done} in the target")
        return True

    def _finds_rows(self, one: Definition) -> bool:
        """True for the unique key by which the replica finds rows: it stays."""
        if one.unique_columns is None:
            return False
        return self.feed.key(one.relid) == one.unique_columns

    def _there(self, table: str) -> list[Definition]:
        """What a table of the target has."""
        relid = scalar(self.feed.state.connection, "select to_regclass(%s)::oid::bigint", table)
        return [] if relid is None else list(definitions(self.feed.state.connection, [relid]).values())

    def _all_noted(self) -> Mapping[Key, _Noted]:
        if self._noted is None:
            with self.feed.state.connection.cursor(row_factory=class_row(_Noted)) as cursor:
                self._noted = {one.key: one for one in cursor.execute(_NOTED, [self.feed.state.name])}
        return self._noted

    def _note(self, seen: Definition, *, made: bool) -> None:
        values = [seen.name, seen.definition, seen.unique_columns, made]
        self.feed.state.connection.execute(_NOTE, [self.feed.state.name, *seen.key, *values])
        assert self._noted is not None
        self._noted[seen.key] = _Noted(
            seen.relid, seen.kind, seen.id, seen.name, seen.definition, seen.unique_columns, made
        )

    def _forget(self, noted: _Noted) -> None:
        self.feed.state.connection.execute(_FORGET, [self.feed.state.name, *noted.key])
        assert self._noted is not None
        del self._noted[noted.key]


def _same(one: Definition, other: Definition) -> bool:
    return (one.kind, one.name, one.definition) == (other.kind, other.name, other.definition)


def _serves(there: Definition, seen: Definition) -> bool:
    """True if a unique index of the target, under whatever name, keeps what a unique constraint or index would."""
    kinds = ("index", "unique")
    return (
        there.kind in kinds
        and seen.kind in kinds
        and there.unique_columns is not None
        and there.unique_columns == seen.unique_columns
    )


def _schema(state: ReplicaState, table: str) -> str:
    return str(scalar(state.connection, "select quote_ident((parse_ident(%s))[1])", table))
