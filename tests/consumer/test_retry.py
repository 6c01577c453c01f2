"""Events that are put aside, come again, and end as dead letters."""

from __future__ import annotations

import pytest

from gdq import dead_letters, purge_dead_letters, replay_dead_letters
from gdq import set_retry_limit as set_limit
from gdq.retry import next_retry, retry_info
from gdq.table_copy import copy_table, resynced
from tests.support.retry_shop import RetryShop


@pytest.fixture
def shop(retry_shop: RetryShop) -> RetryShop:
    return retry_shop


def test_an_event_comes_again_in_a_batch_of_its_own(shop: RetryShop) -> None:
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


def test_the_event_is_what_get_batch_showed_though_its_log_is_gone(shop: RetryShop) -> None:
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


def test_not_before_its_time(shop: RetryShop) -> None:
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


def test_an_open_batch_gives_the_same_again(shop: RetryShop) -> None:
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


def test_what_is_rolled_back_was_not_put_aside(shop: RetryShop) -> None:
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


def test_what_a_worker_that_was_given_up_put_aside_does_not_count(shop: RetryShop) -> None:
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


def test_a_successor_puts_the_same_event_aside(shop: RetryShop) -> None:
    """What its predecessor put aside is void."""
    shop.insert(1)
    shop.put(shop.opened(), 1, reason="predecessor")
    batch = shop.opened()
    shop.put(batch, 1, reason="successor")
    shop.finish(batch)
    assert shop.again(shop.opened()) == [(1, 1, "successor")]


def test_limit_then_dead_letter(shop: RetryShop) -> None:
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


def test_ten_retries_unless_set(shop: RetryShop) -> None:
    shop.insert(1)
    tries = 0
    while batch := shop.open():
        tries += 1
        shop.put(batch, 1)
        shop.finish(batch)
    assert tries == 11
    assert dead_letters(shop.connection, "q")[0].retries == 10


def test_replay_and_purge(shop: RetryShop) -> None:
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


def test_refusals(shop: RetryShop) -> None:
    shop.insert(1)
    batch = shop.opened()
    assert shop.refusal("select gdq.retry_event(%s, %s, 99)", *batch) == "42704"
    assert shop.refusal("select gdq.retry_event(%s, %s, 1, '-1 s')", *batch) == "22023"
    assert shop.refusal("select gdq.retry_event(%s, %s, 1, '178000000 years')", *batch) == "22023"
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


def test_many_at_once(shop: RetryShop) -> None:
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


def test_halves_of_a_changed_key_are_put_aside_one_by_one(shop: RetryShop) -> None:
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


def test_a_batch_that_is_left_behind_settles_nothing(shop: RetryShop) -> None:
    """As a seek or a rebase does: the position moves past an open batch."""
    shop.insert(1, 2)
    batch = shop.opened()
    shop.put(batch, 1)
    shop.finish(batch)
    left = shop.opened()
    assert shop.again(left) == [(1, 1, None)]
    shop.put(left, 1)
    shop.connection.execute(
        """insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
           select subscription_id, batch_no + 2, tick_id, snapshot, event_seq from gdq.position_of(1)"""
    )
    assert shop.refusal("select * from gdq.get_retries(%s, %s)", *left) == "GDQ01"
    for _ in range(6):
        shop.connection.execute("select gdq.rotate_control(true, 1)")
    batch = shop.opened()
    assert shop.again(batch) == [(1, 1, None)]
    shop.finish(batch)
    assert shop.open() is None


def test_rotation_keeps_what_waits_and_drops_what_is_done(shop: RetryShop) -> None:
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


def test_rotation_drops_what_a_copy_holds(shop: RetryShop) -> None:
    """It waits no more, so nobody needs it; what waits of other tables stays."""
    shop.connection.execute("create table other (id int primary key); select gdq.add_table('q', 'other')")
    shop.connection.execute("insert into other values (2)")
    shop.insert(1)
    batch = shop.opened()
    for key in (1, 2):
        shop.put(batch, key, "1 hour")
    shop.finish(batch)
    with copy_table(shop.db.dsn, "orders") as copy:
        resynced(shop.connection, "q", "c", "orders", copy.snapshot)
    for _ in range(6):
        shop.connection.execute("select gdq.rotate_control(true, 1)")
    assert shop.connection.execute("select tbl from gdq.retry_event").fetchall() == [("public.other",)]
    assert [info.tbl for info in retry_info(shop.connection, "q")] == ["public.other"]


def test_retries_leave_no_dead_rows(shop: RetryShop) -> None:
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
    written = """select sum(pg_stat_get_tuples_inserted(format('gdq.retry_event_%s', slot)::regclass))
                   from generate_series(0, 1) slot"""
    assert shop.value(written) == 30


def test_forgotten_with_the_consumer(shop: RetryShop) -> None:
    shop.insert(1)
    batch = shop.opened()
    shop.put(batch, 1, "1 hour")
    shop.finish(batch)
    assert shop.value("select gdq.unregister_consumer('q', 'c')") is True
    assert shop.value("select count(*) from gdq.retry_event") == 0


@pytest.mark.server
def test_events_of_a_batch_in_one(shop: RetryShop) -> None:
    """get_events() gives what comes again and then what is new, to the holder of the batch alone."""
    shop.insert(1, 2)
    first = shop.opened()
    assert shop.put(first, 1, reason="later")
    assert shop.finish(first)
    shop.insert(7)
    given_up = shop.opened()
    second = shop.opened()
    query = "select (key->>'id')::int, new->>'note', retries from gdq.get_events(%s, %s)"
    for _ in range(2):
        assert shop.connection.execute(query, second).fetchall() == [(1, "n", 1), (7, "n", 0)]
    assert shop.connection.execute(query, (None, None)).fetchall() == []
    assert shop.refusal(query, *given_up) == "GDQ01"
    assert shop.refusal(query, *first) == "GDQ01"
    shop.connection.execute("begin isolation level repeatable read")
    assert shop.refusal(query, *second) == "GDQ04"
    shop.connection.execute("rollback")
