"""How far a chunked copy has come: a row for each range of a table in gdq_target.chunked_copy, in the target.

A row changes in the transaction that writes the range's rows, so that it is right whatever was killed. Of tables
without a key gdq_target.chunked_doubt has the rows that are in doubt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.copy.chunk_table import Bound
from gdq.consumers.views.own_objects import check_own_tables
from gdq.errors import GdqError, RefreshConflict
from gdq.qualified_sql import qualified

_CREATE = """
create schema if not exists gdq_target;
create table if not exists gdq_target.chunked_copy (
  copy        pg_catalog.text not null,
  table_name  pg_catalog.text not null,
  range_no    pg_catalog.int4 not null,
  target      pg_catalog.text not null,
  described   pg_catalog.text,
  after       pg_catalog.text,
  upto        pg_catalog.text,
  until       pg_catalog.text,
  whole       pg_catalog.bool not null,
  snapshot    pg_catalog.text,
  position    pg_catalog.text,
  row_count   pg_catalog.int8 not null,
  arrived     pg_catalog.bool not null,
  updated_at  pg_catalog.timestamptz not null default pg_catalog.now(),
  primary key (copy, table_name, range_no)
);
create table if not exists gdq_target.chunked_doubt (
  copy        pg_catalog.text not null,
  table_name  pg_catalog.text not null,
  reading     pg_catalog.int4 not null,
  image       pg_catalog.int8 not null,
  primary key (copy, table_name, reading, image)
)"""

_TABLES = ("chunked_copy", "chunked_doubt")

_COLUMNS = "range_no, target, described, after, upto, until, whole, snapshot, position, row_count, arrived"

_STORE = qualified(f"""
insert into gdq_target.chunked_copy (copy, table_name, {_COLUMNS})
  values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
on conflict (copy, table_name, range_no) do update
  set target = excluded.target, described = excluded.described, after = excluded.after, upto = excluded.upto,
      until = excluded.until, whole = excluded.whole, snapshot = excluded.snapshot, position = excluded.position,
      row_count = excluded.row_count, arrived = excluded.arrived, updated_at = now()""")

# Keys of advisory locks, by the copy's name: of the session that leads it, and of its workers.
_LEADS = "pg_catalog.hashtextextended('gdq chunked copy ' operator(pg_catalog.||) %s, 0)"
_WORKS = "pg_catalog.hashtextextended('gdq chunked copy worker ' operator(pg_catalog.||) %s, 0)"


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of one range of a table's copy: its rows with a key after `after`, up to `upto`, are in `target`.

    They are as of `snapshot`, which is None before the first chunk. The range ends with `until`; None as a bound is the
    table's end on that side. `whole`: all rows of the range are there. `described`: the table's columns and key when
    the copy began. `position`: the snapshot as a position of the queue. `rows`: read so far. `arrived`: the table has
    reached the tick that all tables of the copy share, and is one range.
    """

    table: str
    target: str
    number: int = 1
    described: str | None = None
    after: Bound | None = None
    upto: Bound | None = None
    until: Bound | None = None
    whole: bool = False
    snapshot: str | None = None
    position: str | None = None
    rows: int = 0
    arrived: bool = False

    @property
    def begun(self) -> bool:
        """True if rows of the range may be in the target."""
        return self.snapshot is not None

    @property
    def is_read(self) -> bool:
        """True while a table without a key is read block by block: then `upto` is a place, and some rows are in doubt.

        `snapshot`: the rows that are in no doubt are those of it.
        """
        return not self.whole and self.described is not None and json.loads(self.described)[1] == []

    def begun_anew(self) -> Progress:
        """The state of the table's only range before the first chunk."""
        return Progress(self.table, self.target)

    def divided(self, bounds: Sequence[Bound], described: str) -> list[Progress]:
        """The state of the table's ranges before the first chunk: one up to each bound, and one after the last."""
        return [
            replace(self, number=number, described=described, after=after, upto=after, until=until)
            for number, (after, until) in enumerate(zip([None, *bounds], [*bounds, None], strict=True), 1)
        ]


class StartAgain(Exception):  # noqa: N818 (a signal between two parts, no error)
    """Something happened to a table that its log's rows do not show: its copy starts again."""

    def __init__(self, table: str, reason: str) -> None:
        super().__init__(reason)
        self.table, self.reason = table, reason


class CopyTaken(GdqError):  # noqa: N818 (it says what happened)
    """Another session is at work on a copy."""


