"""Schemas of tables, and whether a session's role may use them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from psycopg import Connection

from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.sql_text import quote

# Schemas of tables that exist, and that the session's role may not look into.
_CLOSED = qualified("""
select current_user::text, string_agg(distinct quote_ident(n.nspname), ', ' order by quote_ident(n.nspname))
  from unnest(%s::text[]) t join pg_catalog.pg_namespace n on n.nspname = (parse_ident(t))[1]
 where not has_schema_privilege(n.oid, 'usage')""")


def require_schema_usage(connection: Connection[Any], tables: Collection[str], side: str | None = None) -> None:
    """GdqError for tables, named with their schemas, whose schemas the session's role may not use.

    `side`: which of two databases it is, for the error.
    """
    row = connection.execute(_CLOSED, [list(tables)]).fetchone()
    if row is not None and row[1] is not None:
        where = "" if side is None else f" of the {side}"
        raise GdqError(
            f"role {row[0]} may not use schema {row[1]}{where}",
            hint=f"Say there: grant usage on schema {row[1]} to {quote(row[0])}",
        )
