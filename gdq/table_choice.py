"""Several tables captured in one transaction: chosen by names and patterns, and locked without a deadlock."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection
from psycopg.errors import InsufficientPrivilege, LockNotAvailable
from psycopg.types.json import Jsonb

from gdq.call import call, rows, scalar
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.queue import add_table, table_info
from gdq.schema_usage import require_schema_usage

# Seconds to wait until nobody writes to a further table: as long as add_table() waits for its lock.
_PATIENCE = 0.5

_FOUND = qualified("select relid, table_name from gdq.find_tables(%s, current_schemas(true))")

_NAMED = qualified("select c as relid, gdq.table_name(c) as table_name from (select %s::regclass::oid) named(c)")

_PARENTS = qualified("select inhrelid, inhparent from pg_catalog.pg_inherits where inhrelid = any (%s)")

# Whether others hold or want a lock on a table or a partition of it that excludes making triggers.
_BUSY = qualified("""
    select exists (select from pg_catalog.pg_locks l
                    where l.locktype = 'relation' and coalesce(l.pid, 0) <> pg_backend_pid()
                      and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
                      and l.relation = any (array(select p.relid::oid from pg_partition_tree(%s::oid) p) || %s::oid)
                      and l.mode <> all (array['AccessShareLock', 'RowShareLock']))""")


@dataclass(frozen=True, slots=True)
class ChosenTable:
    """A table to capture. `table_name`: with its schema, quoted where SQL needs it."""

    relid: int
    table_name: str


def choose_tables(
    connection: Connection[Any], wanted: Sequence[str], *, every: bool = False, excepted: Sequence[str] = ()
) -> list[ChosenTable]:
    """The tables of names and patterns, or `every` table, without the `excepted`, in the order to lock them.

    A name is any relation; the server refuses one that is no table when it is captured. What patterns and `every`
    stand for is find_tables()'s answer. GdqError for a pattern that matches none. Inheritance children come before
    their parents, which cannot be captured without them.
    """
    found = rows(connection, ChosenTable, _FOUND, None) if every else []
    if every and not found:
        raise GdqError("this database has no table to capture")
    for text in wanted:
        found += _matching(connection, text) if _is_pattern(text) else _named(connection, text)
    left_out = {table.relid for text in excepted for table in _matching(connection, text)}
    chosen = {table.relid: table for table in found if table.relid not in left_out}
    if not chosen:
        raise GdqError("the exceptions leave no table to capture")
    depths = _depths(connection, list(chosen))
    return sorted(chosen.values(), key=lambda table: (-depths[table.relid], table.relid))


def add_tables(
    connection: Connection[Any], queue: str, tables: Sequence[ChosenTable], options: dict[str, Any]
) -> list[bool]:
    """Capture tables with the same options of add_table(); for each True, or False if the queue captures it already.

    GdqError if it captures one with other options. psycopg.errors.LockNotAvailable while writers hold a table: roll
    back and try again. Locks of tables are held until the transaction ends, and nothing is waited for that a waiting
    writer could hold: the server would end that writer as the victim of a deadlock.
    """
    known = {info.table_name for info in table_info(connection, queue)}
    added: list[bool] = []
    for table in tables:
        if table.table_name in known:
            _check_options(connection, queue, table, options)
        else:
            if any(added):
                call(connection, "require_locks")
                _wait_until_idle(connection, table)
            add_table(connection, queue, table.table_name, **options)
        added.append(table.table_name not in known)
    return added


def _is_pattern(text: str) -> bool:
    """True if a name has `*` or `?` outside double quotes."""
    return any(sign in "*?" for sign in re.sub('"[^"]*"', "", text))


def _named(connection: Connection[Any], name: str) -> list[ChosenTable]:
    try:
        with connection.transaction():
            return rows(connection, ChosenTable, _NAMED, name)
    except InsufficientPrivilege:
        require_schema_usage(connection, [name])
        raise


def _matching(connection: Connection[Any], pattern: str) -> list[ChosenTable]:
    found = rows(connection, ChosenTable, _FOUND, pattern)
    if not found:
        raise GdqError(
            f"no table matches {pattern}",
            hint="Patterns match tables, and partitioned tables at their root, without those of extensions and views;"
            " without a schema those of the search_path.",
        )
    return found


def _depths(connection: Connection[Any], oids: list[int]) -> dict[int, int]:
    """How many generations of inheritance stand above each table."""
    parents: dict[int, list[int]] = {}
    level = oids
    while level:
        pairs = connection.execute(_PARENTS, [level]).fetchall()
        for child, parent in pairs:
            parents.setdefault(child, []).append(parent)
        level = [parent for _, parent in pairs if parent not in parents]

    def depth(oid: int) -> int:
        return max((1 + depth(parent) for parent in parents.get(oid, ())), default=0)

    return {oid: depth(oid) for oid in oids}


def _check_options(connection: Connection[Any], queue: str, table: ChosenTable, options: dict[str, Any]) -> None:
    """GdqError if a captured table has other options than these; those that are not named do not count."""
    differing = call(connection, "differing_options", queue, table.table_name, Jsonb(options)) if options else []
    if differing:
        raise GdqError(
            f"table {table.table_name} is already captured by this queue with other options: {', '.join(differing)}",
            hint="gdq alter-table changes them.",
        )


def _wait_until_idle(connection: Connection[Any], table: ChosenTable) -> None:
    """Wait without a lock until nobody writes to a table."""
    deadline = time.monotonic() + _PATIENCE
    while scalar(connection, _BUSY, table.relid, table.relid):
        if time.monotonic() > deadline:
            error = LockNotAvailable(f"table {table.table_name} is busy: no lock within 500 ms")
            error.add_note("Hint: Nothing was changed. Try again when no long transaction holds the table.")
            raise error
        time.sleep(0.005)
