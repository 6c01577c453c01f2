"""The snapshot holder: the one transaction whose snapshot and locks all readers of a refresh share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import sql

from gdq.call import scalar
from gdq.conninfo import connect
from gdq.consumers.views.signals import TableWanted
from gdq.errors import GdqError, mapped_errors
from gdq.qualified_sql import qualified
from gdq.sql_text import PIN_TRANSACTION

_SEGMENT_TRIES = 5

# Shorter than the server's deadlock_timeout: a transaction of the application that has one table and waits for another
# would be the victim of a holder that has the other and waits for the one.
LOCK_TIMEOUT = "500ms"
_LOCK_PAUSE_SECONDS = 0.1

# A reader only ever waits behind a statement (TRUNCATE, ALTER) that itself waits for the snapshot holder: give up then.
READER_LOCK_TIMEOUT = "1s"

_SESSION_TIMEOUT = qualified(
    "select s.setting::pg_catalog.int4 from pg_catalog.pg_settings s where s.name operator(pg_catalog.=) 'lock_timeout'"
)

_SEGMENTS = qualified("""
select pg_catalog.format('%%I.%%I', n.nspname, c.relname)
  from gdq.log_segments(%s, %s::text[]::pg_catalog.regclass[]) s
  join pg_catalog.pg_class c on c.oid operator(pg_catalog.=) s::pg_catalog.oid
  join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) c.relnamespace
 order by 1""")

# The first statement after the locks takes the snapshot. view_stamp() raises StaleBatch for a batch that is not open.
_SNAPSHOT = """
select pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_export_snapshot(),
       array(select gdq.view_stamp(b.view, b.id, b.token)
               from rows from (pg_catalog.unnest(%s::text[]), pg_catalog.unnest(%s::bigint[]),
                               pg_catalog.unnest(%s::uuid[])) with ordinality as b(view, id, token, number)
              order by b.number)"""


@dataclass(frozen=True, slots=True)
class HeldView:
    """A view that is to be refreshed, with the id and the token of begin_refresh()."""

    name: str
    batch_id: int | None
    token: str | None


# The log segments that each session has locked last, by queue and tables, and the stamps of the views that read them.
_Known = dict[tuple[str, ...], tuple[list[str], list[str]]]
_known_segments: WeakKeyDictionary[psycopg.Connection[Any], _Known] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class SnapshotHolder:
    """An open REPEATABLE READ transaction that holds ACCESS SHARE on everything its readers read.

    `snapshot`: the pg_snapshot that all readers see; `exported`: the name to import it by; `locked`: the locked
    relations as a list in SQL; `stamps`: view_stamp() of the views that are refreshed.
    """

    connection: psycopg.Connection[Any]
    snapshot: str
    exported: str
    locked: str
    stamps: Sequence[str] = ()

    def release(self) -> None:
        """Give snapshot and locks back before the block ends, for those who have read all and go on elsewhere."""
        self.connection.commit()

    def join(self, connection: psycopg.Connection[Any]) -> None:
        """Give a transaction that has just begun the held snapshot and the holder's locks; may raise TableWanted."""
        exported = sql.Literal(self.exported).as_string(connection)
        try:
            connection.execute(
                f"set transaction isolation level repeatable read; set local lock_timeout = '{READER_LOCK_TIMEOUT}'; "
                f"lock table {self.locked} in access share mode; set local lock_timeout to default; "
                f"set transaction snapshot {exported}",
                prepare=False,
            )
        except psycopg.errors.LockNotAvailable as error:
            raise TableWanted(str(error).splitlines()[0]) from error


