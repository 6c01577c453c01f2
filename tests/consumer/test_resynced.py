"""A consumer that met a gap copies the table anew and goes on: nothing is lost and nothing comes twice."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import psycopg
import pytest
from psycopg import errors

from gdq import Consumer, Event, ResyncRequired, StaleBatch
from gdq.consumer import set_tables
from gdq.errors import TruncatedPosition, WrongIsolation, mapped_errors
from gdq.table_copy import copy_table, resynced
from tests.support.events import Tap, drain
from tests.support.programs import gdq

GAP = "select gdq.note_resync(1, 'shop.t'::regclass, 'gap', 'rows without events')"


@pytest.fixture
def shop(tap: Tap) -> Tap:
    """The tables t and u, both captured, which the owner of gdq may read."""
    with tap.db.connect("su") as su:
        su.execute("alter default privileges for role app grant select on tables to gdq_owner")
    tap.write("create table t (id int primary key, v int)", "create table u (id int primary key)")
    tap.add("shop.t")
    tap.add("shop.u")
    return tap


def ops(tap: Tap) -> list[tuple[str, str | None, Any]]:
    return [(row[3], row[4], row[5]) for row in drain(tap.db)]


def events(consumer: Consumer) -> list[Event]:
    return [event for batch in consumer.batches(once=True) for event in batch.events()]


def test_consumer_goes_on_after_a_copy(shop: Tap) -> None:
    shop.write("insert into t values (1, 1)", "insert into u values (1)")
    shop.owner.execute(GAP)
    shop.write("insert into t values (2, 1)", "insert into u values (2)")
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        with pytest.raises(ResyncRequired, match="rows without events"):
            events(consumer)
        with pytest.raises(ZeroDivisionError), consumer.resync("shop.t"):
            raise ZeroDivisionError
        with pytest.raises(ResyncRequired):
            [batch.arrow("shop.t") for batch in consumer.batches(once=True)]
        [info] = json.loads(gdq("consumers", "q", "--json", dsn=shop.db.dsn).stdout)
        assert (info["resync"], info["reason"]) == (["shop.t"], "rows without events")
        with consumer.resync("shop.t") as copy:
            assert sorted(row["id"] for row in copy.rows()) == [1, 2]
            shop.write("insert into t values (3, 1)")
            assert sorted(row["id"] for row in copy.rows()) == [1, 2]
        [info] = json.loads(gdq("consumers", "q", "--json", dsn=shop.db.dsn).stdout)
        assert (info["resync"], info["reason"]) == (None, None)
        found: list[Event] = []
        for batch in consumer.batches(once=True):
            found += batch.events()
            assert [row["id"] for row in batch.delta("shop.t").to_pylist()] == [3]
    assert [(event.table, event.key) for event in found] == [
        ("shop.u", {"id": 1}),
        ("shop.u", {"id": 2}),
        ("shop.t", {"id": 3}),
    ]


def test_copy_of_an_inheritance_parent_holds_its_own_rows(shop: Tap) -> None:
    """Rows of a child are copied with the child, and their changes come under its name."""
    shop.write(
        "create table child () inherits (u)",
        "create table parts (id int) partition by list (id); create table part partition of parts default",
        "insert into u values (10); insert into child values (11); insert into parts values (1)",
    )
    for table, found in {"u": [10], "child": [11], "parts": [1]}.items():
        with copy_table(shop.db.dsn, f"shop.{table}") as copy:
            assert [row["id"] for row in copy.rows()] == found


def test_open_batch_becomes_stale(shop: Tap) -> None:
    shop.write("insert into t values (1, 1)")
    shop.owner.execute("select gdq.force_tick('q')")
    held = shop.owner.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
    with copy_table(shop.db.dsn, "shop.t") as copy:
        resynced(shop.owner, "q", "c", "shop.t", copy.snapshot)
    with pytest.raises(StaleBatch), mapped_errors():
        shop.owner.execute("select gdq.finish_batch(%s, %s)", held)
    assert ops(shop) == []


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_capture_that_was_off(shop: Tap, isolation: str) -> None:
    """While it is off a copy would miss what follows; one from before it came back is refused too."""
    shop.write(f"begin isolation level {isolation}; alter table t add w int default random(); commit")
    shop.write("insert into t values (1, 1)")
    with copy_table(shop.db.dsn, "shop.t") as copy:
        if isolation == "repeatable read":
            with pytest.raises(ResyncRequired, match="is off: changes after"):
                resynced(shop.owner, "q", "c", "shop.t", copy.snapshot)
            while shop.owner.execute("select gdq.maintain()").fetchone() == (True,):
                pass
            with pytest.raises(ResyncRequired, match="has another gap since"):
                resynced(shop.owner, "q", "c", "shop.t", copy.snapshot)
    with copy_table(shop.db.dsn, "shop.t") as copy:
        resynced(shop.owner, "q", "c", "shop.t", copy.snapshot)
    shop.write("update t set v = 2")
    assert [op for op, *_ in ops(shop)] == ["update"]


def test_what_is_refused(shop: Tap) -> None:
    with copy_table(shop.db.dsn, "shop.t") as copy:
        pass
    shop.write("insert into t values (1, 1)")
    assert len(ops(shop)) == 1
    with pytest.raises(TruncatedPosition, match="past snapshot"):
        resynced(shop.owner, "q", "c", "shop.t", copy.snapshot)
    done = gdq("resynced", "q", "c", "shop.t", "--snapshot", copy.snapshot, dsn=shop.db.dsn)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 2)
    with pytest.raises(errors.InvalidParameterValue, match="past"):
        resynced(shop.owner, "q", "c", "shop.t", "9000000:9000000:")
    shop.write("create table other (id int)")
    with pytest.raises(errors.UndefinedObject, match="does not take"):
        resynced(shop.owner, "q", "c", "shop.other", copy.snapshot)
    shop.owner.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(WrongIsolation), shop.owner.transaction():
        resynced(shop.owner, "q", "c", "shop.t", copy.snapshot)


def test_command(shop: Tap) -> None:
    shop.owner.execute(GAP)
    assert gdq("consume", "q", "c", "--once", dsn=shop.db.dsn).returncode == 3
    snapshot = shop.owner.execute("select pg_current_snapshot()::text").fetchone()
    assert snapshot
    done = gdq("resynced", "q", "c", "shop.t", "--snapshot", snapshot[0], dsn=shop.db.dsn)
    assert (done.returncode, done.stderr) == (0, "resynchronised shop.t of c on q\n")
    assert gdq("consume", "q", "c", "--once", dsn=shop.db.dsn).returncode == 0
    assert gdq("resynced", "c", "--snapshot", snapshot[0], dsn=shop.db.dsn).returncode == 2


def test_seek_back_before_a_copy_brings_everything_again(shop: Tap) -> None:
    shop.owner.execute("select gdq.set_queue('q', retention => '1 hour')")
    (start,) = shop.owner.execute("select gdq.force_tick('q')").fetchone() or (0,)
    shop.write("insert into t values (1, 1)")
    with copy_table(shop.db.dsn, "shop.t") as copy:
        resynced(shop.owner, "q", "c", "shop.t", copy.snapshot)
    shop.write("insert into t values (2, 1)")
    (between,) = shop.owner.execute("select gdq.force_tick('q')").fetchone() or (0,)
    assert ops(shop) == [("insert", "shop.t", {"id": 2})]
    shop.owner.execute("select gdq.seek('q', 'c', at_tick => %s)", [start])
    assert ops(shop) == [("insert", "shop.t", {"id": 1}), ("insert", "shop.t", {"id": 2})]
    shop.owner.execute("select gdq.seek('q', 'c', at_tick => %s)", [start])
    with copy_table(shop.db.dsn, "shop.t") as copy:
        resynced(shop.owner, "q", "c", "shop.t", copy.snapshot)
    shop.owner.execute("select gdq.seek('q', 'c', at_tick => %s)", [between])
    assert ops(shop) == []


def test_tables_of_a_consumer_change(shop: Tap) -> None:
    shop.write("insert into t values (1, 1)", "insert into u values (1)")
    assert gdq("set-tables", "q", "c", "shop.u", dsn=shop.db.dsn).stderr == "changed tables of c on q\n"
    assert gdq("set-tables", "q", "c", "shop.u", dsn=shop.db.dsn).stderr == "already so: tables of c on q\n"
    shop.owner.execute("select gdq.insert_event('q', 'note', '{}')")
    assert [op[1] for op in ops(shop)] == ["shop.u", None]
    shop.write("insert into t values (2, 1)")
    with shop.db.connect() as worker:
        shop.owner.execute("select gdq.force_tick('q')")
        held = worker.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
        assert set_tables(shop.owner, "q", "c", None)
        with pytest.raises(StaleBatch), mapped_errors():
            worker.execute("select gdq.finish_batch(%s, %s)", held)
    shop.write("insert into t values (3, 1)")
    assert ops(shop) == [("insert", "shop.t", {"id": 3})]


def test_a_table_taken_up_later_is_not_complete_before(shop: Tap) -> None:
    """The consumer's old position holds no rows of a table that it did not take then."""
    set_tables(shop.owner, "q", "c", ["shop.u"])
    shop.owner.execute("update gdq.queue set rotation_period = '1 microsecond'")
    old = shop.owner.execute("select pg_current_snapshot()::text").fetchone()
    shop.write("insert into t values (1, 1)")
    shop.owner.execute("select gdq.force_tick('q')")
    while shop.owner.execute("select gdq.maintain()").fetchone() == (True,):
        pass
    set_tables(shop.owner, "q", "c", ["shop.u", "shop.t"])
    assert old
    with pytest.raises(TruncatedPosition), mapped_errors():
        shop.owner.execute("select gdq.delta_sql('q', 'shop.t', %s, pg_current_snapshot())", old)


