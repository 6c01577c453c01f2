"""Events that are put aside, come again, and end as dead letters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gdq import Consumer, DeadLetter, Event, GdqError, Retry, dead_letters, purge_dead_letters, replay_dead_letters
from gdq import set_retry_limit as set_limit
from gdq.batch import Batch
from gdq.retry import handle_each, next_retry, retry_info, settle
from tests.fix_server import Database
from tests.programs import gdq

pytestmark = pytest.mark.server

NOW = timedelta(0)
HOUR = timedelta(hours=1)


class Shop:
    """A queue q that captures orders, with the consumer c; batches are opened, read and finished as SQL does it."""

    def __init__(self, db: Database, connection: psycopg.Connection[Any]) -> None:
        self.db = db
        self.connection = connection

    def insert(self, *keys: int) -> None:
        """One row, and one event, a key."""
        for key in keys:
            self.connection.execute("insert into orders values (%s, 'n')", [key])
        self.value("select gdq.force_tick('q')")

    def value(self, query: str, *values: Any) -> Any:
        row = self.connection.execute(query.encode(), values or None).fetchone()
        return row[0] if row else None

    def open(self) -> tuple[int, str] | None:
        return self.connection.execute("select batch_id, token::text from gdq.next_batch('q', 'c')").fetchone()

    def opened(self) -> tuple[int, str]:
        batch = self.open()
        assert batch
        return batch

    def fresh(self, batch: tuple[int, str]) -> list[tuple[int, int]]:
        """Number and key of the events of a batch that come for the first time."""
        return self.connection.execute("select ev_id, (key->>'id')::int from gdq.get_batch(%s, %s)", batch).fetchall()

    def again(self, batch: tuple[int, str]) -> list[tuple[int, int, str | None]]:
        """Key, retries and reason of the events of a batch that were put aside before."""
        query = "select (key->>'id')::int, retries, reason from gdq.get_retries(%s, %s)"
        return self.connection.execute(query.encode(), batch).fetchall()

    def put(self, batch: tuple[int, str], key: int, delay: str = "0", reason: str | None = None) -> bool:
        """Put the event of a key aside."""
        query = """select ev_id from (select ev_id, key from gdq.get_batch(%(id)s, %(token)s)
                     union all select ev_id, key from gdq.get_retries(%(id)s, %(token)s)) e
                    where (key->>'id')::int = %(key)s"""
        row = self.connection.execute(query, {"id": batch[0], "token": batch[1], "key": key}).fetchone()
        assert row
        return bool(self.value("select gdq.retry_event(%s, %s, %s, %s, %s)", *batch, row[0], delay, reason))

    def finish(self, batch: tuple[int, str]) -> bool:
        return bool(self.value("select gdq.finish_batch(%s, %s)", *batch))

    def refusal(self, query: str, *values: Any) -> str | None:
        """The SQLSTATE of an error."""
        with pytest.raises(psycopg.Error) as error:
            self.connection.execute(query.encode(), values or None)
        return error.value.sqlstate

    def seen(self) -> int:
        return int(self.value("select count(*) from seen"))


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    with db.connect() as connection:
        connection.execute("create table orders (id int primary key, note text); create table seen (ev_id bigint)")
        connection.execute("select gdq.create_queue('q', rotation_period => '1 microsecond')")
        connection.execute("select gdq.add_table('q', 'orders')")
        connection.execute("select gdq.register_consumer('q', 'c')")
        yield Shop(db, connection)


def test_an_event_comes_again_in_a_batch_of_its_own(shop: Shop) -> None:
    shop.insert(1, 2, 3)
    first = shop.opened()
    assert shop.put(first, 2, reason="no such shelf")
    assert shop.put(first, 2, reason="said twice") is True
    assert shop.again(first) == []
    assert shop.open() is not None  # still the same batch: nothing counts before it is finished
    first = shop.opened()
    assert shop.put(first, 2, reason="no such shelf")
    shop.finish(first)
    second = shop.opened()
    assert shop.again(second) == [(2, 1, "no such shelf")]
    assert shop.fresh(second) == []
    ticks = shop.connection.execute("select tick_from, tick_to from gdq.batch where batch_id = %s", second[:1])
    assert len(set(ticks.fetchone() or ())) == 1
    shop.finish(second)
    assert shop.open() is None


def test_the_event_is_what_get_batch_showed_though_its_log_is_gone(shop: Shop) -> None:
    shop.connection.execute("alter table orders add price numeric, add at timestamptz")
    shop.connection.execute("insert into orders values (1, 'a', 1.50, '2026-01-02 03:04:05+06')")
    shop.connection.execute("update orders set note = 'b'")
    shop.value("select gdq.force_tick('q')")
    batch = shop.opened()
    rows = shop.connection.execute("select * from gdq.get_batch(%s, %s)", batch).fetchall()
    (update,) = [row for row in rows if row[3] == "update"]
    shop.connection.execute("set datestyle = 'German'; set timezone = 'Asia/Tokyo'; set intervalstyle = 'sql_standard'")
    assert shop.value("select gdq.retry_event(%s, %s, %s, '0')", *batch, update[0]) is True
    shop.connection.execute("reset datestyle; reset timezone")
    shop.finish(batch)
    shop.connection.execute("drop table orders")
    for _ in range(20):
        shop.connection.execute("select gdq.maintain()")
    assert shop.value("select count(*) from gdq.log_segment s where pg_relation_size(s.segment) > 0") == 0
    again = shop.connection.execute("select * from gdq.get_retries(%s, %s)", shop.opened()).fetchall()
    assert again == [(*update, 1, None)]


def test_not_before_its_time(shop: Shop) -> None:
    shop.insert(1, 2)
    batch = shop.opened()
    shop.put(batch, 1, "1 hour")
    shop.put(batch, 2)
    shop.finish(batch)
    batch = shop.opened()
    assert shop.again(batch) == [(2, 1, None)]
    shop.finish(batch)
    assert shop.open() is None
    seconds = next_retry(shop.connection, "q", "c")
    assert seconds is not None
    assert 3000 < seconds <= 3600
    shop.connection.execute("update gdq.retry_event set due_at = now()")
    shop.insert(3)
    batch = shop.opened()
    assert (shop.again(batch), [key for _, key in shop.fresh(batch)]) == ([(1, 1, None)], [3])


def test_an_open_batch_gives_the_same_again(shop: Shop) -> None:
    shop.insert(1, 2, 3, 4)
    batch = shop.opened()
    for key in (1, 2, 3):
        shop.put(batch, key)
    shop.finish(batch)
    first = shop.connection.execute("select batch_id, token::text from gdq.next_batch('q', 'c', 2)").fetchone()
    assert first
    assert [key for key, _, _ in shop.again(first)] == [1, 2]
    shop.insert(5)
    second = shop.opened()
    assert first[0] == second[0]
    assert [key for key, _, _ in shop.again(second)] == [1, 2]
    assert shop.refusal("select * from gdq.get_retries(%s, %s)", *first) == "GDQ01"
    shop.finish(second)
    third = shop.opened()
    assert ([key for key, _, _ in shop.again(third)], [key for _, key in shop.fresh(third)]) == ([3], [5])


def test_what_is_rolled_back_was_not_put_aside(shop: Shop) -> None:
    shop.insert(1)
    with shop.connection.transaction(force_rollback=True):
        batch = shop.opened()
        shop.put(batch, 1)
        shop.finish(batch)
    assert retry_info(shop.connection, "q") == []
    batch = shop.opened()
    assert shop.fresh(batch) != []
    shop.put(batch, 1)
    shop.finish(batch)
    with shop.connection.transaction(force_rollback=True):
        batch = shop.opened()
        assert shop.again(batch) == [(1, 1, None)]
        shop.finish(batch)
    batch = shop.opened()
    assert shop.again(batch) == [(1, 1, None)]


def test_what_a_worker_that_was_given_up_put_aside_does_not_count(shop: Shop) -> None:
    """Its successor gets the event in the batch, and must not get it again."""
    shop.insert(1, 2)
    zombie = shop.opened()
    shop.put(zombie, 1)
    shop.connection.execute("select gdq.dead_letter(%s, %s, %s)", [*zombie, shop.fresh(zombie)[1][0]])
    batch = shop.opened()
    assert [key for _, key in shop.fresh(batch)] == [1, 2]
    assert shop.refusal("select gdq.retry_event(%s, %s, 1)", *zombie) == "GDQ01"
    shop.finish(batch)
    assert shop.open() is None
    assert dead_letters(shop.connection, "q") == []
    assert shop.refusal("select gdq.retry_event(%s, %s, 1)", *batch) == "GDQ01"


def test_limit_then_dead_letter(shop: Shop) -> None:
    set_limit(shop.connection, "q", "c", 2)
    shop.insert(7)
    counts, results = [], []
    while batch := shop.open():
        counts += [retries for _, retries, _ in shop.again(batch)]
        results.append(shop.put(batch, 7, reason=f"try {len(counts)}"))
        shop.finish(batch)
    assert (counts, results) == ([1, 2], [True, True, False])
    (letter,) = dead_letters(shop.connection, "q", "c")
    assert (letter.op, letter.key, letter.new) == ("insert", {"id": 7}, {"id": 7, "note": "n"})
    assert (letter.consumer_name, letter.retries, letter.reason) == ("c", 2, "try 2")
    assert shop.refusal("select gdq.set_retry_limit('q', 'c', -1)") == "22023"


def test_ten_retries_unless_set(shop: Shop) -> None:
    shop.insert(1)
    tries = 0
    while batch := shop.open():
        tries += 1
        shop.put(batch, 1)
        shop.finish(batch)
    assert tries == 11
    assert dead_letters(shop.connection, "q")[0].retries == 10


def test_replay_and_purge(shop: Shop) -> None:
    shop.insert(1, 2, 3)
    batch = shop.opened()
    for ev_id, key in shop.fresh(batch):
        shop.connection.execute("select gdq.dead_letter(%s, %s, %s, %s)", [*batch, ev_id, f"r{key}"])
    shop.finish(batch)
    letters = dead_letters(shop.connection, "q")
    assert [letter.reason for letter in letters] == ["r1", "r2", "r3"]
    assert shop.open() is None
    assert replay_dead_letters(shop.connection, "q", "c", [letters[1].dead_letter_id]) == 1
    assert replay_dead_letters(shop.connection, "q", "c", [letters[1].dead_letter_id]) == 0
    assert purge_dead_letters(shop.connection, "q", "c", older_than="1 hour") == 0
    assert purge_dead_letters(shop.connection, "q", "c", [letters[0].dead_letter_id]) == 1
    batch = shop.opened()
    assert shop.again(batch) == [(2, 1, "r2")]
    shop.finish(batch)
    assert purge_dead_letters(shop.connection, "q", "c") == 1
    assert dead_letters(shop.connection, "q") == []
    assert shop.refusal("select * from gdq.dead_letters('q', 'nobody')") == "42704"


def test_refusals(shop: Shop) -> None:
    shop.insert(1)
    batch = shop.opened()
    assert shop.refusal("select gdq.retry_event(%s, %s, 99)", *batch) == "42704"
    assert shop.refusal("select gdq.retry_event(%s, %s, 1, '-1 s')", *batch) == "22023"
    shop.connection.execute("begin isolation level repeatable read")
    assert shop.refusal("select * from gdq.get_retries(%s, %s)", *batch) == "GDQ04"
    shop.connection.execute("rollback; begin isolation level repeatable read")
    assert shop.refusal("select gdq.retry_event(%s, %s, 1)", *batch) == "GDQ04"
    shop.connection.execute("rollback")
    shop.connection.execute("alter table orders add stamp double precision default random()")
    shop.finish(batch)
    shop.value("select gdq.force_tick('q')")
    batch = shop.opened()
    gap = shop.value("select ev_id from gdq.get_batch(%s, %s) where op = 'resync'", *batch)
    assert shop.refusal("select gdq.retry_event(%s, %s, %s)", *batch, gap) == "55000"


def test_many_at_once(shop: Shop) -> None:
    """In one reading of the batch, those that it brings again among them; once put aside stays put aside."""
    set_limit(shop.connection, "q", "c", 1)
    shop.insert(*range(6))
    batch = shop.opened()
    put = "select gdq.put_aside(%s, %s, %s::bigint[], %s::text[], '0', %s::text[], false)"
    ids = [ev_id for ev_id, _ in shop.fresh(batch)]
    assert shop.value(put, *batch, ids[:2], [None, "insert"], ["a", "b"]) == 2
    assert shop.value(put, *batch, [*ids[1:4], ids[3]], [None] * 4, ["again", "c", "d", "d"]) == 4
    assert shop.refusal(put, *batch, [ids[4], 99], [None, None], [None, None]) == "42704"
    assert shop.refusal(put, *batch, ids[4:], ["delete"], [None]) == "42704"
    shop.finish(batch)
    shop.insert(6)
    batch = shop.opened()
    assert shop.again(batch) == [(0, 1, "a"), (1, 1, "b"), (2, 1, "c"), (3, 1, "d")]
    fresh = shop.fresh(batch)[0][0]
    assert shop.value(put, *batch, [*ids[:2], fresh], [None] * 3, ["x", "y", "z"]) == 1
    shop.finish(batch)
    assert shop.again(shop.opened()) == [(6, 1, "z")]
    assert [letter.reason for letter in dead_letters(shop.connection, "q")] == ["x", "y"]


def test_halves_of_a_changed_key_are_put_aside_one_by_one(shop: Shop) -> None:
    shop.connection.execute("create table item (id int primary key); select gdq.add_table('q', 'item', mode => 'pk')")
    shop.connection.execute("insert into item values (1)")
    shop.connection.execute("update item set id = 2")
    shop.value("select gdq.force_tick('q')")
    batch = shop.opened()
    ev_id = shop.value("select ev_id from gdq.get_batch(%s, %s) where op = 'delete'", *batch)
    assert shop.value("select gdq.retry_event(%s, %s, %s, '0', op => 'insert')", *batch, ev_id) is True
    shop.finish(batch)
    batch = shop.opened()
    assert shop.again(batch) == [(2, 1, None)]
    shop.finish(batch)


def test_rotation_keeps_what_waits_and_drops_what_is_done(shop: Shop) -> None:
    shop.insert(*range(8))
    batch = shop.opened()
    for key in range(4):
        shop.put(batch, key)
    shop.put(batch, 4, "1 hour")
    shop.connection.execute("select gdq.dead_letter(%s, %s, %s)", [*batch, shop.fresh(batch)[5][0]])
    shop.finish(batch)
    batch = shop.opened()  # brings 0 to 3
    shop.put(batch, 0)
    shop.finish(batch)
    batch = shop.opened()  # brings 0 and stays open, with 0 put aside once more
    shop.put(batch, 0, "1 hour")
    for _ in range(6):
        shop.connection.execute("select gdq.rotate_control(true, 1)")
    rows = "select (key->>'id')::int, retries from gdq.retry_event order by 1, 2"
    assert shop.connection.execute(rows).fetchall() == [(0, 2), (0, 3), (4, 1)]
    assert shop.again(batch) == [(0, 2, None)]
    shop.finish(batch)
    for _ in range(6):
        shop.connection.execute("select gdq.rotate_control(true, 1)")
    assert shop.connection.execute(rows).fetchall() == [(0, 3), (4, 1)]
    assert [(info.key, info.retries) for info in retry_info(shop.connection, "q", "c")] == [
        ({"id": 4}, 1),
        ({"id": 0}, 3),
    ]
    shop.connection.execute("update gdq.retry_event set due_at = now()")
    batch = shop.opened()
    assert shop.again(batch) == [(0, 3, None), (4, 1, None)]
    shop.finish(batch)
    for _ in range(6):
        shop.connection.execute("select gdq.rotate_control(true, 1)")
    for table in ("retry_event", "retry_delivery", "batch_end"):
        assert shop.value(f"select count(*) from gdq.{table}") == 0, table


def test_retries_leave_no_dead_rows(shop: Shop) -> None:
    shop.insert(1)
    set_limit(shop.connection, "q", "c", 100)
    for _ in range(30):
        batch = shop.opened()
        shop.put(batch, 1)
        shop.finish(batch)
    with shop.connection.transaction():
        query = """select relname, pg_stat_get_tuples_updated(oid) + pg_stat_get_tuples_deleted(oid) from pg_class
                    where relnamespace = 'gdq'::regnamespace and relname ~ '^(batch|retry|position|dead).*[01]$'"""
        shop.connection.execute("select pg_stat_force_next_flush()")
    changed = {name: number for name, number in shop.connection.execute(query) if number}
    assert changed == {}


def test_consumer_gives_retries_first(shop: Shop) -> None:
    shop.insert(1, 2)
    seen: list[list[tuple[int, int]]] = []
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(timeout=0.1):
            seen.append([])
            for event in batch.events():
                assert event.key
                seen[-1].append((event.key["id"], event.retries))
                if event.key["id"] == 2 and event.retries < 2:
                    assert batch.retry(event, NOW, "later") is True
                if event.retries == 2:
                    batch.dead_letter(event, "enough")
            if len(seen) == 1:
                shop.insert(3)
    assert seen == [[(1, 0), (2, 0)], [(2, 1), (3, 0)], [(2, 2)]]
    assert [letter.reason for letter in dead_letters(shop.connection, "q")] == ["enough"]


def test_a_waiting_consumer_wakes_for_a_retry(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tick comes, and it would look for one by itself only after minutes."""
    monkeypatch.setattr("gdq.consumer._LOOK_SECONDS", 300.0)
    shop.insert(1)
    retries = []
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(timeout=60):
            for event in batch.events():
                retries.append(event.retries)
                if not event.retries:
                    batch.retry(event, timedelta(seconds=0.5))
            if 1 in retries:
                break
    assert retries == [0, 1]


