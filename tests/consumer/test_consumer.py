"""Batches, the loop that hands them out, and the command around it."""

from __future__ import annotations

import threading

import psycopg
import pytest

from gdq import Consumer, Event, Position, VerifyResult, copy_table, create_view, install, verify_view
from gdq.batch import Batch
from gdq.consumer import peek
from gdq.errors import GdqError, ResyncRequired, StaleBatch
from gdq.source import BatchSource, SourceBatch
from tests.support.consumed import consumed, insert
from tests.support.programs import gdq
from tests.support.server import Database
from tests.support.waiting import SECONDS, until


def test_events_of_a_batch(shop: Database) -> None:
    with shop.connect() as connection:
        connection.execute("insert into orders values (1, 'a')")
        connection.execute("update orders set id = 2, note = null")
        connection.execute("delete from orders; truncate orders")
    with Consumer(shop.dsn, "q", "c") as consumer:
        [events] = [list(batch.events()) for batch in consumer.batches(once=True)]
    assert [(event.op, event.key, event.old, event.new) for event in events] == [
        ("insert", {"id": 1}, None, {"id": 1, "note": "a"}),
        ("update", {"id": 2}, {"id": 1, "note": "a"}, {"id": 2, "note": None}),
        ("delete", {"id": 2}, {"id": 2, "note": None}, None),
        ("truncate", None, None, None),
    ]
    assert [event.id for event in events] == sorted(event.id for event in events)
    assert {event.table for event in events} == {"public.orders"}
    assert {event.time.tzinfo is not None for event in events} == {True}
    assert len({event.xid for event in events}) == 3


def test_next_batch_finishes_the_one_before(shop: Database) -> None:
    insert(shop, 1, 2)
    assert len(consumed(shop)) == 2
    assert consumed(shop) == []


def test_an_exception_rolls_back_and_the_batch_comes_again(shop: Database) -> None:
    def fail(consumer: Consumer) -> None:
        for batch in consumer.batches(once=True):
            batch.connection.execute("insert into seen values (1, 'lost')")
            raise ZeroDivisionError

    insert(shop, 1, 2)
    with Consumer(shop.dsn, "q", "c") as consumer, pytest.raises(ZeroDivisionError):
        fail(consumer)
    with shop.connect() as connection:
        assert connection.execute("select from seen").rowcount == 0
    assert len(consumed(shop)) == 2


def test_a_break_leaves_the_batch_unless_committed(shop: Database) -> None:
    insert(shop, 1, 2)
    for commit, left in ((False, 2), (True, 0)):
        with Consumer(shop.dsn, "q", "c") as consumer:
            for batch in consumer.batches(once=True):
                if commit:
                    batch.commit()
                    batch.commit()
                break
            if not commit:
                assert not batch.finished
        if commit:
            assert len(consumed(shop)) == left


