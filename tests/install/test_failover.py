"""A physical standby goes on where the WAL that it got ends; what was read beyond that is recognised."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from gdq.embedded.files import find_binaries, make_cache_folder
from gdq.embedded.server import EmbeddedServer
from gdq.era import check_position, position
from gdq.errors import DivergedPosition, EmbeddedError
from gdq.installer import install
from tests.support.programs import gdq
from tests.support.server import Database, OldServer, chosen_binaries
from tests.support.waiting import until

pytestmark = pytest.mark.server

SETTINGS: dict[str, str | float | bool] = {"wal_level": "replica", "max_wal_senders": 4, "hot_standby": True}


@pytest.fixture
def primary(pytestconfig: pytest.Config) -> Iterator[OldServer]:
    with OldServer(binaries=chosen_binaries(pytestconfig.getoption("--pg")), settings=SETTINGS) as server:
        yield server


@contextmanager
def standby_of(primary: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A streaming standby, started from a base backup."""
    server = EmbeddedServer(binaries=primary.binaries, settings=SETTINGS)
    make_cache_folder(server.folder.parent)
    server.account.run("mkdir", server.folder)
    server.account.write(server.folder / "password", primary.password)
    try:
        backup = primary.binaries.program("pg_basebackup")
    except EmbeddedError:
        backup = find_binaries(18).program("pg_basebackup")
    server.account.run(backup, "-D", server.data, "-R", "-c", "fast", "-X", "stream", "-d", primary.conninfo())
    with server:
        yield server


