"""Several tables captured in one transaction: chosen by names and patterns, and locked without a deadlock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection
from psycopg.errors import LockNotAvailable
from psycopg.types.json import Jsonb

from gdq.call import call, rows, scalar
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.queue import add_table, table_info
from gdq.table_pattern import TablePattern, is_pattern, table_pattern

# Seconds to wait until nobody writes to a further table: as long as add_table() waits for its lock.
_PATIENCE = 0.5

# Ordinary tables and roots of partition trees outside the schemas of the system and of gdq, without tables that gdq
# keeps beside the targets of views. A target's own table is marked by its comment.
_CANDIDATES = qualified("""
    select c.oid, n.nspname as schema, c.relname as name, pg_table_is_visible(c.oid) as visible,
           concat(quote_ident(n.nspname), '.', quote_ident(c.relname)) as shown,
           coalesce(starts_with(obj_description(c.oid, 'pg_class'), 'gdq: target of view '), false) as is_target
      from pg_catalog.pg_class c
      join pg_catalog.pg_namespace n on n.oid = c.relnamespace
     where c.relkind = any (array['r', 'p']::pg_catalog."char"[]) and not c.relispartition
       and n.nspname !~ '^(pg_.*|information_schema|gdq|gdq_log|gdq_target)$'
       and c.relname !~ '^gdq_state_[0-9a-f]{12}$'
     order by n.nspname, c.relname""")

_NAMED = qualified("""
    select c.oid, n.nspname as schema, c.relname as name, true as visible,
           concat(quote_ident(n.nspname), '.', quote_ident(c.relname)) as shown, false as is_target
      from pg_catalog.pg_class c
      join pg_catalog.pg_namespace n on n.oid = c.relnamespace
     where c.oid = %s::regclass""")

_PARENTS = qualified("select inhrelid, inhparent from pg_catalog.pg_inherits where inhrelid = any (%s)")

# Whether others hold or want a lock on a table or a partition of it that excludes making triggers, and how many of
# the server's locks this transaction has.
_LOCKS = qualified("""
    select exists (select from pg_catalog.pg_locks l
                    where l.locktype = 'relation' and coalesce(l.pid, 0) <> pg_backend_pid()
                      and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
                      and l.relation = any (array(select p.relid::oid from pg_partition_tree(%s::oid) p) || %s::oid)
                      and l.mode <> all (array['AccessShareLock', 'RowShareLock'])),
           (select count(*) from pg_catalog.pg_locks l where l.pid = pg_backend_pid() and not l.fastpath)""")

_LOCKS_MAX = qualified("""
    select current_setting('max_locks_per_transaction')::int
           * (current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int)""")


@dataclass(frozen=True, slots=True)
class ChosenTable:
    """A table to capture. `shown`: its schema and name, quoted where SQL needs it; `is_target`: a view fills it."""

    oid: int
    schema: str
    name: str
    visible: bool
    shown: str
    is_target: bool


def choose_tables(
    connection: Connection[Any], wanted: Sequence[str], *, every: bool = False, excepted: Sequence[str] = ()
) -> list[ChosenTable]:
    """The tables of names and patterns, or `every` table, without the `excepted`, in the order to lock them.

    A name is any relation; the server refuses one that is no table when it is captured. Patterns and `every` stand for
    ordinary tables and roots of partition trees, `every` not for targets of views. GdqError for a pattern that matches
    none. Inheritance children come before their parents, which cannot be captured without them.
    """
    candidates = rows(connection, ChosenTable, _CANDIDATES)
    chosen = {table.oid: table for table in candidates if every and not table.is_target}
    if every and not chosen:
        raise GdqError("this database has no table to capture")
    for text in wanted:
        found = _matching(candidates, table_pattern(text)) if is_pattern(text) else _named(connection, text)
        chosen |= {table.oid: table for table in found}
    for text in excepted:
        for table in _matching(candidates, table_pattern(text)):
            chosen.pop(table.oid, None)
    if not chosen:
        raise GdqError("the exceptions leave no table to capture")
    depths = _depths(connection, list(chosen))
    return sorted(chosen.values(), key=lambda table: (-depths[table.oid], table.oid))


def add_tables(
    connection: Connection[Any], queue: str, tables: Sequence[ChosenTable], options: dict[str, Any]
) -> list[bool]:
    """Capture tables with the same options of add_table(); for each True, or False if the queue captures it already.

    GdqError if it captures one with other options. psycopg.errors.LockNotAvailable while writers hold a table: roll
    back and try again. Locks of tables are held until the transaction ends, and nothing is waited for that a waiting
    writer could hold: the server would end that writer as the victim of a deadlock.
    """
    known = {info.table_name for info in table_info(connection, queue)}
    locks_max = int(scalar(connection, _LOCKS_MAX))
    added: list[bool] = []
    for table in tables:
        if table.shown in known:
            _check_options(connection, queue, table, options)
        else:
            if any(added):
                _wait_until_idle(connection, table, locks_max)
            add_table(connection, queue, table.shown, **options)
        added.append(table.shown not in known)
    return added


def _named(connection: Connection[Any], text: str) -> list[ChosenTable]:
    return rows(connection, ChosenTable, _NAMED, text)


def _matching(candidates: Sequence[ChosenTable], pattern: TablePattern) -> list[ChosenTable]:
    found = [table for table in candidates if pattern.matches(table.schema, table.name, visible=table.visible)]
    if not found:
        hint = "Patterns match tables, and partitioned tables at their root; without a schema those of the search_path."
        raise GdqError(f"no table matches {pattern.text}", hint=hint)
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
    differing = call(connection, "differing_options", queue, table.shown, Jsonb(options)) if options else []
    if differing:
        raise GdqError(
            f"table {table.shown} is already captured by this queue with other options: {', '.join(differing)}",
            hint="gdq alter-table changes them.",
        )


def _wait_until_idle(connection: Connection[Any], table: ChosenTable, locks_max: int) -> None:
    """Wait without a lock until nobody writes to a table; GdqError if the server would run short of locks."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        busy, locks = connection.execute(_LOCKS, [table.oid, table.oid]).fetchone() or (False, 0)
        if locks > locks_max // 2:
            raise GdqError(
                f"too many tables for one transaction: {locks} of the server's {locks_max} locks before {table.shown}",
                hint="Add fewer tables at once, or raise max_locks_per_transaction.",
            )
        if not busy:
            return
        if time.monotonic() > deadline:
            error = LockNotAvailable(f"table {table.shown} is busy: no lock within 500 ms")
            error.add_note("Hint: Nothing was changed. Try again when no long transaction holds the table.")
            raise error
        time.sleep(0.005)
