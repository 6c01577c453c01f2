"""Queues whose logs a crash empties: it is told to every consumer, whoever looks first."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from gdq.consumer import Consumer
from gdq.embedded.server import EmbeddedServer
from gdq.errors import ResyncRequired
from gdq.installer import install
from gdq.queue import queue_info
from tests.install.test_failover import SETTINGS, standby_of
from tests.support.server import OldServer, chosen_binaries

REASON = "crash: the unlogged logs of the queue were emptied"


@pytest.fixture(scope="module")
def cluster(pytestconfig: pytest.Config) -> Iterator[EmbeddedServer]:
    """A server of its own, to be crashed."""
    with OldServer(binaries=chosen_binaries(pytestconfig.getoption("--pg")), settings=SETTINGS) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Place:
    """A database with the queue `q`, unlogged, of table t, and the consumers c and d."""

    server: EmbeddedServer
    name: str

    def conninfo(self) -> str:
        return self.server.conninfo(dbname=self.name)

    def crash(self) -> None:
        self.server.crash()
        self.server.start()


@pytest.fixture
def private(cluster: EmbeddedServer) -> Place:
    place = Place(cluster, f"test_{secrets.token_hex(6)}")
    with psycopg.connect(cluster.conninfo(), autocommit=True) as su:
        su.execute(f"create database {place.name}".encode())
    install.install(place.conninfo())
    with connect(place) as connection:
        connection.execute("create table t (id int primary key)")
        connection.execute("select gdq.create_queue('q', unlogged => true)")
        connection.execute("select gdq.add_table('q', 't')")
        connection.execute("select gdq.register_consumer('q', 'c')")
        connection.execute("select gdq.register_consumer('q', 'd')")
    return place


def connect(place: Place) -> psycopg.Connection[Any]:
    return psycopg.connect(place.conninfo(), autocommit=True)


def values(connection: psycopg.Connection[Any], query: str) -> list[Any]:
    return [row[0] for row in connection.execute(query.encode()).fetchall()]


def consume(place: Place, consumer: str) -> list[int]:
    """The ids that a consumer gets and finishes, up to now."""
    with Consumer(place.conninfo(), "q", consumer) as source:
        return [e.new["id"] for batch in source.batches(once=True) for e in batch.events() if e.new]


def test_crash_is_told_to_every_consumer(private: Place) -> None:
    with connect(private) as connection:
        connection.execute("insert into t values (1)")
        connection.execute("select gdq.force_tick('q')")
        # a batch that is open over the crash: it must not read as empty afterwards
        connection.execute("select * from gdq.next_batch('q', 'c')")
        assert queue_info(connection, "q")[0].unlogged
    private.crash()
    with connect(private) as connection:
        connection.execute("insert into t values (2)")
        # found, and rolled back: it is found again
        with connection.transaction(force_rollback=True):
            assert values(connection, "select batch_id from gdq.next_batch('q', 'd')") == []
        with connection.transaction():
            assert values(connection, "select batch_id from gdq.next_batch('q', 'd')") == []
        state = connection.execute("select state, reason from gdq.table_info('q')").fetchone()
        assert state == ("resync", REASON)
        [batch] = connection.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchall()
        events = "select op, new->>'reason' from gdq.get_batch(%s, %s)"
        assert connection.execute(events, batch).fetchall() == [("resync", REASON)]
    for consumer in ("c", "d"):
        with pytest.raises(ResyncRequired, match=REASON):
            consume(private, consumer)
        with connect(private) as connection:
            connection.execute("select gdq.unregister_consumer('q', %s)", [consumer])
            connection.execute("select gdq.register_consumer('q', %s)", [consumer])
            connection.execute("insert into t values ((select max(id) + 1 from t))")
        assert consume(private, consumer)[-1] == (3 if consumer == "c" else 4)
    with connect(private) as connection:
        assert values(connection, "select state from gdq.table_info('q')") == ["ok"]


@pytest.mark.long
def test_whoever_looks_first_records_it(private: Place) -> None:
    looks = ("select gdq.maintain()", "select * from gdq.begin_refresh('q', 'd')", "select gdq.check_logs()")
    for number, look in enumerate(looks, 1):
        private.crash()
        with connect(private) as connection:
            assert values(connection, "select count(*) from gdq.resync") == [number - 1]
            connection.execute(look.encode())
            connection.execute("select gdq.check_logs()")
            assert values(connection, "select count(*) from gdq.resync") == [number]
            assert values(connection, "select reason from gdq.table_info('q')") == [REASON]
    with pytest.raises(ResyncRequired, match=REASON):
        consume(private, "c")


@pytest.mark.long
def test_orderly_restart_keeps_the_logs(private: Place) -> None:
    with connect(private) as connection:
        connection.execute("insert into t values (1)")
    private.server.restart()
    with connect(private) as connection:
        connection.execute("insert into t values (2)")
        assert values(connection, "select gdq.check_logs()") == [0]
    assert consume(private, "c") == [1, 2]


@pytest.mark.long
def test_logged_queue_survives_a_crash(private: Place) -> None:
    with connect(private) as connection:
        connection.execute("select gdq.create_queue('safe')")
        connection.execute("select gdq.add_table('safe', 't')")
        connection.execute("select gdq.register_consumer('safe', 'e')")
        connection.execute("insert into t values (1)")
        connection.execute("select gdq.remove_table('q', 't', force => true)")
    private.crash()
    with Consumer(private.conninfo(), "safe", "e") as source:
        assert [e.new for batch in source.batches(once=True) for e in batch.events()] == [{"id": 1}]


@pytest.mark.long
def test_promotion_is_told_too(private: Place) -> None:
    with standby_of(private.server) as standby:
        promoted = Place(standby, private.name)
        with connect(promoted) as connection:
            connection.execute("select pg_promote()")
            connection.execute("insert into t values (2)")
        with pytest.raises(ResyncRequired, match=REASON):
            consume(promoted, "c")


def test_logs_cost_almost_no_wal(private: Place) -> None:
    """Bytes of WAL a row, less those of the table itself: its sequence is all that is left."""
    with connect(private) as connection:
        connection.execute("create table bare (id int primary key)")
        connection.execute("create table logged (id int primary key)")
        connection.execute("select gdq.create_queue('safe')")
        connection.execute("select gdq.add_table('safe', 'logged')")
        written = {}
        for table in ("bare", "t", "logged"):
            connection.execute("checkpoint")
            connection.execute(f"insert into {table} values (-1)".encode())
            [start] = values(connection, "select pg_current_wal_insert_lsn()")
            connection.execute(f"insert into {table} select generate_series(1, 5000)".encode())
            [size] = values(connection, f"select pg_current_wal_insert_lsn() - '{start}'::pg_lsn")
            written[table] = float(size) / 5000
    assert written["t"] - written["bare"] < 20, written
    assert written["logged"] - written["bare"] > 60, written