def test_work_in_the_batch_transaction_is_done_once(shop: Database) -> None:
    insert(shop, 1, 3)
    with Consumer(shop.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            for event in batch.events():
                batch.connection.execute("insert into seen values (%s, %s)", [event.id, event.op])
    with shop.connect() as connection:
        assert connection.execute("select from seen").rowcount == 3


def test_a_consumer_takes_over_a_connection_and_gives_it_back(shop: Database) -> None:
    insert(shop, 1, 1)
    with shop.connect(autocommit=False) as connection:
        with Consumer(connection, "q", "c") as consumer:
            assert len([event for batch in consumer.batches(once=True) for event in batch.events()]) == 1
        assert not connection.closed
        with pytest.raises(GdqError, match="in a transaction"), connection.transaction():
            Consumer(connection, "q", "c")


def test_a_role_that_prefers_serializable_changes_nothing(shop: Database) -> None:
    insert(shop, 1, 1)
    dsn = f"{shop.dsn} options='-c default_transaction_isolation=serializable -c timezone=Asia/Tokyo'"
    with Consumer(dsn, "q", "c") as consumer:
        [event] = [event for batch in consumer.batches(once=True) for event in batch.events()]
    assert event.new == {"id": 1, "note": "n1"}


def test_a_worker_that_was_given_up_is_refused(shop: Database) -> None:
    insert(shop, 1, 1)
    with Consumer(shop.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            token = batch.token
            break
        with shop.connect() as connection, connection.transaction():
            connection.execute("select gdq.force_tick('q')")
        with shop.connect() as connection, connection.transaction():
            zombie = Batch.open(connection, "q", "c", 10)
            assert zombie is not None
            zombie.token = token
            with pytest.raises(StaleBatch):
                zombie.commit()


def test_position_survives_as_text(shop: Database) -> None:
    with Consumer(shop.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            position = batch.position
            assert Position.parse(str(position)) == position
            assert (position.kind, position.tick, position.snapshot) == ("queue", batch.tick_to, batch.snapshot_to)
    for text in ("", "queue/1/x", "queue/e/one/x/1:1:", "1:1:"):
        with pytest.raises(GdqError, match="not a position"):
            Position.parse(text)


def test_consumer_is_a_batch_source(shop: Database) -> None:
    def read(source: BatchSource) -> list[Event]:
        events: list[Event] = []
        for batch in source.batches(once=True):
            typed: SourceBatch = batch
            events += typed.events()
            typed.commit()
        return events

    insert(shop, 1, 2)
    with Consumer(shop.dsn, "q", "c") as consumer:
        assert len(read(consumer)) == 2


def test_ticks_are_joined_up_to_max_events(shop: Database) -> None:
    for first in (1, 11, 21):
        insert(shop, first, first + 9)
        gdq("tick", "q", dsn=shop.dsn)
    with Consumer(shop.dsn, "q", "c", max_events=20) as consumer:
        assert [len(list(batch.events())) for batch in consumer.batches(once=True)] == [20, 10]


def test_timeout_ends_the_wait(shop: Database) -> None:
    with Consumer(shop.dsn, "q", "c") as consumer:
        assert list(consumer.batches(timeout=0.2)) == []


def test_a_waiting_consumer_takes_the_ticks_itself(shop: Database) -> None:
    """No ticker runs here; what is written while the consumer waits arrives all the same."""
    with Consumer(shop.dsn, "q", "c") as consumer:
        writer = threading.Timer(0.3, insert, (shop, 1, 3))
        writer.start()
        for batch in consumer.batches(timeout=SECONDS):
            events = list(batch.events())
            if events:
                break
        writer.join()
    assert len(events) == 3


def test_waiting_costs_no_transaction_numbers(shop: Database) -> None:
    with Consumer(shop.dsn, "q", "c") as consumer, shop.connect() as connection:
        list(consumer.batches(timeout=0.1))
        before = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
        list(consumer.batches(timeout=2))
        after = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert before is not None
    assert after is not None
    assert after[0] - before[0] < 5


def test_events_may_be_read_in_part_and_again(shop: Database) -> None:
    insert(shop, 1, 5)
    with Consumer(shop.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            first, again = batch.events(), batch.events()
            assert next(first) == next(again)
            assert len(list(batch.events())) == 5


def test_a_tick_wakes_the_consumer(shop: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdq.listener._PAUSE_SECONDS_MAX", 2 * SECONDS)
    monkeypatch.setattr("gdq.listener._LOOK_SECONDS", 2 * SECONDS)
    with shop.connect() as connection, Consumer(shop.dsn, "q", "c") as consumer:
        connection.execute("select gdq.drop_queue('q', true)")
        connection.execute("select gdq.create_queue('q', ticker_max_lag => '1 hour', ticker_idle_period => '1 hour')")
        connection.execute("select gdq.add_table('q', 'orders')")
        connection.execute("select gdq.register_consumer('q', 'c')")

        def tick() -> None:
            query = "select from pg_stat_activity where application_name = 'gdq:q/c' and state = 'idle'"
            until(lambda: connection.execute(query).rowcount == 1)
            insert(shop, 1, 1)
            connection.execute("select gdq.force_tick('q')")

        ticking = threading.Timer(0.5, tick)
        ticking.start()
        woken = next(consumer.batches(timeout=SECONDS), None)
        ticking.join()
        assert woken is not None


def test_a_gap_in_capture_stops_a_consumer(shop: Database) -> None:
    insert(shop, 1, 1)
    with shop.connect() as connection:
        connection.execute("alter table orders add stamp double precision default random()")
    insert_more = "insert into orders values (2, 'b', 0)"
    with shop.connect() as connection:
        connection.execute(insert_more)
    with pytest.raises(ResyncRequired, match=r"public\.orders"):
        consumed(shop)
    done = gdq("consume", "q", "c", "--once", dsn=shop.dsn)
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert lines[0].startswith("Error: table public.orders has a gap in its capture")
    assert len(lines) == 2


def test_peek_consumes_nothing_and_leaves_an_open_batch_alone(shop: Database) -> None:
    insert(shop, 1, 3)
    with Consumer(shop.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            token = batch.token
            break
    del consumer
    with shop.connect() as connection:
        assert [event.op for event in peek(connection, "q", limit=2)] == ["insert", "insert"]
        assert [event.new for event in peek(connection, "q", "c", limit=9)][-1] == {"id": 3, "note": "n3"}
        granted = connection.execute("select token from gdq.batch_token order by grant_id desc limit 1").fetchone()
    assert granted is None or granted[0] == token
    assert len(consumed(shop)) == 3


def test_peek_while_a_worker_holds_the_consumer(shop: Database) -> None:
    insert(shop, 1, 3)
    with shop.connect() as connection, Consumer(shop.dsn, "q", "c") as consumer:
        for _ in consumer.batches(once=True):
            with pytest.raises(psycopg.errors.LockNotAvailable):
                peek(connection, "q", limit=2)


def test_peek_of_a_queue_without_consumers(db: Database) -> None:
    with db.connect() as connection:
        connection.execute("select gdq.create_queue('q')")
        with pytest.raises(GdqError, match='queue "q" has no consumer'):
            peek(connection, "q", limit=1)


def test_a_connection_or_a_string_says_where(shop: Database) -> None:
    insert(shop, 1, 2)
    with shop.connect() as connection:
        create_view(connection, "v", "q", "select id, note from orders", "public.v")
        for where in (connection, shop.dsn):
            with copy_table(where, "orders") as copy:
                assert [row["id"] for row in copy.rows()] == [1, 2]
            assert not install(where).changed
            assert verify_view(where, "v") == VerifyResult("v", 2, 0, 0)
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
