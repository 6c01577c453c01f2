"""Tables of a replica's target that are made, renamed and dropped as those of the source are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import psycopg
from psycopg import Connection
from psycopg.rows import namedtuple_row

from gdq.call import scalar
from gdq.consumers.copy import table_definition
from gdq.consumers.copy.pieces import CopyChoice, describe_source_table
from gdq.consumers.replica.state import ReplicaState
from gdq.errors import GdqError
from gdq.sql_text import quote, raw

# What becomes of a target table whose table was dropped in the source.
OnDrop = Literal["keep", "drop"]

_PRIMARY_KEY = """
select array(select a.attname::text from unnest(c.conkey) k
               join pg_attribute a on a.attrelid = c.conrelid and a.attnum = k order by 1)
  from pg_constraint c where c.conrelid = %s::regclass and c.contype = 'p'"""

_DEFAULTS = f"""
select a.attname as name, pg_get_expr(d.adbin, d.adrelid) as expression,
       (select format('%%I.%%I', n.nspname, s.relname) from pg_class s join pg_namespace n on n.oid = s.relnamespace
         where s.oid = q.seqrelid) as sequence, format_type(q.seqtypid, null) as sequence_type,
       {table_definition.SEQUENCE_OPTIONS} as sequence_options
  from pg_attribute a
  join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
  left join pg_depend o on o.classid = 'pg_class'::regclass and o.refclassid = 'pg_class'::regclass
        and o.refobjid = a.attrelid and o.refobjsubid = a.attnum and o.deptype = 'a'
  left join pg_sequence q on q.seqrelid = o.objid
 where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped and a.attgenerated = '' and a.attidentity = ''
 order by a.attnum"""


def is_missing(target: Connection[Any], table: str) -> bool:
    """True if the target has nothing of this name."""
    return bool(scalar(target, "select to_regclass(%s) is null", table))


def create_schemas(target: Connection[Any], tables: Sequence[str]) -> None:
    """Make the schemas that tables, which will be made in sessions side by side, lack in the target."""
    query = "select distinct quote_ident((parse_ident(n))[1]) from unnest(%s::text[]) n"
    for (schema,) in target.execute(query, [list(tables)]).fetchall():
        if scalar(target, "select to_regnamespace(%s) is null", schema):
            with _refusals(f"schema {schema} cannot be made in the target"):
                target.execute(raw(f"create schema {schema}"))


def create_table(
    source: Connection[Any],
    target: Connection[Any],
    table: str,
    columns: Sequence[str],
    key: Sequence[str],
    *,
    tell: Callable[[str], None],
) -> None:
    """Make a table in the open transaction of the target, as the open transaction of the source sees it.

    It gets the captured columns with their defaults, NOT NULL, the primary key, and a unique index over `key`, by
    which rows are found, if that is another one. Defaults that the target does not take are told. GdqError if it does
    not take the table.
    """
    whole = describe_source_table(source, CopyChoice(table))
    captured = replace(whole, columns=tuple(column for column in whole.columns if column.name in columns))
    primary = source.execute(_PRIMARY_KEY, [table]).fetchone()
    with _refusals(f"table {table} cannot be made in the target"), target.transaction():
        table_definition.create_table(source, target, captured)
        if key and (primary is None or primary[0] != sorted(key)):
            target.execute(raw(f"create unique index on {table} ({', '.join(map(quote, key))})"))
    with source.cursor(row_factory=namedtuple_row) as cursor:
        defaults: list[Any] = cursor.execute(_DEFAULTS, [table]).fetchall()
    for default in defaults:
        if default.name in columns:
            _set_default(target, table, default, tell)


def _set_default(target: Connection[Any], table: str, default: Any, tell: Callable[[str], None]) -> None:
    """Give a column its default, and the sequence that belongs to it; tell if the target does not take it."""
    column = f"{table}.{quote(default.name)}"
    try:
        with target.transaction():
            if default.sequence is not None:
                options = f"{default.sequence_options} owned by {column}"
                target.execute(raw(f"create sequence {default.sequence} as {default.sequence_type} {options}"))
            target.execute(
                raw(f"alter table {table} alter column {quote(default.name)} set default {default.expression}")
            )
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        tell(f"column {column} of the target has no default {default.expression}: {error.diag.message_primary}")


def rename_table(state: ReplicaState, table: str, name: str) -> None:
    """Give a table of the target the name that it has in the source by now, in the open transaction.

    One that others have renamed so is left as it is. GdqError if the target refuses, or if another source's rows are in
    a table that had that name.
    """
    target = state.connection
    if is_missing(target, table) and not is_missing(target, name):
        state.renamed(table, name)
        return
    if other := state.shared_with(name):
        raise GdqError(
            f"table {table} is {name} in the source by now, and replica {other} of another source has a table {name}",
            hint="Names change hands one at a time, by way of names that are free: let all sources rename a table, and "
            "all replicas arrive, before the next one gets its name.",
        )
    rename_in_target(target, table, name)
    state.renamed(table, name)


def rename_in_target(target: Connection[Any], table: str, name: str) -> None:
    """Give a table of the target another name, in the open transaction; GdqError if the target refuses."""
    row = target.execute("select parse_ident(%s), parse_ident(%s)", [table, name]).fetchone()
    assert row is not None
    (schema, _), (new_schema, new_relation) = ([quote(part) for part in parts] for parts in row)
    with (
        _refusals(f"table {table} is {name} in the source by now, and cannot be renamed in the target"),
        target.transaction(),
    ):
        if new_schema == schema:
            target.execute(raw(f"alter table {table} rename to {new_relation}"))
        else:
            # by way of a name that no other table has: its own in the new schema, or the new one in the old schema, may
            between = quote("!gdq_renamed")
            target.execute(raw(f"create schema if not exists {new_schema}"))
            target.execute(raw(f"alter table {table} rename to {between}"))
            target.execute(raw(f"alter table {schema}.{between} set schema {new_schema}"))
            target.execute(raw(f"alter table {new_schema}.{between} rename to {new_relation}"))


def leave_table(
    state: ReplicaState, table: str, *, dropped: bool, on_drop: OnDrop, tell: Callable[[str], None]
) -> None:
    """Follow a table no longer, in the open transaction: the source has dropped it, or captures it no longer."""
    if not dropped:
        tell(f"{table} is no longer among the tables that replica {state.name} takes: its copy stands still")
    elif on_drop == "keep":
        tell(f"{table} was dropped in the source: its copy stays in the target")
    else:
        try:
            with state.connection.transaction():
                state.connection.execute(raw(f"drop table if exists {table}"))
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            tell(f"{table} was dropped in the source, and the target keeps it: {error.diag.message_primary}")
        else:
            tell(f"{table} was dropped in the source, and in the target")
            state.forget(table)
            return
    state.left(table)


@contextmanager
def _refusals(failed: str) -> Iterator[None]:
    """Turn what the target refuses in the block into a GdqError that begins with `failed`."""
    try:
        yield
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        raise GdqError(
            f"{failed}: {error.diag.message_primary}",
            hint="Make there what it lacks, or have a role do it that may; then start again.",
        ) from error
