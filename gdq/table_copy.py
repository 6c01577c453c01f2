"""Copies of a captured table at a snapshot, which a consumer makes after ResyncRequired and reports to gdq."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection
from psycopg.rows import dict_row

from gdq.call import call, scalar
from gdq.conninfo import Connectable, connect, conninfo_from
from gdq.extra import extra_named
from gdq.qualified_sql import qualified
from gdq.sql_text import raw
from gdq.typed.arrow import arrow_schema
from gdq.typed.copy_rows import read_table_copy, table_copy_columns
from gdq.typed.pgtypes import OnUnsupported

if TYPE_CHECKING:
    import pyarrow as pa

_FETCH_ROWS = 5_000

_cursor_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class TableCopy:
    """A table as one snapshot sees it, readable until the end of the block that opened it.

    `snapshot` is the pg_snapshot, `exported` the name under which other sessions import it (SET TRANSACTION SNAPSHOT).
    """

    table: str
    snapshot: str
    exported: str
    connection: Connection[Any]

    def rows(self) -> Iterator[dict[str, Any]]:
        """The table's rows and those of its partitions, streamed through a cursor of the server.

        Rows of inheritance children are not among them: a child has a log and a copy of its own.
        """
        name = f"gdq_copy_{next(_cursor_numbers)}"
        with self.connection.cursor(name, row_factory=dict_row) as cursor:
            cursor.itersize = _FETCH_ROWS
            yield from cursor.execute(raw(f"select * from {self._relation()}"))

    @extra_named()
    def arrow(self, *, unsupported: OnUnsupported = "error", as_text: Collection[str] = ()) -> pa.Table:
        """All rows as one Arrow table; see arrow_batches()."""
        import pyarrow as pa  # noqa: PLC0415 (an extra, and slow to load)

        columns = table_copy_columns(self.connection, self.table, unsupported, as_text)
        rows = read_table_copy(self.connection, self.exported, self._relation(), columns)
        return pa.Table.from_batches(rows, schema=arrow_schema(columns))

    @extra_named()
    def arrow_batches(
        self, *, unsupported: OnUnsupported = "error", as_text: Collection[str] = ()
    ) -> Iterator[pa.RecordBatch]:
        """The rows that rows() gives, typed as the changes of a batch are, streamed on another connection.

        UnsupportedValue names a column that Arrow cannot hold. To read such columns as text, set `unsupported` to
        "text" (all types that Arrow lacks) or name them in `as_text`.
        """
        import pyarrow as pa  # noqa: F401, PLC0415 (missed here, not at the first row)

        columns = table_copy_columns(self.connection, self.table, unsupported, as_text)
        return read_table_copy(self.connection, self.exported, self._relation(), columns)

    def _relation(self) -> str:
        query = qualified("select c.relkind = 'p' from pg_catalog.pg_class c where c.oid = %s::pg_catalog.regclass")
        return self.table if scalar(self.connection, query, self.table) else f"only {self.table}"


@contextlib.contextmanager
def copy_table(connection: Connectable, table: str) -> Iterator[TableCopy]:
    """Open a table at an exported snapshot, on a separate connection that is closed after the block.

    `table`: its name as in SQL. Rows hidden by row level security raise an error. The table is locked before the
    snapshot is taken: after a TRUNCATE or rewrite in between it would read as empty.
    """
    with connect(conninfo_from(connection), application_name="gdq:copy") as reader:
        query = qualified("""select pg_catalog.format('%%I.%%I', n.nspname, c.relname)
                     from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                    where c.oid = %s::pg_catalog.regclass""")
        name = str(scalar(reader, query, table))
        reader.rollback()
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.read_only = True
        reader.execute("set local row_security = off")
        reader.execute(raw(f"lock table {name} in access share mode"))
        row = reader.execute(
            qualified("select pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_export_snapshot()")
        ).fetchone()
        if row is None:
            raise AssertionError("a SELECT without FROM gave no row")
        yield TableCopy(name, row[0], row[1], reader)
        reader.rollback()


@contextlib.contextmanager
def resync(connection: Connection[Any], queue: str, consumer: str, table: str) -> Iterator[TableCopy]:
    """Copy a table again for a consumer: open it at a snapshot, and record after the block that the consumer has it.

    The block's writes on `connection`, which must be idle and in autocommit, and the record commit in one transaction.
    Errors as for resynced().
    """
    with connection.transaction(), copy_table(connection, table) as copy:
        yield copy
        resynced(connection, queue, consumer, table, copy.snapshot)


def resynced(connection: Connection[Any], queue: str, consumer: str, table: str | None, snapshot: str) -> None:
    """Record that a consumer has copied a table as of a snapshot; changes before it are not delivered again.

    Call it in the transaction that stored the copy; an open batch becomes stale. `table` None: the consumer accepts
    that messages were lost. TruncatedPosition if the snapshot is before the consumer's position; ResyncRequired if
    capture has missed changes since the snapshot: copy again.
    """
    call(connection, "resynced", queue, consumer, table, snapshot)
