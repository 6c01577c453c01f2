"""Views that end with ORDER BY ... LIMIT: the first rows are kept with a reserve, and filled anew when it is short."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.plan import top
from gdq.view.view import explain_view
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

pytestmark = pytest.mark.server

STATEMENTS = [
    "create table t (id int primary key, g int, v int, doc json)",
    "create table bag (k int, word text)",
    f"select gdq.add_table('{QUEUE}', 't'), gdq.add_table('{QUEUE}', 'bag')",
]
VIEWS = {
    "v_key": "select v, id from t order by id desc limit 2",
    "v_hidden": "select id, doc::text as doc from t order by v desc, id limit 3",
    "v_nulls": "select id, v from t where g <> 2 order by v nulls first, g desc nulls last, id limit 2 offset 2",
    "v_bag": "select k, word from bag order by word, k fetch first 4 rows only",
    "v_groups": "select g, max(v) as top, count(distinct id) as n from t group by g order by max(v) desc, g limit 2",
    "v_join": "select t.id, b.word, b.k from t join bag b on b.k = t.g order by b.word desc, t.id, b.k limit 3",
    "v_left": "select t.id, (select count(*) from bag b where b.k = t.g) as n from t order by t.id limit 3",
    "v_distinct": "select distinct k from bag order by k desc limit 2",
    "v_sums": "select g, sum(v) as total, count(*) as n from t group by g order by sum(v) desc nulls last, g limit 2",
    "v_having": "select g, count(*) as n from t group by g having count(*) > 3 order by count(*), g desc limit 2",
    "v_loose": "select v * 1.0 as w, count(*) as n from t group by v * 1.0 order by count(*), v * 1.0 limit 3",
}
TIES = "select g, sum(v) as total from t group by g order by sum(v) desc nulls last limit 2"


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    yield from make_shop(db, STATEMENTS)


def churn(shop: Shop, draw: random.Random) -> None:
    """Add, change and remove some rows, now and then most of the first ones."""
    for _ in range(draw.randint(1, 6)):
        number, maybe = draw.randint(1, 40), draw.choice(("null", str(draw.randint(0, 9))))
        shop.execute(f"delete from t where id = {number}")
        if draw.random() < 0.7:
            shop.execute(f"insert into t values ({number}, {draw.randint(0, 4)}, {maybe}, '{{\"a\": {number}}}')")
        word = draw.choice("abcdef")
        shop.execute(f"insert into bag values ({draw.randint(0, 4)}, '{word}'), ({draw.randint(0, 4)}, '{word}')")
    if draw.random() < 0.4:
        shop.execute("delete from t where id in (select id from t order by id desc limit 7)")
        shop.execute(f"delete from bag where word < '{draw.choice('abcdef')}'")


def test_first_rows_stay_exact(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_RESERVE", 0)
    draw = random.Random(7)
    for _ in range(6):
        churn(shop, draw)
    for name, query in VIEWS.items():
        shop.view(name, query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, VIEWS)
        for _ in range(5):
            churn(shop, draw)
            results = shop.check(refresher, VIEWS)
            assert {result.action for result in results.values()} <= {"delta", "none"}, results
        shop.execute("delete from t; delete from bag")
        shop.check(refresher, VIEWS)


def test_an_order_with_ties_is_loaded_in_full(shop: Shop) -> None:
    for query in ("select id, v from t order by v limit 3", "select k, word from bag order by word limit 3"):
        plan = explain_view(shop.connection, QUEUE, query, engine="postgres")
        assert (plan.strategy, str(plan).count("[order-limit]") > 0) == ("full", True), query


def test_equal_groups_at_the_end_of_a_view(shop: Shop) -> None:
    """Any of them may be shown, and each refresh may show another one: it is followed from the changes all the same."""
    draw = random.Random(3)
    for _ in range(4):
        churn(shop, draw)
    shop.view("v_ties", TIES, engine="postgres")
    groups, totals = TIES.partition(" order by")[0], f"select total from ({TIES}) as q"
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("v_ties")
        for _ in range(12):
            churn(shop, draw)
            shop.execute("update t set v = 4 where v = 3")
            assert refresher.refresh("v_ties").action in ("delta", "none")
            assert shop.execute(f"select * from v_ties except all ({groups})") == []
            shown = sorted(shop.execute("select total from v_ties"), key=str)
            assert shown == sorted(shop.execute(totals), key=str)


def test_the_first_of_many_groups_do_not_read_the_others(shop: Shop) -> None:
    shop.execute("insert into t select i, i % 30000, i from generate_series(1, 60000) i")
    query = "select g, sum(v) as total from t group by g order by sum(v) desc nulls last, g limit 5"
    shop.view("v", query, engine="postgres")
    read = """select sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) from pg_stat_user_tables
               where relname like 'gdq\\_state\\_%'"""
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("v")
    found = []
    for number in range(3):
        shop.execute(f"update t set v = v + 1 where id in (2, {60000 - number})")
        ((action, *_),) = shop.execute("call gdq.refresh('v')")
        assert (action, shop.differences("v", query)) == ("delta", (0, 0))
        shop.execute("select pg_stat_force_next_flush()")
        shop.execute("select pg_stat_clear_snapshot()")
        found += [count for (count,) in shop.execute(read)]
    assert found[2] - found[1] < 100, found
