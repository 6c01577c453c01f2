"""The server's description of a view's tables and of its SQL, under the view's stored settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from psycopg import Connection, sql
from psycopg.rows import dict_row

from gdq.errors import mapped_errors
from gdq.owner_sql import OwnerSql, act_as
from gdq.plan.table import TableColumn, TableSchema
from gdq.qualified_sql import qualified
from gdq.sql_text import pin_transaction, raw
from gdq.typed.pgtypes import READ_SETTINGS


def load_schema(connection: Connection[Any], queue: str, table: str) -> TableSchema:
    """A captured table's columns, and the part that its log holds; psycopg.errors.UndefinedObject if not captured."""
    return load_schemas(connection, queue, [table])[0]


def load_schemas(connection: Connection[Any], queue: str, tables: Sequence[str]) -> list[TableSchema]:
    """The schemas of captured tables by one statement; errors as load_schema()."""
    query = qualified("""
        select i, n.nspname, c.relname, a.attnum, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod) as type,
               coalesce(l.is_key, false) as is_key, l.log_key is not null as log_key,
               l.log_old is not null and not l.omitted as images,
               coalesce(not o.collisdeterministic, false) as folded, c.relkind = 'p' as partitioned,
               c.relkind <> 'p'
                 and exists (select from pg_catalog.pg_inherits h where h.inhparent = c.oid) as has_children
          from pg_catalog.unnest(%(tables)s::text[]::pg_catalog.regclass[]) with ordinality as t(relid, i)
          join pg_catalog.pg_class c on c.oid = t.relid
          join pg_catalog.pg_namespace n on n.oid = c.relnamespace
          left join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
          left join pg_catalog.pg_collation o on o.oid = a.attcollation
          left join (select u.relid, l.* from pg_catalog.unnest(%(tables)s::text[]::pg_catalog.regclass[]) u(relid),
                                              gdq.table_columns(%(queue)s, u.relid) l) l
            on l.relid = c.oid and l.attnum = a.attnum
         order by i, a.attnum""")
    with mapped_errors(), connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(query, {"queue": queue, "tables": list(tables)}, prepare=True).fetchall()
    return [_schema([row for row in rows if row["i"] == number]) for number in range(1, len(tables) + 1)]


def _schema(rows: Sequence[Mapping[str, Any]]) -> TableSchema:
    columns = tuple(
        TableColumn(row["attname"], row["type"], row["is_key"], row["images"], row["folded"], row["attnum"])
        for row in rows
        if row["attname"] is not None
    )
    mode: Literal["full", "pk"] = "pk" if any(row["log_key"] for row in rows) else "full"
    first = rows[0]
    return TableSchema(first["nspname"], first["relname"], mode, columns, first["partitioned"], first["has_children"])


def describe_query(connection: Connection[Any], query: str, settings: Mapping[str, str]) -> list[tuple[str, int, str]]:
    """Name, type oid and type with typmod (schema-qualified unless in pg_catalog) of each column of `query`.

    `query` is analyzed under `settings`, but reads and writes no rows. With a role in `settings` it is analyzed as that
    role.
    """
    with connection.transaction(force_rollback=True):
        apply_view_settings(connection, settings)
        if "role" in settings:
            return OwnerSql(connection, settings["role"]).columns(query)
        with connection.cursor() as cursor:
            cursor.execute(sql.SQL("select * from ({}) as q limit 0").format(raw(query)))
            result = cursor.pgresult
            columns = [(c.name, c.type_code, result.fmod(n)) for n, c in enumerate(cursor.description or ()) if result]
        pin_transaction(connection)
        types = connection.execute(
            qualified(
                """select format_type(t.oid, t.typmod)
                     from rows from (unnest(%s::oid[]), unnest(%s::int[])) as t(oid, typmod)"""
            ),
            [[oid for _, oid, _ in columns], [typmod for _, _, typmod in columns]],
        ).fetchall()
        return [(name, oid, kind) for (name, oid, _), (kind,) in zip(columns, types, strict=True)]


def apply_view_settings(connection: Connection[Any], settings: Mapping[str, str]) -> None:
    """Set READ_SETTINGS, and over them `settings`, until the transaction ends.

    With a `role` among them the view's own SQL is to run by OwnerSql, for which the session gets its functions.
    """
    settings = {**READ_SETTINGS, **settings}
    query = """select pg_catalog.set_config(s.name, s.value, true)
                 from rows from (pg_catalog.unnest(%s::pg_catalog.text[]), pg_catalog.unnest(%s::pg_catalog.text[]))
                   as s(name, value)"""
    connection.execute(query, [list(settings), list(settings.values())])
    if "role" in settings:
        act_as(connection, settings["role"])
