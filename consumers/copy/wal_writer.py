"""The WAL writer of a target, kept at work while one transaction writes much.

    alone        write 16 MB | wait for the disk | write 16 MB | wait for the disk ...
    kept awake   write 16 MB | write 16 MB | write 16 MB ...
    WAL writer               | flush       | flush       ...

A server gathers its write-ahead log in buffers, of 16 MB at most unless told otherwise. Its WAL writer empties them
five times a second, and when a transaction commits that does not wait for the disk. A large transaction fills them
sooner, and has to write and flush the log itself. So another session commits now and then: transactions that have
changed nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import psycopg

from gdq.conninfo import connect

# The buffers of the smallest usual server, 4 MB, take longer to be filled.
_WAKE_SECONDS = 0.02
# The WAL writer is woken for no less: wal_writer_flush_after. A transaction number makes the commit one that it sees.
_WAKE = """
select case when pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_insert_lsn(),
                                            pg_catalog.pg_current_wal_flush_lsn()) >= 1048576
            then pg_catalog.pg_current_xact_id() end"""

# An answer that takes longer says that the server has other troubles.
_END_SECONDS = 5.0


@contextmanager
def wal_writer_awake(target: str, name: str) -> Iterator[None]:
    """Keep the WAL writer of a server at work while the block runs, by a thread with a session of its own.

    `target`: a connection string. `name`: of the sessions that write, as the server lists them. A block that is short
    opens none. Errors of the session are none of the block's, which only takes longer then.
    """
    over = threading.Event()

    def wake() -> None:
        if over.wait(_WAKE_SECONDS):
            return
        with (
            suppress(psycopg.Error),
            closing(connect(target, application_name=f"{name}/wal", autocommit=True)) as session,
        ):
            session.execute("set synchronous_commit = off")
            while not over.wait(_WAKE_SECONDS):
                session.execute(_WAKE, prepare=True)

    thread = threading.Thread(target=wake, name="gdq-wal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_END_SECONDS)
