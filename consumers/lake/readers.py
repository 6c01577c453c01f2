"""Sessions of the Arrow driver that read the rows of a table side by side, at a snapshot that another session holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

import psycopg

from gdq.conninfo import conninfo_of
from gdq.consumers.lake.data_files import RowPart
from gdq.consumers.lake.types import LakeColumn, lake_batch, lake_rows_sql
from gdq.consumers.views.signals import TableWanted
from gdq.consumers.views.snapshot_holder import READER_LOCK_TIMEOUT
from gdq.typed.arrow import arrow_server_errors, connect_arrow
from gdq.typed.copy_rows import join_snapshot

if TYPE_CHECKING:
    from adbc_driver_postgresql.dbapi import Connection


# The driver's own 16 MB are more than a processor's cache holds: they take it half as long again.
# https://arrow.apache.org/adbc/current/driver/postgresql.html
_BATCH_OPTION = "adbc.postgresql.batch_size_hint_bytes"
_BATCH_BYTES = 2**21


class LakeReaders:
    """Sessions in the database of `beside`, made when they are needed, and kept for later snapshots; close them."""

    def __init__(self, beside: psycopg.Connection[Any]) -> None:
        self._beside = beside
        self._idle: list[Connection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the sessions."""
        while self._idle:
            self._idle.pop().close()

    @contextlib.contextmanager
    def at(self, exported: str, locked: str) -> Iterator[SnapshotReaders]:
        """The readers at a snapshot that the block's caller holds, with its locks, until the block ends.

        `exported`: the snapshot's name; `locked`: relations as LOCK TABLE names them.
        """
        readers = SnapshotReaders(self._beside, exported, locked, self._idle)
        try:
            yield readers
            readers.end(self._idle)
        finally:
            readers.close()


@dataclass(slots=True)
class SnapshotReaders:
    """Readers at one snapshot. `spare`: sessions that have none."""

    beside: psycopg.Connection[Any]
    exported: str
    locked: str
    spare: list[Connection]
    _joined: list[Connection] = field(default_factory=list)
    _busy: list[Connection] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def rows(self, select: str, columns: Sequence[LakeColumn]) -> RowPart:
        """The rows of a SELECT of a lake's columns, read by a session that is free, for any thread.

        TableWanted if somebody waits for the table, who would wait for this session's snapshot.
        """
        with arrow_server_errors():
            session = self._taken()
            try:
                with session.cursor() as cursor:
                    cursor.adbc_statement.set_options(**{_BATCH_OPTION: str(_BATCH_BYTES)})
                    cursor.execute(lake_rows_sql(select, columns))
                    for batch in cursor.fetch_record_batch():
                        yield lake_batch(batch, columns)
            except BaseException:
                self._free(session)
                session.close()
                raise
            self._free(session)
            self._joined.append(session)

    def cancel(self) -> None:
        """Have what is being read end with an error."""
        with self._lock:
            for session in self._busy:
                with suppress(Exception):  # it has ended meanwhile
                    session.adbc_cancel()

    def end(self, spare: list[Connection]) -> None:
        """Give the snapshot back; the sessions are spare ones then."""
        with arrow_server_errors():
            while self._joined:
                session = self._joined[-1]
                session.rollback()
                spare.append(self._joined.pop())

    def close(self) -> None:
        """End the sessions that still have the snapshot."""
        while self._joined:
            self._joined.pop().close()

    def _taken(self) -> Connection:
        with self._lock:
            session = self._joined.pop() if self._joined else None
            if session is not None:
                self._busy.append(session)
                return session
            spare = self.spare.pop() if self.spare else None
        session = connect_arrow(conninfo_of(self.beside)) if spare is None else spare
        with self._lock:
            self._busy.append(session)
        try:
            with session.cursor() as cursor:
                join_snapshot(
                    cursor,
                    self.exported,
                    f"set local lock_timeout = '{READER_LOCK_TIMEOUT}'",
                    f"lock table {self.locked} in access share mode",
                    "set local lock_timeout = 0",
                )
        except BaseException as error:
            self._free(session)
            session.close()
            if getattr(error, "sqlstate", None) == psycopg.errors.LockNotAvailable.sqlstate:
                raise TableWanted(str(error).splitlines()[0]) from error
            raise
        return session

    def _free(self, session: Connection) -> None:
        with self._lock:
            self._busy.remove(session)
