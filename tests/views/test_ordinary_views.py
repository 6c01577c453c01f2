"""Views over ordinary views, whose queries take their places, also after they were replaced."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import PlanError
from gdq.view.view import create_view
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

pytestmark = pytest.mark.server

STATEMENTS = [
    "create table t (id int primary key, g int, v int)",
    "create table u (id int primary key, g int, v int)",
    "create table w (id int primary key, g int)",
    *(f"select gdq.add_table('{QUEUE}', '{table}')" for table in ("t", "u", "w")),
    "create view of_g as select g as key, count(*) as n, max(v) from t group by g",
    "create view of_view (k, total) as select o.key, o.n + 1 from of_g as o where o.n > 0",
    """create schema other; create view other."Odd one" as with x as (select id, g from u) select * from x""",
]
VIEWS = {
    "v_one": "select * from of_g",
    "v_two": "select a.k, a.total, b.n from of_view a left join of_g b on b.key = a.k",
    "v_odd": """select "Odd one".id, o.id as other from other."Odd one" join other."Odd one" o using (g)""",
    "v_inside": "select id from t where exists (select from of_view w where w.k = t.g)",
}


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    yield from make_shop(db, STATEMENTS)


def churn(shop: Shop, draw: random.Random) -> None:
    """Add, change and remove some rows."""
    for table in ("t", "u"):
        for _ in range(draw.randint(1, 5)):
            number = draw.randint(1, 20)
            shop.execute(f"delete from {table} where id = {number}")
            if draw.random() < 0.8:
                shop.execute(f"insert into {table} values ({number}, {draw.randint(0, 4)}, {draw.randint(0, 9)})")


def test_their_queries_are_followed(shop: Shop) -> None:
    draw = random.Random(5)
    for name, query in VIEWS.items():
        shop.view(name, query, engine="postgres")
    replaced = [
        (
            "create or replace view of_g as select g as key, count(*) as n, max(v + id) from t group by g",
            "v_inside v_one v_two",
        ),
        ("create or replace view of_view (k, total) as select key, n * 2 from of_g where n > 1", "v_inside v_two"),
        ("""create or replace view other."Odd one" as select id, g from u where v > 2""", "v_odd"),
    ]
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, VIEWS)
        for statement, loaded in replaced:
            for _ in range(2):
                churn(shop, draw)
                assert {result.action for result in shop.check(refresher, VIEWS).values()} <= {"delta", "none"}
            shop.execute(statement)
            results = shop.check(refresher, VIEWS)
            full = {name: result.reason for name, result in results.items() if result.action == "full"}
            assert full == dict.fromkeys(loaded.split(), "a view in its query was replaced")
    # the same view, although its canonical query is another by now
    assert create_view(shop.connection, "v_one", QUEUE, VIEWS["v_one"], "public.v_one", engine="postgres") is None


def test_a_replaced_view_reads_no_other_table(shop: Shop) -> None:
    shop.view("v", "select key from of_g", engine="postgres")
    shop.view("v_gone", """select id from other."Odd one\"""", engine="postgres")
    shop.execute("create or replace view of_g as select g as key, count(*) as n, max(id) from w group by g")
    shop.execute('drop view other."Odd one"')
    with Refresher(shop.db.dsn) as refresher:
        with pytest.raises(PlanError, match='was replaced and reads "public"'):
            refresher.refresh("v")
        with pytest.raises(PlanError, match="does not exist"):
            refresher.refresh("v_gone")
