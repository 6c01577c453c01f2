"""The one transaction whose snapshot all readers of a refresh share, and connection strings that carry no password."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.conninfo import connect
from gdq.errors import GdqError, mapped

_LOCK_TRIES = 5

# What the leader has locked its readers wait for only behind a statement that itself waits for the leader.
READER_LOCK_TIMEOUT = "1s"
# How often it is let pass in one refresh.
WANTED_TRIES = 10

_SEGMENTS = """
select pg_catalog.format('%%I.%%I', n.nspname, c.relname)
  from gdq.log_segments(%s, %s::text[]::pg_catalog.regclass[]) s
  join pg_catalog.pg_class c on c.oid = s join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 order by 1"""

# The first statement after the locks takes the snapshot. The batch is asked for only to see that it is still open.
_SNAPSHOT = f"""
select pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_export_snapshot(), array({_SEGMENTS}),
       (select count(*) from (select %s::bigint as id, %s::uuid as token) b, gdq.batch_tables(b.id, b.token)
         where b.id is not null)"""


class TableWantedError(GdqError):
    """A TRUNCATE or ALTER TABLE waits for the leader, and a reader behind it: no deadlock that the server can see.

    The leader must end, so that it gets its turn; then all may begin again.
    """


@dataclass(frozen=True, slots=True)
class Leader:
    """An open REPEATABLE READ transaction that holds ACCESS SHARE on everything its readers read.

    `snapshot` is the pg_snapshot that all of them see, `exported` the name under which they import it, `locked` the
    relations, as SQL lists them.
    """

    connection: psycopg.Connection[Any]
    snapshot: str
    exported: str
    locked: str

    def join(self, connection: psycopg.Connection[Any]) -> None:
        """Let a transaction that has just begun see what the leader sees, and lock the same. TableWantedError."""
        exported = sql.Literal(self.exported).as_string(connection)
        try:
            connection.execute(
                f"set transaction isolation level repeatable read; set local lock_timeout = '{READER_LOCK_TIMEOUT}'; "
                f"lock table {self.locked} in access share mode; set local lock_timeout to default; "
                f"set transaction snapshot {exported}",
                prepare=False,
            )
        except psycopg.errors.LockNotAvailable as error:
            raise TableWantedError(str(error).splitlines()[0]) from error


@contextlib.contextmanager
def lead(
    source: str | psycopg.Connection[Any],
    queue: str,
    tables: Sequence[str],
    *,
    batch_id: int | None = None,
    token: str | None = None,
) -> Iterator[Leader]:
    """Lock the tables and their log segments, take and export a snapshot, and hold it until the block ends.

    `source`: where to, or a connection that is not in a transaction and serves no other purpose.

    Locks come before the snapshot: a TRUNCATE or rewrite after it would make a table read as empty. `batch_id` and
    `token`, of begin_refresh(), are checked under the locks: StaleBatch when another refresh has taken over.
    """
    with ExitStack() as stack:
        if isinstance(source, str):
            source = stack.enter_context(connect(source, application_name=f"gdq:{queue}/leader"))
        connection = source
        stack.enter_context(_ended(connection))
        connection.autocommit = True
        for _ in range(_LOCK_TRIES):
            segments = _segments(connection, queue, tables)
            names = ", ".join([*tables, *segments])
            begin = "begin isolation level repeatable read read only"
            connection.execute(f"{begin}; lock table {names} in access share mode", prepare=False)
            with mapped():
                row = connection.execute(_SNAPSHOT, [queue, list(tables), batch_id, token], prepare=True).fetchone()
            if row is not None and set(row[2]) <= set(segments):
                yield Leader(connection, row[0], row[1], names)
                return
            # A table got a new version between the list and the locks.
            connection.rollback()
    raise GdqError(f"the logs of {', '.join(tables)} changed {_LOCK_TRIES} times while they were being locked")


@contextlib.contextmanager
def _ended(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """The transaction that the block begins ends with it; the connection is as it was."""
    autocommit = connection.autocommit
    try:
        yield
        if not connection.closed:
            # it has written nothing; after a rollback psycopg would forget what the server has prepared and planned
            connection.commit()
    finally:
        if not connection.closed:
            connection.rollback()
            connection.autocommit = autocommit


def _segments(connection: psycopg.Connection[Any], queue: str, tables: Sequence[str]) -> list[str]:
    with mapped():
        row = connection.execute(f"select array({_SEGMENTS})", [queue, list(tables)], prepare=True).fetchone()
    return row[0] if row else []


@contextlib.contextmanager
def without_password(dsn: str) -> Iterator[str]:
    """`dsn` with its password in a file that only this account can read, for plans, logs and worker processes.

    The file is removed when the block ends. A connection string without a password stays as it is: workers on other
    machines find theirs by PGPASSFILE or a connection service.
    """
    parameters: dict[str, Any] = dict(conninfo_to_dict(dsn))
    password = parameters.pop("password", None)
    if not password:
        yield dsn
        return
    with tempfile.TemporaryDirectory(prefix="gdq-") as folder:
        path = Path(folder) / "pgpass"
        path.touch(mode=0o600)
        escaped = str(password).replace("\\", "\\\\").replace(":", "\\:")
        path.write_text(f"*:*:*:*:{escaped}{os.linesep}")
        yield make_conninfo(**(parameters | {"passfile": str(path)}))


def for_other_machines(dsn: str, given: str) -> str:
    """What without_password() made, for machines that have no file of this one's.

    A password that libpq found here in a file or the environment they find by what they have themselves. One that was
    `given`, in the user's own connection string, stays in the file: it is good for workers on this machine only.
    """
    parameters: dict[str, Any] = dict(conninfo_to_dict(dsn))
    if not {"password", "passfile"} & conninfo_to_dict(given).keys():
        parameters.pop("passfile", None)
    return make_conninfo(**parameters)