def scalar(connection: psycopg.Connection[Any], query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    return row and row[0]


def consume(connection: psycopg.Connection[Any], consumer: str) -> bool:
    """Apply one batch to the sink in the transaction that finishes it; whether there was one."""
    with connection.transaction():
        found = connection.execute("select batch_id, token from gdq.next_batch('q', %s)", [consumer]).fetchone()
        if found is None:
            return False
        connection.execute(
            """insert into sink select %s, (new->>'id')::int from gdq.get_batch(%s, %s) where op = 'insert'""",
            [consumer, *found],
        )
        connection.execute("select gdq.finish_batch(%s, %s)", found)
    return True


def drain(connection: psycopg.Connection[Any], consumer: str) -> None:
    connection.execute("select gdq.force_tick('q')")
    while consume(connection, consumer):
        pass


def cut_off(standby: psycopg.Connection[Any]) -> None:
    standby.execute("alter system set primary_conninfo = ''")
    standby.execute("select pg_reload_conf()")
    until(lambda: scalar(standby, "select count(*) from pg_stat_wal_receiver") == 0)


def promote(standby: psycopg.Connection[Any]) -> None:
    assert scalar(standby, "select pg_promote()")
    until(lambda: not scalar(standby, "select pg_is_in_recovery()"))


def prepared(server: EmbeddedServer) -> None:
    install.install(server.conninfo())
    with psycopg.connect(server.conninfo(), autocommit=True) as su:
        su.execute(
            """create table t (id int primary key); create table sink (consumer text, id int);
               select gdq.create_queue('q', ticker_max_lag => '5 ms', rotation_period => '50 ms');
               """
        )
        su.execute("select gdq.add_table('q', 't')")
        for consumer in ("fast", "slow"):
            su.execute("select gdq.register_consumer('q', %s)", [consumer])


def write(dsn: str, first: int, stop: threading.Event) -> None:
    """Insert until told to stop, now and then in a long transaction or a savepoint that is rolled back."""
    with psycopg.connect(dsn) as connection:
        for number in range(first, first + 1_000_000):
            if stop.is_set():
                return
            connection.execute("insert into t values (%s)", [number])
            if number % 3 == 0:
                with connection.transaction(force_rollback=True):
                    connection.execute("insert into t values (%s)", [-number])
            if number % 7:
                connection.commit()


def run_consumer(dsn: str, stop: threading.Event) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not stop.is_set():
            connection.execute("select gdq.ticker()")
            connection.execute("select gdq.maintain()")
            consume(connection, "fast")


def test_promoted_under_load(primary: OldServer) -> None:
    prepared(primary)
    stop = threading.Event()
    workers = [
        *(threading.Thread(target=write, args=(primary.conninfo(), n * 1_000_000, stop)) for n in (1, 2)),
        threading.Thread(target=run_consumer, args=(primary.conninfo(), stop)),
    ]
    with standby_of(primary) as standby, psycopg.connect(primary.conninfo(), autocommit=True) as su:
        with psycopg.connect(standby.conninfo(), autocommit=True) as connection:
            for worker in workers:
                worker.start()
            try:
                until(lambda: scalar(connection, "select count(*) from sink") > 200)
                assert scalar(su, "select txid_current()") > primary.epoch << 32
                early = position(su, "q", "fast")
                with pytest.raises(
                    psycopg.Error, match="a consumer needs the primary server, this is a standby"
                ) as error:
                    connection.execute("select * from gdq.next_batch('q', 'slow')")
                assert error.value.sqlstate == "GDQ04"
                # from here on the primary writes, and its consumer reads, what the standby never gets
                cut_off(connection)
                seen = scalar(connection, "select count(*) from sink")
                until(lambda: scalar(su, "select count(*) from sink") > seen + 200)
            finally:
                stop.set()
                for worker in workers:
                    worker.join()
            late = position(su, "q", "fast")
        primary.crash()
        with psycopg.connect(standby.conninfo(), autocommit=True) as connection:
            promote(connection)
            check_position(connection, "q", early)
            with pytest.raises(DivergedPosition):
                check_position(connection, "q", late)
            connection.execute("insert into t select generate_series(1, 1000)")
            for consumer in ("fast", "slow"):
                drain(connection, consumer)
            rows = sorted(connection.execute("select id from t").fetchall())
            for consumer in ("fast", "slow"):
                read = connection.execute("select id from sink where consumer = %s", [consumer]).fetchall()
                assert sorted(read) == rows


@pytest.mark.parametrize("behind", [False, True], ids=["synchronous", "behind"])
def test_a_replica_goes_on_from_a_promoted_standby(primary: OldServer, empty_db: Database, behind: bool) -> None:
    """It stops and leaves its target alone if the target has what the new primary never got."""
    prepared(primary)
    stop = threading.Event()
    writer = threading.Thread(target=write, args=(primary.conninfo(), 1_000_000, stop))

    def replicate(source: EmbeddedServer, *options: str) -> tuple[int, str]:
        done = gdq("replicate", "q", "mirror", "--to", empty_db.su_dsn, *options, dsn=source.conninfo())
        return done.returncode, done.stderr

    with (
        standby_of(primary) as standby,
        psycopg.connect(standby.conninfo(), autocommit=True) as source,
        empty_db.connect("su") as target,
    ):
        target.execute("create table t (id int primary key)")
        if not behind:
            with psycopg.connect(primary.conninfo(), autocommit=True) as su:
                su.execute("alter system set synchronous_standby_names = '*'")
                su.execute("select pg_reload_conf()")
        writer.start()
        try:
            assert replicate(primary)[0] == 0
            if behind:
                cut_off(source)
            before = scalar(target, "select max(id) from t")
            until(lambda: replicate(primary)[0] == 0 and scalar(target, "select max(id) from t") > before)
        finally:
            stop.set()
            writer.join()
        primary.crash()
        promote(source)
        there = target.execute("table t").fetchall()
        source.execute("insert into t values (1)")
        code, errors = replicate(standby)
        if behind:
            assert code == 1
            assert "diverged" in errors
            assert target.execute("table t").fetchall() == there
            assert gdq("drop-replica", "q", "mirror", "--to", empty_db.su_dsn, dsn=standby.conninfo()).returncode == 0
            code, errors = replicate(standby, "--overwrite")
        assert code == 0, errors
        assert ("copied" in errors) == behind
        rows = sorted(source.execute("table t").fetchall())
        assert sorted(target.execute("table t").fetchall()) == rows
        assert (1,) in rows
