"""gdq through PgBouncer in transaction mode, where no session outlives a transaction. Runs where PgBouncer is found."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import psycopg
import pytest

from gdq.conninfo import connect, is_pooled
from gdq.consumer import Consumer
from gdq.consumers.refresh.follow import Follower
from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.consumers.refresh.verify import verify_with
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.view.view import create_view
from tests.support.events import Tap
from tests.support.programs import gdq, start_gdq
from tests.support.qualified import watched_statements
from tests.support.server import PASSWORD
from tests.support.waiting import SECONDS, until

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no PgBouncer here")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def pooled(tap: Tap, request: pytest.FixtureRequest) -> Iterator[str]:
    """The connection string of a PgBouncer with two server sessions, both gdq_owner's in the database of `tap`.

    As many as the fixture's parameter says, where it has one.
    """
    server = tap.db.server
    account = server.account
    folder = server.folder / f"pgbouncer-{tap.db.name}"
    port = free_port()
    account.run("mkdir", folder)
    account.write(
        folder / "pgbouncer.ini",
        f"""[databases]
{tap.db.name} = host=127.0.0.1 port={server.port} user=gdq_owner password='{PASSWORD}'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {getattr(request, "param", 2)}
server_lifetime = 3600
""",
    )
    with subprocess.Popen(
        [str(PROGRAM), str(folder / "pgbouncer.ini")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **account.popen_options(),
    ) as bouncer:
        try:
            dsn = f"host=127.0.0.1 port={port} user=anybody dbname={tap.db.name}"

            def answers() -> bool:
                assert bouncer.poll() is None, "PgBouncer ended"
                with contextlib.suppress(psycopg.OperationalError):
                    psycopg.connect(dsn).close()
                    return True
                return False

            until(answers)
            yield dsn
        finally:
            bouncer.terminate()


@contextmanager
def busy(dsn: str) -> Iterator[None]:
    """Others come and go, so that nobody gets the same session of the server twice in a row."""
    stop = Event()

    def work() -> None:
        with psycopg.connect(dsn, prepare_threshold=None) as connection:
            while not stop.is_set():
                connection.execute("select pg_sleep(0.001)")
                connection.commit()

    threads = [Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def in_both_sessions(dsn: str, expression: str) -> list[Any]:
    """A value in each of the two sessions of the server."""
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as two:
        query = f"select pg_backend_pid(), {expression}"
        rows = [connection.execute(query.encode()).fetchone() for connection in (one, two)]
        assert rows[0]
        assert rows[1]
        assert rows[0][0] != rows[1][0]
        return [row[1] for row in rows if row]


def test_a_pooler_is_recognised(tap: Tap, pooled: str) -> None:
    with connect(pooled) as connection:
        assert connection.prepare_threshold is None
    with connect(tap.db.dsn) as connection:
        assert connection.prepare_threshold == 5
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        connection.autocommit = True
        assert is_pooled(connection) is False


def test_consumer_by_polling(tap: Tap, pooled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdq.listener._LOOK_SECONDS", 2 * SECONDS)
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    seen: list[int] = []
    with busy(pooled), Consumer(pooled, "q", "c") as consumer:
        for number in range(12):
            tap.write(f"insert into t values ({number})")
            # nobody else ticks: the consumer does, and must hear of its own tick without a notification
            for batch in consumer.batches(timeout=SECONDS):
                seen += [(e.new or {})["id"] for e in batch.events()]
                batch.commit()
                if len(seen) > number:
                    break
    assert seen == list(range(12))
    assert in_both_sessions(pooled, "array(select pg_listening_channels())") == [[], []]


def test_consumer_beside_a_ticker(tap: Tap, pooled: str) -> None:
    """Commands that go on for long repeat their statements, which psycopg would prepare from the fifth time on."""
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    with busy(pooled), start_gdq("ticker", dsn=pooled) as ticker:
        try:
            ticks = "select count(*) from gdq.tick"
            for number in range(8):
                tap.write(f"insert into t values ({number})")
                before = tap.owner.execute(ticks.encode()).fetchone()
                while tap.owner.execute(ticks.encode()).fetchone() == before:
                    assert ticker.poll() is None
                    time.sleep(0.02)
            done = gdq("consume", "q", "c", "--once", "--json", dsn=pooled)
            assert done.returncode == 0, done.stderr
            assert done.stdout.count('"op": "insert"') == 8
        finally:
            ticker.terminate()
            assert ticker.wait(SECONDS) == 0
        errors = ticker.stderr.read() if ticker.stderr else ""
    assert "prepared statement" not in errors


def test_typed_rows_and_administration(tap: Tap, pooled: str) -> None:
    tap.write("create table t (id int primary key)", "create table t2 (id int primary key)")
    with busy(pooled):
        for command in (("add-table", "q", "shop.t"), ("tables",), ("status",), ("remove-table", "q", "shop.t")):
            done = gdq(*command, dsn=pooled)
            assert done.returncode == 0, done.stderr
        tap.add("shop.t2")
        tap.write("insert into t2 values (1)")
        with Consumer(pooled, "q", "c") as consumer:
            rows = [batch.arrow("shop.t2").column("new_id").to_pylist() for batch in consumer.batches(once=True)]
    assert rows == [[1]]


def test_monitoring(tap: Tap, pooled: str) -> None:
    """Nothing that a scrape sets is left to whoever gets the session next."""
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    with busy(pooled), start_gdq("metrics", "--listen", "127.0.0.1:0", dsn=pooled) as serving:
        assert serving.stderr
        url = serving.stderr.readline().split()[-1]
        for _ in range(10):
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                text = answer.read().decode()
            assert "gdq_up 1.0" in text
            assert "gdq_scrape_failures_total 0.0" in text
            assert 'gdq_table_resync{queue="q",table="shop.t"} 0.0' in text
        serving.terminate()
        assert serving.wait(SECONDS) == 0
        done = gdq("doctor", dsn=pooled)
        assert (done.returncode, done.stderr) == (0, "")
    assert in_both_sessions(pooled, "current_setting('statement_timeout')") == ["0", "0"]


@pytest.mark.long
def test_install_through_the_pooler(tap: Tap, pooled: str) -> None:
    tap.owner.execute("comment on schema gdq is 'as an older gdq left it'")
    with busy(pooled):
        assert gdq("install", dsn=pooled).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("pooled", [4], indirect=True)
def test_refreshes_keep_each_other_out_and_follow_by_asking(tap: Tap, pooled: str) -> None:
    tap.write("create table t (id int primary key)", "insert into t values (1), (2)")
    tap.add("shop.t")
    with tap.db.connect("su") as su:
        su.execute("create schema fast authorization gdq_owner")
        su.execute("grant usage on schema shop to gdq_owner; grant select on shop.t to gdq_owner")
    create_view(tap.owner, "v", "q", "select id from shop.t", "fast.v", engine="postgres")
    refused = []

    def intrude(point: RefreshPoint) -> None:
        if point == "begun":
            with Refresher(pooled) as other, pytest.raises(psycopg.errors.LockNotAvailable, match='view "v" is being'):
                other.refresh("v")
            refused.append(point)

    with Refresher(pooled, at=intrude) as refresher:
        assert refresher.refresh("v").action == "full"
        assert refused == ["begun"]
        told: list[RefreshResult] = []

        def report(result: RefreshResult) -> None:
            told.append(result)
            tap.write(f"insert into t values (10 + {len(told)})")

        Follower(refresher, report=report, failed=lambda _, error: pytest.fail(str(error))).run(lambda: len(told) == 3)
    assert [result.action for result in told] == ["none", "delta", "delta"]


@pytest.mark.parametrize("pooled", [9], indirect=True)
def test_a_refresh_names_what_it_uses_or_pins_its_transactions(pooled: str, tap: Tap) -> None:
    """No session can be pinned: another client would get it. The database's path is that of the applications."""
    with tap.db.connect("su") as su:
        su.execute(f'create schema evil; alter database "{tap.db.name}" set search_path = evil, public'.encode())
    tap.write(
        "create table kept (id int primary key, k int)", "insert into kept select i, i % 3 from generate_series(1, 9) i"
    )
    tap.add("shop.kept")
    queries = {
        "pooled_sums": "select k, count(*) as n from shop.kept group by k",
        "pooled_tops": "select k, max(id) as top from shop.kept group by k",
        "pooled_rows": "select id, k from shop.kept where k > 0",
    }
    with tap.db.connect("su") as su:
        su.execute("create schema fast authorization gdq_owner")
        su.execute("grant usage on schema shop to gdq_owner; grant select on shop.kept to gdq_owner")
    for name, query in queries.items():
        create_view(tap.owner, name, "q", query, f"fast.{name}", engine="postgres")
    with watched_statements() as sent, Refresher(pooled) as refresher:
        for change in (
            "select 1",
            "insert into kept values (10, 1), (11, 7)",
            "truncate kept",
            "insert into kept values (1, 2)",
        ):
            tap.write(change)
            for name in queries:
                refresher.refresh(name)
                assert verify_with(refresher, name).equal
        refresher.refresh_together([*queries])
    assert sent.seen > 200
    assert sent.loose == {}