@contextlib.contextmanager
def hold_snapshot(
    source: str | psycopg.Connection[Any],
    queue: str,
    tables: Sequence[str],
    *,
    views: Sequence[HeldView] = (),
    acting: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[SnapshotHolder]:
    """Lock the tables and their log segments, take and export a snapshot, and hold it until the block ends.

    `source`: a connection string, or a connection outside a transaction that serves no other purpose. `views`:
    those to refresh; StaleBatch if another refresh has taken one over by the time that the locks are held. `acting`:
    the session will run SQL by OwnerSql, so that the transaction may write; it is rolled back.
    Locks come before the snapshot: a table truncated or rewritten after the snapshot would read as empty. No lock is
    kept while somebody else has locked a table: LockNotAvailable of psycopg.errors once `stopped()` meanwhile, or
    after the session's own lock_timeout.
    """
    with ExitStack() as stack:
        if isinstance(source, str):
            source = stack.enter_context(connect(source, application_name=f"gdq:{queue}/snapshot"))
        connection = source
        stack.enter_context(_ended(connection, kept=not acting))
        connection.autocommit = True
        values = [[v.name for v in views], [v.batch_id for v in views], [v.token for v in views]]
        known = _known_segments.setdefault(connection, {})
        key = (queue, *tables, *(view.name for view in views))
        for _ in range(_SEGMENT_TRIES):
            # most often they are those of the last time
            listed, stamps = known.pop(key, (None, None))
            segments = listed or log_segments(connection, queue, tables)
            names = ", ".join([*tables, *segments])
            begin = f"begin isolation level repeatable read{'' if acting else ' read only'}; {PIN_TRANSACTION}"
            try:
                lock_tables(connection, begin, names, stopped=stopped)
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                connection.rollback()
                # while a lock was waited for, the logs of an old version may have been dropped
                if listed is None and log_segments(connection, queue, tables) == segments:
                    raise
                continue
            with mapped_errors():
                row = connection.execute(_SNAPSHOT, values, prepare=True).fetchone()
            assert row is not None
            if not row[2] or row[2] != stamps:
                listed = log_segments(connection, queue, tables)
            if set(listed or ()) <= set(segments):
                known[key] = (listed or segments, row[2])
                yield SnapshotHolder(connection, row[0], row[1], names, row[2])
                return
            # a table got a new version, with new segments, after they were listed
            connection.rollback()
    raise GdqError(f"the logs of {', '.join(tables)} changed {_SEGMENT_TRIES} times while they were being locked")


def lock_tables(
    connection: psycopg.Connection[Any], begin: str, names: str, *, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Begin a transaction that holds ACCESS SHARE on all of these relations; between two attempts it holds none.

    `begin`: the statements that begin it, on a connection in autocommit. Raises LockNotAvailable as hold_snapshot().
    """
    started = time.monotonic()
    while True:
        try:
            connection.execute(
                f"{begin}; set local lock_timeout = '{LOCK_TIMEOUT}'; "
                f"lock table {names} in access share mode; set local lock_timeout to default",
                prepare=False,
            )
        except psycopg.errors.LockNotAvailable:
            connection.rollback()
            longest = scalar(connection, _SESSION_TIMEOUT) / 1000
            if stopped() or 0 < longest < time.monotonic() - started:
                raise
        else:
            return
        time.sleep(_LOCK_PAUSE_SECONDS)


@contextlib.contextmanager
def _ended(connection: psycopg.Connection[Any], *, kept: bool) -> Iterator[None]:
    """End the block's transaction with the block, and restore the connection's autocommit."""
    autocommit = connection.autocommit
    try:
        yield
        if kept and not connection.closed:
            # commit, though nothing was written: on rollback psycopg would forget its prepared statements
            connection.commit()
    finally:
        if not connection.closed:
            connection.rollback()
            connection.autocommit = autocommit


def log_segments(connection: psycopg.Connection[Any], queue: str, tables: Sequence[str]) -> list[str]:
    """The relations that a reader of these tables' changes locks, besides the tables, before its first snapshot."""
    with mapped_errors():
        row = connection.execute(f"select array({_SEGMENTS})", [queue, list(tables)], prepare=True).fetchone()
    return row[0] if row else []
