"""The two sessions of a replica: one in the source, one in the target, under settings that give texts alike."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from psycopg import Connection

from gdq.conninfo import connect, is_pooled
from gdq.consumers.replica.origin import BearingConnection
from gdq.errors import GdqError
from gdq.schema_usage import require_schema_usage
from gdq.typed.pgtypes import READ_SETTINGS

_DATABASE = """
select c.system_identifier::text, (select d.oid from pg_database d where d.datname = current_database())
  from pg_control_system() c"""

_DURABLE = """
select pg_catalog.set_config('synchronous_commit', 'local', false)
 where pg_catalog.current_setting('synchronous_commit') = 'off'"""


def open_sessions(
    stack: ExitStack, source: str | None, target: str, application_name: str
) -> tuple[Connection[Any], Connection[Any]]:
    """Sessions in autocommit in the source and in the target, which end with `stack`; GdqError behind a pooler."""
    opened = []
    kinds: list[type[Connection[Any]]] = [Connection, BearingConnection]
    for conninfo, kind in zip((source, target), kinds, strict=True):
        one = stack.enter_context(connect(conninfo, application_name=application_name, autocommit=True, kind=kind))
        if is_pooled(one):
            raise GdqError("a replica needs sessions of its own", hint="Connect to the servers, past the pooler.")
        apply_settings(one)
        opened.append(one)
    commit_for_good(opened[1])
    return opened[0], opened[1]


def commit_for_good(target: Connection[Any]) -> None:
    """Have a session's commits wait for the disk, whatever its role's settings: the source forgets what was applied."""
    target.execute(_DURABLE)


def apply_settings(connection: Connection[Any]) -> None:
    """Give a session the settings under which values are written and read as the same text everywhere."""
    for name, value in READ_SETTINGS.items():
        connection.execute("select pg_catalog.set_config(%s, %s, false)", [name, value])


def database_identity(connection: Connection[Any]) -> Any:
    """What no two databases share: the server's identifier and the database's number."""
    return connection.execute(_DATABASE).fetchone()


def check_databases(source: Connection[Any], target: Connection[Any]) -> None:
    """GdqError if both sessions are in one database."""
    if database_identity(source) == database_identity(target):
        raise GdqError("source and target are the same database", hint="--to names the target.")


def require_usage(source: Connection[Any], target: Connection[Any], tables: Collection[str]) -> None:
    """GdqError for tables whose schemas a session's role may not use."""
    require_schema_usage(source, tables, "source")
    require_schema_usage(target, tables, "target")
