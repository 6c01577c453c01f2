"""Which rights on a replica's tables a role lacks: the server's error names neither role nor side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import Connection

from gdq.sql_text import quote

_WRITES = ("select", "insert", "update", "delete", "truncate")

_LACKING = """
select current_user::text, t.name, string_agg(p.privilege, ', ' order by p.place)
  from unnest(%s::text[]) t(name), unnest(%s::text[]) with ordinality p(privilege, place)
 where to_regclass(t.name) is not null and not has_table_privilege(t.name, p.privilege)
 group by t.name order by t.name"""

# What the replica needs beside its tables: where it stages changes, and what it stores.
_LACKING_BESIDE = """
select current_user::text, lacking
  from unnest(array[
         (select format('temporary on database %I', d.datname) from pg_database d
           where d.datname = current_database() and not has_database_privilege(d.oid, 'temporary')),
         (select 'usage on schema gdq_target' from pg_namespace n
           where n.nspname = 'gdq_target' and not has_schema_privilege(n.oid, 'usage'))]) lacking
 where lacking is not null"""


@contextmanager
def rights_told(
    source: Connection[Any], target: Connection[Any], tables: Callable[[], Collection[str]]
) -> Iterator[None]:
    """Give an error of the block that is about rights a hint: what is to be granted, to whom, on which side.

    `tables`: the names of the replica's tables.
    """
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        with suppress(psycopg.Error):
            if hint := _hint(source, target, tables()):
                error.add_note(f"Hint: {hint}")
        raise


def _hint(source: Connection[Any], target: Connection[Any], tables: Collection[str]) -> str:
    found = []
    for side, connection, wanted in (("source", source, ("select",)), ("target", target, _WRITES)):
        lacking = connection.execute(_LACKING, [list(tables), list(wanted)]).fetchall()
        grants = [f"grant {rights} on {table} to {quote(role)}" for role, table, rights in lacking]
        if side == "target":
            beside = connection.execute(_LACKING_BESIDE).fetchall()
            grants = [f"grant {rights} to {quote(role)}" for role, rights in beside] + grants
        found += [f"Say in the {side}: {'; '.join(grants)}"] if grants else []
    return ". ".join(found)
