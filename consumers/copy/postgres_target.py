"""A PostgreSQL database as the target of a copy: its tables checked, made and emptied, rows written, all or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.conninfo import connect
from gdq.consumers.copy.leader import COPY_SETTINGS, CopyLead
from gdq.consumers.copy.pieces import Piece
from gdq.consumers.copy.table_definition import create_table, sequence_values
from gdq.consumers.copy.target_columns import rows_of, target_form
from gdq.consumers.copy.wal_writer import wal_writer_awake
from gdq.consumers.copy.workers import CopyTally
from gdq.consumers.views.row_copy import CopyForm, RowsCopied, copy_rows
from gdq.errors import GdqError
from gdq.schema_usage import require_schema_usage
from gdq.sql_text import raw

# Advisory locks are of one database: what the leader has locked, a session of the same database cannot have.
_MARK = "select pg_advisory_xact_lock(%s)"
_MARKED = "select not pg_try_advisory_xact_lock(%s)"

_HAS_ROWS = "select exists (select from {})"

_CAN_PASS_TRIGGERS = "select has_parameter_privilege('session_replication_role', 'set')"


class PostgresTarget:
    """Tables of the same names in another database.

    They are empty before the copy and, if it fails, after it. Every worker writes in one transaction, and all commit
    when all pieces are there. `complete` is called then in a transaction that commits last, with its connection and the
    snapshot.
    """

    takes_generated = False

    def __init__(
        self,
        dsn: str,
        *,
        create: bool = False,
        truncate: bool = False,
        complete: Callable[[Connection[Any], str], None] | None = None,
    ) -> None:
        self._dsn, self._create, self._truncate, self._complete = dsn, create, truncate, complete
        self._forms: dict[str, CopyForm] = {}
        self._created: list[str] = []
        self._writers: list[PostgresPieceWriter] = []
        self._committed = False

    def prepare(self, lead: CopyLead) -> None:
        """Check the target's tables, make or empty them; GdqError if one does not fit, or has rows."""
        leader, created = lead.holder.connection, []
        with connect(self._dsn, application_name="gdq:copy/target") as control:
            control.execute(raw(COPY_SETTINGS))
            _refuse_source(leader, control)
            require_schema_usage(control, [table.name for table in lead.tables], "target")
            for table in lead.tables:
                if scalar(control, "select to_regclass(%s) is null", table.name):
                    if not self._create:
                        raise GdqError(
                            f"the target has no table {table.name}", hint="Create it there, or copy with --create."
                        )
                    create_table(leader, control, table)
                    created.append(table.name)
                self._forms[table.name] = target_form(control, table)
            names = [table.name for table in lead.tables if table.name not in created]
            if self._truncate and names:
                control.execute(raw(f"truncate {', '.join(rows_of(control, name) for name in names)}"))
            for name in names:
                if scalar(control, raw(_HAS_ROWS.format(rows_of(control, name)))):
                    raise GdqError(f"table {name} of the target has rows", hint="Empty it, or copy with --truncate.")
            for table in lead.tables:
                for statement, values in sequence_values(leader, control, table):
                    control.execute(raw(statement), values)
        self._created = created

    def writers(self, number: int) -> Sequence[PostgresPieceWriter]:
        """The target's ends of this many workers."""
        for n in range(1, number + 1):
            self._writers.append(PostgresPieceWriter(self._dsn, n, self._forms))
        return self._writers

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Keep the target's WAL writer at work."""
        return wal_writer_awake(self._dsn, "gdq:copy")

    def commit(self, lead: CopyLead, tally: CopyTally, position: str | None) -> None:  # noqa: ARG002 (for other targets)
        """Commit what all workers have written, then the transaction of `complete`."""
        with connect(self._dsn, application_name="gdq:copy/target") as control:
            if self._complete is not None:
                self._complete(control, lead.holder.snapshot)
            for writer in self._writers:
                self._committed = True
                writer.commit()

    def undo(self) -> None:
        """Take back what the copy has done to the target; the tables are empty then."""
        for writer in self._writers:
            writer.close()
        if not self._created and not self._committed:
            return
        with connect(self._dsn, application_name="gdq:copy/target") as control:
            if self._created:
                control.execute(raw(f"drop table if exists {', '.join(self._created)}"))
            kept = [name for name in self._forms if name not in self._created]
            if self._committed and kept:
                control.execute(raw(f"truncate {', '.join(rows_of(control, name) for name in kept)}"))


def _refuse_source(leader: Connection[Any], control: Connection[Any]) -> None:
    """GdqError if the target is the database that is copied."""
    key = scalar(leader, "select pg_backend_pid() + (extract(epoch from now()) * 1e6)::bigint")
    leader.execute(_MARK, [key])
    if scalar(control, _MARKED, key):
        raise GdqError("the target is the database of the tables itself", hint="Name another database.")


class PostgresPieceWriter:
    """One session of the target, whose transaction holds all pieces of one worker."""

    def __init__(self, dsn: str, number: int, forms: dict[str, CopyForm]) -> None:
        self._forms = forms
        self._connection = connect(dsn, application_name=f"gdq:copy/{number}")
        try:
            self._connection.execute(raw(COPY_SETTINGS))
            if scalar(self._connection, _CAN_PASS_TRIGGERS):
                # what triggers and foreign keys made of the rows at the source comes along with them
                self._connection.execute("set local session_replication_role = replica")
        except BaseException:
            self._connection.close()
            raise

    def write(self, reader: Connection[Any], piece: Piece, moved: Callable[[int], None]) -> RowsCopied:
        """Copy a piece."""
        table = piece.table
        into = f"{table.name} ({table.listed})"
        return copy_rows(reader, piece.copied(), self._connection, into, form=self._forms[table.name], moved=moved)

    def cancel(self) -> None:
        """End the statement at hand."""
        with contextlib.suppress(psycopg.Error):
            self._connection.cancel_safe()

    def commit(self) -> None:
        """Make the rows visible."""
        self._connection.commit()

    def close(self) -> None:
        """End the session; its transaction is rolled back unless it has committed."""
        self._connection.close()