def each(shop: Shop, handler: Any, on_error: timedelta | None = None) -> None:
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            handle_each(batch, batch.events(), handler, on_error=on_error)


def test_one_event_at_a_time(shop: Shop) -> None:
    """What a handler did for an event that it puts aside is undone, and only that."""

    def handle(connection: psycopg.Connection[Any], event: Event) -> None:
        connection.execute("insert into seen values (%s)", [event.id])
        assert event.key
        match event.key["id"]:
            case 1:
                raise Retry("later", delay=HOUR)
            case 2:
                raise DeadLetter("never")
            case 3:
                connection.execute("select 1 / 0")
            case 4:
                raise TimeoutError("no answer\0")

    shop.insert(1, 2, 3, 4, 5)
    with pytest.raises(psycopg.errors.DivisionByZero):
        each(shop, handle)
    assert (shop.seen(), retry_info(shop.connection, "q")) == (0, [])
    each(shop, handle, on_error=HOUR)
    assert shop.seen() == 1
    assert [info.reason for info in retry_info(shop.connection, "q")] == [
        "later",
        "DivisionByZero: division by zero",
        "TimeoutError: no answer",
    ]
    assert [letter.reason for letter in dead_letters(shop.connection, "q")] == ["never"]


def test_a_lost_connection_puts_nothing_aside(shop: Shop) -> None:
    def handle(connection: psycopg.Connection[Any], event: Event) -> None:
        with shop.db.connect("su") as su:
            su.execute("select pg_terminate_backend(%s)", [connection.info.backend_pid])
        connection.execute("select 1")

    shop.insert(1)
    with pytest.raises(psycopg.OperationalError):
        each(shop, handle, on_error=HOUR)
    assert retry_info(shop.connection, "q") == []
    assert len(shop.fresh(shop.opened())) == 1


