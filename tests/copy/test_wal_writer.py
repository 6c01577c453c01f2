"""A large transaction's log goes to the disk beside it, however seldom the WAL writer wakes by itself."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

from gdq.consumers.copy.wal_writer import wal_writer_awake
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from tests.support.waiting import until

# By itself the WAL writer would let each of the rounds wait about as long.
_DELAY_SECONDS = 10
_ROUNDS = 6


@pytest.mark.server
def test_the_log_is_flushed_while_a_transaction_writes(pytestconfig: pytest.Config) -> None:
    settings = {"wal_writer_delay": f"{_DELAY_SECONDS}s", "shared_buffers": "1GB", "max_wal_size": "4GB"}
    with (
        EmbeddedServer(binaries=find_binaries(pytestconfig.getoption("--pg")), settings=settings) as server,
        psycopg.connect(server.conninfo()) as writer,
        psycopg.connect(server.conninfo(), autocommit=True) as looker,
    ):

        def wait_for_flush() -> None:
            # the WAL writer is not woken for less than 1 MB
            written = writer.execute("select pg_current_wal_insert_lsn() - 2097152").fetchone()
            query = "select pg_current_wal_flush_lsn() >= %s::pg_lsn"
            until(lambda: looker.execute(query, written).fetchone() == (True,), "the flush")

        with wal_writer_awake(server.conninfo(), "writes"):
            writer.execute("create table big (note text)")
            started = time.monotonic()
            for _ in range(_ROUNDS):
                writer.execute("insert into big select repeat(md5(n::text), 50) from generate_series(1, 3000) n")
                wait_for_flush()
            assert time.monotonic() - started < _ROUNDS * _DELAY_SECONDS / 2
        sessions = "select count(*) from pg_stat_activity where application_name = 'writes/wal'"
        until(lambda: looker.execute(sessions).fetchone() == (0,), "the session's end")


def test_a_server_without_room_for_its_session_is_no_error() -> None:
    def at_work() -> bool:
        return any(thread.name == "gdq-wal" for thread in threading.enumerate())

    with wal_writer_awake("host=/nowhere dbname=postgres user=nobody", "writes"):
        assert at_work()
        until(lambda: not at_work(), "the end of the thread")
