"""How far a chunked copy has come: one row for each table in gdq_target.chunked_copy, in the target's database.

The row changes in the transaction that writes the copied rows, so that it is right whatever was killed.
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
  target      pg_catalog.text not null,
  described   pg_catalog.text,
  upto        pg_catalog.text,
  whole       pg_catalog.bool not null,
  snapshot    pg_catalog.text,
  position    pg_catalog.text,
  row_count   pg_catalog.int8 not null,
  arrived     pg_catalog.bool not null,
  updated_at  pg_catalog.timestamptz not null default pg_catalog.now(),
  primary key (copy, table_name)
)"""

_COLUMNS = "target, described, upto, whole, snapshot, position, row_count, arrived"


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of one table's copy: its rows whose key is not after `upto` are in `target`, as of `snapshot`.

    `snapshot`: None before the first chunk. `whole`: every row is there, `upto` is None. `described`: the table's
    columns and key when the copy began. `position`: the snapshot as a position of the queue. `rows`: read so far.
    `arrived`: the table has reached the tick that all tables of the copy share.
    """

    table: str
    target: str
    described: str | None = None
    upto: Bound | None = None
    whole: bool = False
    snapshot: str | None = None
    position: str | None = None
    rows: int = 0
    arrived: bool = False

    def begun_anew(self) -> Progress:
        """The state before the first chunk."""
        return Progress(self.table, self.target)


def begin_copy(connection: Connection[Any], copy: str, tables: Sequence[tuple[str, str]]) -> list[Progress]:
    """The states of a copy's tables, given as (table, target); new ones are stored. The session holds the copy.

    Needs an idle connection in autocommit. GdqError if another session is at work on it, or if it goes elsewhere.
    """
    with connection.transaction():
        connection.execute("select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq target', 0))")
        check_own_tables(connection, "chunked_copy")
        if scalar(connection, "select pg_catalog.to_regclass('gdq_target.chunked_copy')") is None:
            connection.execute("set local client_min_messages = warning")
            connection.execute(_CREATE)
    key = "pg_catalog.hashtextextended('gdq chunked copy ' operator(pg_catalog.||) %s, 0)"
    row = connection.execute(f"select pg_catalog.pg_try_advisory_lock({key})", [copy]).fetchone()
    if row is None or not row[0]:
        raise GdqError(
            f'another session is at work on copy "{copy}"',
            hint="Wait for it. After a kill the target's server may need a moment to notice.",
        )
    with connection.transaction():
        for table, target in tables:
            connection.execute(
                "insert into gdq_target.chunked_copy (copy, table_name, target, whole, row_count, arrived) "
                "values (%s, %s, %s, false, 0, false) on conflict do nothing",
                [copy, table, target],
            )
        found = [_load(connection, copy, table) for table, _ in tables]
    for state, (table, target) in zip(found, tables, strict=True):
        if state.target != target:
            raise GdqError(
                f'copy "{copy}" brings table {table} into {state.target}, not into {target}',
                hint="Name the same target, or give this copy another name.",
            )
    return found


def store(connection: Connection[Any], copy: str, before: Progress, after: Progress) -> None:
    """Store a table's new state in the open transaction; RefreshConflict unless the stored one is `before`."""
    if _load(connection, copy, before.table) != before:
        raise RefreshConflict(f'another session has moved copy "{copy}" of table {before.table} meanwhile')
    connection.execute(
        qualified("""update gdq_target.chunked_copy
                  set target = %s, described = %s, upto = %s, whole = %s, snapshot = %s, position = %s, row_count = %s,
                      arrived = %s, updated_at = now()
                where copy = %s and table_name = %s"""),
        [
            after.target,
            after.described,
            None if after.upto is None else json.dumps(after.upto),
            after.whole,
            after.snapshot,
            after.position,
            after.rows,
            after.arrived,
            copy,
            after.table,
        ],
    )


def _load(connection: Connection[Any], copy: str, table: str) -> Progress:
    query = qualified(f"select {_COLUMNS} from gdq_target.chunked_copy where copy = %s and table_name = %s for update")
    row = connection.execute(query, [copy, table]).fetchone()
    if row is None:
        raise RefreshConflict(f'somebody has deleted the state of copy "{copy}"')
    state = Progress(table, *row)
    return replace(state, upto=None if row[2] is None else tuple(json.loads(row[2])))