def test_outcomes_of_a_batch_handler(shop: Shop) -> None:
    shop.insert(1, 2)
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            first, second = batch.events()
            with pytest.raises(GdqError, match="a handler returned 7"):
                settle(batch, [7])
            with pytest.raises(GdqError, match="a handler returned Retry"):
                settle(batch, [Retry("which?")])
            settle(batch, [Retry("later", event=first), DeadLetter("never", event=second)])
    assert [info.reason for info in retry_info(shop.connection, "q")] == ["later"]
    assert [letter.ev_id for letter in dead_letters(shop.connection, "q")] == [second.id]


HANDLERS = """
import gdq
def one(connection, event):
    if event.key["id"] == 1:
        raise gdq.DeadLetter("never")
    if event.key["id"] == 2:
        raise KeyError("shelf")
def all_of_it(connection, events):
    for event in events:
        yield gdq.DeadLetter("returned", event=event)
def raises(connection, events):
    raise gdq.Retry("later")
"""


def test_commands(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "hands.py").write_text(HANDLERS)
    dsn = shop.db.dsn
    shop.insert(1, 2)
    wrong = gdq("consume", "q", "c", "hands:raises", "--once", dsn=dsn, cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr.splitlines()[0]) == (1, "Error: handler hands:raises raised Retry: later")
    assert gdq("consume", "q", "c", "hands:one", "--retry-errors", "1", dsn=dsn, cwd=tmp_path).returncode == 2
    once = ("consume", "q", "c", "hands:one", "--each", "--retry-errors", "0", "--once")
    done = gdq(*once, dsn=dsn, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (waiting,) = json.loads(gdq("retries", "q", "c", "--json", dsn=dsn).stdout)
    assert (waiting["key"], waiting["retries"], waiting["reason"]) == ({"id": 2}, 1, "KeyError: 'shelf'")
    done = gdq("consume", "q", "c", "--once", dsn=dsn)
    (printed,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (printed["key"], printed["retries"]) == ({"id": 2}, 1)
    shop.insert(3)
    assert gdq("consume", "q", "c", "hands:all_of_it", "--once", dsn=dsn, cwd=tmp_path).returncode == 0
    letters = json.loads(gdq("dead-letters", "q", "--json", dsn=dsn).stdout)
    assert [letter["reason"] for letter in letters] == ["never", "returned"]
    assert gdq("replay-dead-letters", "q", "c", dsn=dsn).returncode == 2
    number = str(letters[0]["dead_letter_id"])
    assert gdq("replay-dead-letters", "q", "c", "--id", number, dsn=dsn).stderr == "replayed 1 of c on q\n"
    assert gdq("purge-dead-letters", "q", "c", "--all", dsn=dsn).stderr == "purged 1 of c on q\n"
    assert gdq("set-retry-limit", "q", "c", "3", dsn=dsn).stderr == "events of c on q are retried 3 times\n"


def test_forgotten_with_the_consumer(shop: Shop) -> None:
    shop.insert(1)
    batch = shop.opened()
    shop.put(batch, 1, "1 hour")
    shop.finish(batch)
    assert shop.value("select gdq.unregister_consumer('q', 'c')") is True
    assert shop.value("select count(*) from gdq.retry_event") == 0


def test_batch_class_outside_a_consumer(shop: Shop) -> None:
    """The caller owns the transaction."""
    shop.insert(1)
    with shop.connection.transaction():
        batch = Batch.open(shop.connection, "q", "c", 10)
        assert batch
        (event,) = batch.events()
        batch.retry(event, NOW)
        batch.commit()
    with shop.connection.transaction():
        batch = Batch.open(shop.connection, "q", "c", 10)
        assert batch
        (event,) = batch.events()
        assert (event.retries, batch.tick_from) == (1, batch.tick_to)
