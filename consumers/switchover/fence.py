"""The fence: statement triggers on the tables of a switchover, whose one function refuses the application's writes.

The function is replaced to raise or lower the fence, which locks no table and counts for all tables at once, with the
commit. Triggers do not fire in sessions with session_replication_role = replica, so the replica passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection, sql

from gdq.call import try_while_locked
from gdq.sql_text import quote, raw

# Sorts before the application's triggers, and before those of capture.
FENCE = "!gdq_fence"

_PATIENCE_SECONDS = 20.0

# Statement triggers are not cloned to partitions, and fire only for the table that a statement names.
_MISSING = """
select m.oid::regclass::text
  from unnest(%(tables)s::text[]) t(name)
 cross join lateral (select to_regclass(t.name)::oid as oid
                      union
                     select p.relid from pg_partition_tree(to_regclass(t.name)) p) m
 where m.oid is not null
   and not exists (select from pg_trigger g where g.tgrelid = m.oid and g.tgname = %(fence)s and g.tgenabled = 'O')
 order by 1"""

_PLACED = "select g.tgrelid::regclass::text from pg_trigger g where g.tgname = %s order by 1"

# It runs in the application's session: whatever the search_path, nothing in it is looked up.
_REFUSES = """begin
  raise exception 'table %.% takes no writes here: the application writes to %', tg_table_schema, tg_table_name, {}
    using errcode = 'read_only_sql_transaction', hint = 'Connect there. gdq switchover has moved the place of writing.';
end"""
_LETS_PASS = "begin return null; end"


def raise_fence(connection: Connection[Any], other: str) -> None:
    """Have the fence refuse writes, from the commit of the open transaction on. `other`: where to write instead."""
    _replace(connection, sql.SQL(_REFUSES).format(sql.Literal(other)).as_string(connection))


def lower_fence(connection: Connection[Any]) -> None:
    """Have the fence let writes pass, from the commit of the open transaction on."""
    _replace(connection, _LETS_PASS)


def place_fence(connection: Connection[Any], tables: Sequence[str], *, patience: float = _PATIENCE_SECONDS) -> None:
    """Make the triggers where they are missing, on partitions too. The function exists.

    Each comes in a transaction of its own, which gives up after 80 ms behind a writer and tries again for `patience`
    seconds: psycopg.errors.LockNotAvailable after that.
    """
    missing = connection.execute(_MISSING, {"tables": list(tables), "fence": FENCE}).fetchall()
    for (table,) in missing:
        make = raw(
            f"""create or replace trigger {quote(FENCE)} before insert or update or delete or truncate on {table}
                  for each statement execute function gdq_target.fence()"""
        )
        _ddl(connection, make, patience)


def remove_fence(connection: Connection[Any]) -> None:
    """Drop the triggers one by one, as place_fence() makes them, then the function."""
    for (table,) in connection.execute(_PLACED, [FENCE]).fetchall():
        _ddl(connection, raw(f"drop trigger if exists {quote(FENCE)} on {table}"), _PATIENCE_SECONDS)
    connection.execute("drop function if exists gdq_target.fence()")


def _ddl(connection: Connection[Any], statement: sql.SQL, patience: float) -> None:
    """Run DDL of a table in a transaction of its own, again and again while others hold the table."""

    def run() -> None:
        with connection.transaction():
            connection.execute("set local lock_timeout = '80ms'")
            connection.execute(statement)

    try_while_locked(run, patience, pause_max=0.3)


def _replace(connection: Connection[Any], body: str) -> None:
    function = "create or replace function gdq_target.fence() returns trigger language plpgsql as {}"
    connection.execute(sql.SQL(function).format(sql.Literal(body)))
