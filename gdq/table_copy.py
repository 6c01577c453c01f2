"""Copies of a captured table: what a consumer makes after ResyncRequired, at a snapshot that gdq then knows."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection
from psycopg.rows import dict_row

from gdq.call import call, scalar
from gdq.conninfo import connect, conninfo_of
from gdq.sql_text import raw

_FETCH_ROWS = 5_000

_cursor_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class TableCopy:
    """A table as one snapshot sees it, readable until the block that gave it ends.

    `snapshot` is the pg_snapshot, `exported` the name under which other sessions import it (SET TRANSACTION SNAPSHOT).
    """

    table: str
    snapshot: str
    exported: str
    connection: Connection[Any]

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows, streamed through a cursor of the server."""
        name = f"gdq_copy_{next(_cursor_numbers)}"
        with self.connection.cursor(name, row_factory=dict_row) as cursor:
            cursor.itersize = _FETCH_ROWS
            yield from cursor.execute(raw(f"select * from {self.table}"))


@contextlib.contextmanager
def copy_table(dsn: str | None, table: str) -> Iterator[TableCopy]:
    """Open a table at a snapshot that is exported, on a connection of its own that lives as long as the block.

    The lock comes before the snapshot: after a TRUNCATE or rewrite in between the table would read as empty.
    `table`: its name as SQL has it. Rows that row level security would hide are an error.
    """
    with connect(dsn, application_name="gdq:copy") as connection:
        query = """select pg_catalog.format('%%I.%%I', n.nspname, c.relname)
                     from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                    where c.oid = %s::pg_catalog.regclass"""
        name = str(scalar(connection, query, table))
        connection.rollback()
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        connection.execute("set local row_security = off")
        connection.execute(raw(f"lock table {name} in access share mode"))
        row = connection.execute(
            "select pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_export_snapshot()"
        ).fetchone()
        if row is None:
            raise AssertionError("a SELECT without FROM gave no row")
        yield TableCopy(name, row[0], row[1], connection)
        connection.rollback()


@contextlib.contextmanager
def resync(connection: Connection[Any], queue: str, consumer: str, table: str) -> Iterator[TableCopy]:
    """Copy a table anew for a consumer: open it at a snapshot, and note at the end that the consumer has it.

    Both happen in one transaction of `connection`, which must be idle, in autocommit: what the block writes there
    commits together with it, or nothing does. The errors are those of resynced().
    """
    with connection.transaction(), copy_table(conninfo_of(connection), table) as copy:
        yield copy
        resynced(connection, queue, consumer, table, copy.snapshot)


def resynced(connection: Connection[Any], queue: str, consumer: str, table: str | None, snapshot: str) -> None:
    """Note that a consumer has copied a table as of a snapshot; changes before it are not delivered again.

    In the transaction that stored the copy; a batch that is open becomes stale. `table` None: messages were lost, and
    the consumer knows. TruncatedPosition when the snapshot lies before the consumer's position; ResyncRequired when
    capture has missed changes since the snapshot: copy again.
    """
    call(connection, "resynced", queue, consumer, table, snapshot)