class Mirror:
    """A copy of table t kept by its events; an event that does not fit the row it meets is an error."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.resyncs = 0
        tap.owner.execute("create table public.mirror (id int primary key, v bigint)")

    def follow(self, consumer: Consumer) -> None:
        """Apply everything up to now; copy the table where there is a gap."""
        while True:
            try:
                for batch in consumer.batches(once=True):
                    for event in batch.events():
                        self.apply(consumer.connection, event)
            except ResyncRequired:
                self.copy(consumer)
            else:
                return

    def copy(self, consumer: Consumer) -> None:
        try:
            with consumer.resync("shop.t") as copy:
                consumer.connection.execute("delete from mirror")
                with consumer.connection.cursor() as cursor:
                    rows = [(row["id"], row["v"]) for row in copy.rows()]
                    cursor.executemany("insert into mirror values (%s, %s)", rows)
            self.resyncs += 1
        except ResyncRequired:
            consumer.connection.execute("select gdq.maintain()")

    def apply(self, connection: psycopg.Connection[Any], event: Event) -> None:
        if event.table != "shop.t" or event.op == "ddl":
            return
        if event.old:
            gone = "delete from mirror where id = %s and v = %s"
            done = connection.execute(gone, [event.old["id"], event.old["v"]])
            assert done.rowcount == 1, f"{event} does not fit the copy"
        if event.new:
            connection.execute("insert into mirror values (%s, %s)", [event.new["id"], event.new["v"]])


def writer(tap: Tap, number: int, stop: threading.Event) -> None:
    rng = random.Random(number)
    with tap.db.connect("app") as app:
        for key in range(number * 100_000, number * 100_000 + 99_999):
            if stop.wait(0.01):  # not faster than one reader's events, one by one, are applied
                return
            with app.transaction():
                app.execute("insert into t values (%s, nextval('version'))", [key])
                app.execute("update t set v = nextval('version') where id = %s", [rng.randint(number * 100_000, key)])
                if rng.random() < 0.3:
                    app.execute("delete from t where id = %s", [rng.randint(number * 100_000, key)])


def test_mirror_under_writers_with_gaps(shop: Tap) -> None:
    """Capture goes off and comes back again and again under writers; the mirror ends as the table is."""
    shop.write("create sequence version", "alter table t alter v type bigint")
    mirror = Mirror(shop)
    stop = threading.Event()
    threads = [threading.Thread(target=writer, args=(shop, number, stop)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    try:
        with Consumer(shop.db.dsn, "q", "c") as consumer:
            for gap in range(4):
                mirror.follow(consumer)
                isolation = "repeatable read" if gap % 2 else "read committed"
                shop.write(
                    f"begin isolation level {isolation}; alter table t add c{gap} float default random(); commit"
                )
                mirror.follow(consumer)
            stop.set()
            for thread in threads:
                thread.join()
            mirror.follow(consumer)
    finally:
        stop.set()
    assert mirror.resyncs >= 4
    with shop.db.connect("su") as su:
        rows = su.execute(
            "select count(*), count(*) filter (where t.v = m.v) from shop.t t full join mirror m using (id)"
        )
        total, same = rows.fetchone() or (0, -1)
        assert total == same
        assert total > 0


@pytest.fixture
def removable(shop: Tap) -> Tap:
    """There is a row of t that nobody has read."""
    shop.write("insert into t values (1, 1)")
    return shop


def test_removal_waits_for_readers_or_tells_them(removable: Tap) -> None:
    tap = removable
    done = gdq("remove-table", "q", "shop.t", dsn=tap.db.dsn)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == 'Error: changes of table shop.t have not been read by "c"'
    tap.write("insert into t values (2, 1)")
    assert len(ops(tap)) == 2
    assert gdq("remove-table", "q", "shop.t", dsn=tap.db.dsn).returncode == 0
    tap.write("insert into t values (3, 1)", "insert into u values (1)")
    assert [op[:2] for op in ops(tap)] == [("ddl", "shop.t"), ("insert", "shop.u")]


def test_removal_by_force_is_a_gap_for_those_who_took_the_table(removable: Tap) -> None:
    tap = removable
    tap.owner.execute("select gdq.register_consumer('q', 'other', tables => '{shop.u}')")
    assert gdq("remove-table", "q", "shop.t", "--force", dsn=tap.db.dsn).returncode == 0
    tap.write("insert into u values (1)")
    assert [row[3:5] for row in drain(tap.db, consumer="other")] == [("insert", "shop.u")]
    with Consumer(tap.db.dsn, "q", "c") as consumer:
        with pytest.raises(ResyncRequired, match="removed from the queue"):
            events(consumer)
        with consumer.resync("shop.t"):
            pass
        assert [event.table for event in events(consumer)] == ["shop.u"]
    tap.add("shop.t")
    tap.write("insert into t values (9, 1)")
    assert ops(tap) == [("insert", "shop.t", {"id": 9})]


def test_tables_come_and_go_while_a_batch_is_open(shop: Tap) -> None:
    shop.write("insert into t values (1, 1)", "create table w (id int primary key)")
    shop.owner.execute("select gdq.force_tick('q')")
    held = shop.owner.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
    shop.add("shop.w")
    shop.owner.execute("select gdq.remove_table('q', 'shop.u')")
    shop.write("insert into w values (1)")
    rows = shop.owner.execute("select op, tbl from gdq.get_batch(%s, %s)", held).fetchall()
    assert rows == [("insert", "shop.t")]
    shop.owner.execute("select gdq.finish_batch(%s, %s)", held)
    assert [op[:2] for op in ops(shop)] == [("ddl", "shop.u"), ("insert", "shop.w")]


def test_copy_settles_what_waits_to_be_retried(shop: Tap) -> None:
    shop.write("insert into t values (1, 1)", "insert into u values (1)")
    shop.owner.execute("select gdq.force_tick('q')")
    held = shop.owner.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
    for (event,) in shop.owner.execute("select ev_id from gdq.get_batch(%s, %s)", held).fetchall():
        shop.owner.execute("select gdq.retry_event(%s, %s, %s, '0')", [*(held or ()), event])
    shop.owner.execute("select gdq.finish_batch(%s, %s)", held)
    with copy_table(shop.db.dsn, "shop.t") as copy:
        resynced(shop.owner, "q", "c", "shop.t", copy.snapshot)
    held = shop.owner.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
    assert shop.owner.execute("select tbl from gdq.get_retries(%s, %s)", held).fetchall() == [("shop.u",)]