def begin_copy(connection: Connection[Any], copy: str, tables: Sequence[tuple[str, str]]) -> list[list[Progress]]:
    """The ranges of a copy's tables, given as (table, target); new ones are stored. The session holds the copy.

    Needs an idle connection in autocommit. GdqError if another session is at work on it, or if it goes elsewhere.
    """
    with connection.transaction():
        connection.execute("select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq target', 0))")
        check_own_tables(connection, *_TABLES)
        if not _is_there(connection):
            connection.execute("set local client_min_messages = warning")
            connection.execute(_CREATE)
    take_copy(connection, copy)
    with connection.transaction():
        found = [_begun(connection, copy, Progress(table, target)) for table, target in tables]
    for states, (table, target) in zip(found, tables, strict=True):
        if states[0].target != target:
            raise GdqError(
                f'copy "{copy}" brings table {table} into {states[0].target}, not into {target}',
                hint="Name the same target, or give this copy another name.",
            )
    return found


def take_copy(connection: Connection[Any], copy: str) -> None:
    """Have a session hold a copy as long as it lives; CopyTaken if another session is at work on it."""
    free = connection.execute(
        f"select pg_catalog.pg_try_advisory_lock({_LEADS}) and pg_catalog.pg_try_advisory_lock({_WORKS})", [copy, copy]
    ).fetchone()
    if free is None or not free[0]:
        raise CopyTaken(
            f'another session is at work on copy "{copy}"',
            hint="Wait for it. After a kill the target's server may need a moment to notice.",
        )
    connection.execute(f"select pg_catalog.pg_advisory_unlock({_WORKS})", [copy])


def join_copy(connection: Connection[Any], copy: str) -> None:
    """Mark a session as a worker's: as long as it lives, no other program takes the copy."""
    connection.execute(f"select pg_catalog.pg_advisory_lock_shared({_WORKS})", [copy])


def store(connection: Connection[Any], copy: str, before: Sequence[Progress], after: Sequence[Progress]) -> None:
    """Store the new state of ranges of one table in the open transaction, in place of `before`.

    RefreshConflict unless these are stored.
    """
    for state in before:
        if _loaded(connection, copy, state.table, state.number) != [state]:
            raise RefreshConflict(
                f'another session has moved copy "{copy}" of table {state.table} meanwhile',
                hint="Let one program at a time copy. Run this one again when the other has ended: it goes on.",
            )
    kept = {state.number for state in after}
    for state in before:
        if state.begun and not any(one.begun for one in after):
            query = "delete from gdq_target.chunked_doubt where copy = %s and table_name = %s"
            connection.execute(qualified(query), [copy, state.table])
        if state.number not in kept:
            query = "delete from gdq_target.chunked_copy where copy = %s and table_name = %s and range_no = %s"
            connection.execute(qualified(query), [copy, state.table, state.number])
    for state in after:
        _put(connection, copy, state)


def _begun(connection: Connection[Any], copy: str, fresh: Progress) -> list[Progress]:
    """The stored ranges of a table; those of a new one are stored."""
    found = _loaded(connection, copy, fresh.table, None)
    if not found:
        _put(connection, copy, fresh)
    return found or [fresh]


def _put(connection: Connection[Any], copy: str, state: Progress) -> None:
    bounds = [None if bound is None else json.dumps(bound) for bound in (state.after, state.upto, state.until)]
    values = [state.number, state.target, state.described, *bounds]
    values += [state.whole, state.snapshot, state.position, state.rows, state.arrived]
    connection.execute(_STORE, [copy, state.table, *values])


def _loaded(connection: Connection[Any], copy: str, table: str, only: int | None) -> list[Progress]:
    """The stored ranges of a table, or the one of a number."""
    query = qualified(f"""
        select {_COLUMNS} from gdq_target.chunked_copy
         where copy = %s and table_name = %s and coalesce(range_no = %s, true) order by range_no for update""")
    found = []
    for number, target, described, after, upto, until, *rest in connection.execute(query, [copy, table, only]):
        bounds = [None if text is None else tuple(json.loads(text)) for text in (after, upto, until)]
        found.append(Progress(table, target, number, described, bounds[0], bounds[1], bounds[2], *rest))
    return found


def forget_progress(connection: Connection[Any], copy: str, table: str | None = None) -> None:
    """Delete what is stored of a copy, or of one table of it; its rows stay."""
    if _is_there(connection):
        check_own_tables(connection, *_TABLES)
        for name in _TABLES:
            query = f"delete from gdq_target.{name} where copy = %s and table_name = coalesce(%s, table_name)"
            connection.execute(qualified(query), [copy, table])


def rename_progress(connection: Connection[Any], copy: str, table: str, name: str) -> None:
    """Store another name of a table, which its target has, too."""
    if _is_there(connection):
        check_own_tables(connection, *_TABLES)
        query = "update gdq_target.chunked_copy set table_name = %s, target = %s where copy = %s and table_name = %s"
        connection.execute(qualified(query), [name, name, copy, table])
        query = "update gdq_target.chunked_doubt set table_name = %s where copy = %s and table_name = %s"
        connection.execute(qualified(query), [name, copy, table])


def _is_there(connection: Connection[Any]) -> bool:
    """True if the tables that hold progress exist; chunked_doubt is the younger one."""
    return scalar(connection, "select pg_catalog.to_regclass('gdq_target.chunked_doubt')") is not None
