"""Depth, rate and lag; and that looking never fails beside what goes on, nor holds it up."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from gdq.consumer import ConsumerInfo
from gdq.monitor.status import Status, status
from gdq.queue import QueueInfo, queue_info
from tests.support.events import Tap, drain
from tests.support.programs import environment, gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import SECONDS

LISTINGS = ("queue_info", "table_info", "consumer_info")
ROW_BYTES = 1000
ROUNDS = 15


@pytest.fixture
def shop(tap: Tap) -> Tap:
    """Two captured tables, `wide` and `plain`."""
    tap.write("create table wide (id int primary key, pad text)", "create table plain (id int primary key)")
    tap.add("shop.wide")
    tap.add("shop.plain")
    return tap


def write(tap: Tap, rows: int) -> None:
    """As many changes of `wide`, about eight to a page of its log."""
    pad = f"repeat('x', {ROW_BYTES})"
    tap.write(f"insert into wide select g, {pad} from generate_series(1, {rows}) g on conflict (id) do nothing")


def consumers(tap: Tap) -> dict[str, ConsumerInfo]:
    return {row.consumer_name: row for row in status(tap.owner).consumers}


def queue(tap: Tap) -> QueueInfo:
    [row] = status(tap.owner).queues
    return row


def test_depth_falls_to_nothing_when_all_is_read(shop: Tap) -> None:
    write(shop, 400)
    seen = consumers(shop)["c"]
    assert seen.unread_events == 400
    assert 400 * ROW_BYTES < seen.unread_bytes < 600 * ROW_BYTES
    assert seen.lag
    assert seen.lag > timedelta(0)
    assert status(shop.owner).unread("q") == (400, seen.unread_bytes)
    drain(shop.db)
    seen = consumers(shop)["c"]
    assert (seen.unread_events, seen.unread_bytes, seen.lag, seen.batch_age) == (0, 0, timedelta(0), None)
    assert queue(shop).log_bytes > 400 * ROW_BYTES


def test_logs_of_a_queue_are_those_of_its_tables_and_its_events(shop: Tap) -> None:
    shop.owner.execute("select gdq.create_queue('other')")
    shop.owner.execute("select gdq.add_table('other', 'shop.plain')")
    write(shop, 100)
    shop.write("insert into plain values (1)", "truncate plain")
    whole = status(shop.owner).queues
    assert [(row.queue_name, row.segments) for row in whole] == [("other", 2), ("q", 3)]
    assert [(row.log_bytes, row.segments) for row in whole] == [
        (row.log_bytes, row.segments) for row in queue_info(shop.owner)
    ]


def test_bytes_unread_to_a_page(shop: Tap) -> None:
    """Consumers that stand at different places of one log."""
    for number in range(1, 6):
        write(shop, 80 * number)
        shop.owner.execute("select gdq.force_tick('q')")
        shop.owner.execute("select gdq.register_consumer('q', %s)", [f"after {80 * number}"])
    seen = consumers(shop)
    [(log,)] = shop.owner.execute(
        "select distinct tableoid::regclass::text from gdq_log.t1_v1_s0 where ev_op = 'I'"
    ).fetchall()
    for name, row in seen.items():
        done = 0 if name == "c" else int(name.removeprefix("after "))
        assert row.unread_events == 400 - done
        pages = shop.owner.execute(
            f"select count(distinct (ctid::text::point)[0]) from {log} where (select count(*) from {log}) > 0"
            f" and ev_id > (select max(ev_id) - {400 - done} from {log})".encode()
        ).fetchone()
        assert pages
        assert pages[0] * 8192 <= row.unread_bytes <= (pages[0] + 1) * 8192 or row.unread_bytes == pages[0] == 0


def test_tables_that_a_consumer_does_not_take_do_not_count(shop: Tap) -> None:
    shop.owner.execute("select gdq.register_consumer('q', 'few', tables => array['shop.plain'::regclass])")
    write(shop, 100)
    assert (consumers(shop)["few"].unread_bytes, consumers(shop)["c"].unread_bytes > 0) == (0, True)


def test_lag_is_the_age_of_the_oldest_unread_tick(shop: Tap) -> None:
    drain(shop.db)
    write(shop, 10)
    shop.owner.execute("select gdq.force_tick('q')")
    shop.owner.execute("update gdq.tick set created_at = created_at - interval '1 hour'")
    shop.write("insert into plain values (1)")
    shop.owner.execute("select gdq.force_tick('q')")
    lag = consumers(shop)["c"].lag
    assert lag
    assert timedelta(hours=1) < lag < timedelta(hours=1, minutes=5)
    drain(shop.db)
    assert consumers(shop)["c"].lag == timedelta(0)


def test_rate(shop: Tap) -> None:
    shop.owner.execute("select gdq.force_tick('q')")
    shop.owner.execute("update gdq.tick set created_at = created_at - interval '100 s'")
    write(shop, 1000)
    rate = queue(shop).events_per_second
    assert rate
    assert 5 < rate < 10.1


def test_open_batch_and_when_last_seen(shop: Tap) -> None:
    write(shop, 1)
    shop.owner.execute("select gdq.force_tick('q')")
    before = consumers(shop)["c"].last_seen
    shop.owner.execute("select * from gdq.next_batch('q', 'c')")
    seen = consumers(shop)["c"]
    assert before
    assert seen.last_seen
    assert seen.last_seen > before
    assert seen.batch_age


def test_tables_in_resync(shop: Tap) -> None:
    shop.write("alter table plain add column more int default 1")
    found = status(shop.owner)
    assert [(table.table_name, table.state) for table in found.tables] == [
        ("shop.plain", "resync"),
        ("shop.wide", "ok"),
    ]
    assert found.tables[0].reason
    assert (found.queues[0].tables, found.queues[0].tables_resync, found.consumers[0].tables_resync) == (2, 1, 1)
    drain(shop.db)
    found = status(shop.owner)
    assert (found.queues[0].tables_resync, found.consumers[0].tables_resync) == (0, 0)


def calls(database: Database, query: str) -> Counter[str]:
    """How often a query calls each function of gdq."""
    with database.connect("su", autocommit=False) as su:
        su.execute("set local track_functions = 'all'")
        su.execute(query.encode())
        found = su.execute("select funcname, calls from pg_stat_xact_user_functions where schemaname = 'gdq'")
        return Counter(dict(found.fetchall()))


@pytest.mark.server
def test_gaps_of_the_past_cost_no_call_each(shop: Tap) -> None:
    seen = []
    for times in (1, 10):
        for _ in range(times):
            shop.write("alter table plain add column more int default 1", "alter table plain drop column more")
        drain(shop.db)
        seen.append(calls(shop.db, "select * from gdq.queue_info('q')"))
    assert seen[0] == seen[1]


def test_writers_that_are_not_over(shop: Tap) -> None:
    with shop.db.connect("app", autocommit=False) as writer:
        writer.execute("insert into plain values (1)")
        writer.execute("savepoint s")
        writer.execute("insert into plain values (2)")
        assert queue(shop).open_writers == 1
        pid, since = shop.owner.execute("select pid, since from gdq.open_writers(1)").fetchone() or (0, "")
        assert (pid, since) == (writer.info.backend_pid, None)  # its statistics are hidden, and no tick has met it
        shop.write("insert into plain values (3)")  # whose later number makes a snapshot list the older one
        shop.owner.execute("select gdq.force_tick('q')")
        assert shop.owner.execute("select since < now() from gdq.open_writers(1)").fetchone() == (True,)
        writer.rollback()
    assert queue(shop).open_writers == 0


def test_looking_holds_no_log(shop: Tap) -> None:
    write(shop, 10)
    with shop.db.connect(autocommit=False) as looker:
        status(looker)
        assert looker.execute(
            "select count(*) from pg_locks l join pg_class c on c.oid = l.relation"
            " where l.pid = pg_backend_pid() and c.relnamespace = 'gdq_log'::regnamespace and c.relkind <> 'S'"
        ).fetchone() == (0,)


@pytest.mark.parametrize("statement", ["select gdq.drop_queue('q', true)", "truncate gdq_log.t1_v1_s0, gdq_log.q1_s0"])
def test_nobody_waits_for_what_is_being_dropped(shop: Tap, statement: str) -> None:
    write(shop, 10)
    with shop.db.connect(autocommit=False) as dropper, shop.db.connect() as looker:
        dropper.execute(statement.encode())
        looker.execute("set statement_timeout = '10 min'")
        for listing in LISTINGS:
            assert looker.execute(f"select queue_name from gdq.{listing}()".encode()).rowcount > 0
        dropper.rollback()


# what gave way to the others is there still in the next round
GIVES_WAY = (psycopg.errors.LockNotAvailable, psycopg.errors.ObjectInUse, psycopg.errors.DuplicateObject)


def come_and_go(connection: psycopg.Connection[Any]) -> None:
    connection.execute("select gdq.create_queue('r')")
    connection.execute("select gdq.add_table('r', 'shop.t0')")
    connection.execute("select gdq.register_consumer('r', 'd')")
    connection.execute("select gdq.drop_queue('r', true)")


def come_and_go_in_a_queue(connection: psycopg.Connection[Any]) -> None:
    connection.execute("select gdq.add_table('q', 'shop.t1')")
    connection.execute("select gdq.register_consumer('q', 'e')")
    connection.execute("select gdq.unregister_consumer('q', 'e')")
    connection.execute("select gdq.remove_table('q', 'shop.t1')")


def fill_and_empty_a_log(connection: psycopg.Connection[Any]) -> None:
    connection.execute("insert into gdq_log.q1_s0 (ev_id, ev_txid) select g, 3 from generate_series(1, 1000) g")
    connection.execute("truncate gdq_log.q1_s0")


def test_listings_beside_everything_that_comes_and_goes(tap: Tap) -> None:
    """Queues, tables and consumers are made and dropped, logs emptied, while all listings are read."""
    tap.write(*(f"create table t{n} (id int)" for n in range(2)))
    failures: list[psycopg.Error] = []
    stop = threading.Event()
    rounds: Counter[str] = Counter()

    def keep(work: Callable[[psycopg.Connection[Any]], None]) -> None:
        with tap.db.connect() as connection:
            while not stop.is_set():
                try:
                    with contextlib.suppress(*GIVES_WAY):
                        work(connection)
                    rounds[work.__name__] += 1
                except psycopg.Error as error:
                    failures.append(error)
                    stop.set()

    works = (come_and_go, come_and_go_in_a_queue, fill_and_empty_a_log)
    threads = [threading.Thread(target=keep, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    try:
        while not stop.is_set() and min(rounds[work.__name__] for work in works) < ROUNDS:
            for listing in (*LISTINGS, "view_info"):
                tap.owner.execute(f"select * from gdq.{listing}()".encode())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures


def test_command(shop: Tap) -> None:
    write(shop, 100)
    parsed = json.loads(gdq("status", "--json", dsn=shop.db.dsn).stdout)
    assert parsed.keys() == Status.__dataclass_fields__.keys()
    assert parsed["consumers"][0]["unread_events"] == 100
    text = gdq("status", "q", dsn=shop.db.dsn).stdout
    assert "shop.wide" in text
    assert "c" in text
    done = gdq("status", "none", dsn=shop.db.dsn)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, 'Error: queue "none" does not exist')


def test_watch_until_interrupted(db: Database) -> None:
    with db.connect() as connection:
        connection.execute("select gdq.create_queue('q')")
    watching = start_gdq("status", "--watch", "--json", "--interval", "0.1", dsn=db.dsn)
    assert watching.stdout
    for _ in range(2):
        assert json.loads(watching.stdout.readline())["queues"][0]["queue_name"] == "q"
    watching.send_signal(signal.SIGINT)
    out, err = watching.communicate(timeout=SECONDS)
    assert (watching.returncode, err) == (0, "")
    assert all(json.loads(line) for line in out.splitlines())


def test_watch_on_a_terminal(db: Database) -> None:
    with db.connect() as connection:
        connection.execute("select gdq.create_queue('watched')")
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "gdq", "status", "--watch", "--interval", "0.1"]
    watching = subprocess.Popen(command, env=environment(db.dsn), stdout=follower, stderr=subprocess.PIPE)
    os.close(follower)
    shown = b""
    while shown.count(b"watched") < 2:
        shown += os.read(leader, 4096)
    watching.send_signal(signal.SIGINT)
    err = watching.communicate(timeout=SECONDS)[1]
    os.close(leader)
    assert (watching.returncode, err) == (0, b"")
