"""Views of one table that read columns which its log does not hold: refreshed by the table's own key."""

from __future__ import annotations

import random
from collections.abc import Iterator

import psycopg
import pytest

from gdq.conninfo import conninfo_without_password
from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import PlanError
from gdq.plan.postgres import PostgresPlan
from gdq.plan.steps import ReplaceOutcome
from gdq.view.view import EngineChoice, create_view, explain_view, view_history
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

# bare: the log holds the key alone; pair: a key of two columns, the log lacks one other column.
STATEMENTS = [
    "create table bare (id int primary key, o text, n int)",
    'create table pair (a int, "B c" text, o numeric, n int, primary key (a, "B c"))',
    "insert into bare select i, nullif('o' || i % 4, 'o2'), i % 7 from generate_series(1, 60) i",
    "insert into pair select i % 6, 'b' || i, i / 3.0, i % 5 from generate_series(1, 60) i",
    f"select gdq.add_table('{QUEUE}', 'bare', mode => 'pk')",
    f"select gdq.add_table('{QUEUE}', 'pair', exclude => array['o'])",
]
VIEWS = {
    "bare_rows": "select id, o from bare",
    "bare_some": "select o, n + 1 as more, id as key, id as again from bare where n > 2 or o is null order by o",
    "pair_rows": 'select "B c", a, o * 2 as double from pair where o < 15',
    "pair_named": 'select a, "B c" as "x""y", o, n from pair as p',
}


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    yield from make_shop(db, STATEMENTS)


def change(shop: Shop, rng: random.Random) -> None:
    """One transaction: columns that are not logged and those that are, keys, rows that come, go and come back."""
    some = rng.randrange(2, 6)
    statements = [
        f"update bare set o = 'changed{rng.random()}' where id % {some} = 0",
        f"update bare set id = id + {rng.randrange(100, 10000)} where id % 11 = {some}",
        f"update bare set n = n + 1, o = null where id % 13 = {some}",
        f"delete from bare where id % 17 = {some}",
        f"insert into bare select i - {50 * some}, 'new', i % 5 from generate_series(1, 4) i on conflict do nothing",
        f"update pair set o = o + 1 where n = {some}",
        f"""update pair set a = a + {some} where n = 1 and not exists (
              select from pair p where p.a = pair.a + {some} and p."B c" = pair."B c")""",
        f"delete from pair where a = {some}",
        f"insert into pair select {some}, 'b' || i, 1.50, i from generate_series(1, 4) i on conflict do nothing",
    ]
    with shop.connection.transaction(force_rollback=rng.random() < 0.1):
        for statement in rng.sample(statements, 3):
            shop.execute(statement)


def followed(shop: Shop, engine: EngineChoice, rounds: int) -> None:
    views = VIEWS
    for name, query in views.items():
        shop.view(name, query, engine=engine)
    rng = random.Random(7)
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, views)
        for _ in range(rounds):
            change(shop, rng)
            results = shop.check(refresher, views)
            assert {result.action for result in results.values()} <= {"delta", "none"}
        shop.execute("update bare set o = 'last'; update pair set o = -1")
        assert {result.action for result in shop.check(refresher, views).values()} == {"delta"}
    assert {view_history(shop.connection, name, 1)[0].kind for name in views} == {"by-key"}


def test_followed_by_postgres(shop: Shop) -> None:
    followed(shop, "postgres", 12)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.usefixtures("spark", "closed_sockets")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_followed_by_spark(shop: Shop) -> None:
    followed(shop, "spark", 3)


def test_elsewhere(shop: Shop, empty_db: Database) -> None:
    with conninfo_without_password(empty_db.dsn) as dsn, psycopg.connect(dsn, autocommit=True) as far:
        for name, query in VIEWS.items():
            shop.view(name, query, engine="postgres", target_dsn=dsn)
        rng = random.Random(3)
        with Refresher(shop.db.dsn) as refresher:
            for number in range(5):
                results = {name: refresher.refresh(name) for name in VIEWS}
                assert number == 0 or "full" not in {result.action for result in results.values()}
                for name, query in VIEWS.items():
                    expected = shop.execute(f"select q::text from ({query}) q order by 1")
                    assert far.execute(f"select t::text from {name} t order by 1".encode()).fetchall() == expected
                change(shop, rng)


@pytest.mark.parametrize("query", ["select id, o from bare", "select id, bare::text as o from bare"])
@pytest.mark.parametrize(
    "ddl",
    [
        ["alter table bare drop column o", "alter table bare add column o text default 'new'"],
        ["alter table bare rename column o to p", "alter table bare add column o text default 'new'"],
        ["alter table bare rename column o to p", "alter table bare rename column n to o"],
    ],
)
def test_ddl_on_columns_that_are_not_logged(shop: Shop, query: str, ddl: list[str]) -> None:
    views = {"v": query}
    shop.view("v", query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, views)
        for statement in ddl:
            shop.execute(statement)
        assert shop.check(refresher, views)["v"].action == "full"
        shop.execute("update bare set id = id + 1000 where id < 10")
        shop.check(refresher, views)
        assert shop.check(refresher, views)["v"].action == "none"


@pytest.mark.parametrize("engine", ["auto", "postgres", "spark"])
def test_replaced_by_key(shop: Shop, engine: EngineChoice) -> None:
    for query in VIEWS.values():
        plan = explain_view(shop.connection, QUEUE, query, engine=engine)
        assert isinstance(plan, PostgresPlan)
        assert plan.strategy == "incremental"
        assert isinstance(plan.plan_changes([plan.tables[0].name]).outcome, ReplaceOutcome)


@pytest.mark.parametrize(
    "query",
    [
        "select o from bare",
        "select id + 0 as id, o from bare",
        "select a, o from pair",
        "select id, count(*) as n from bare where o > 'a' group by id",
        "select id, o, rank() over (partition by id order by o) as r from bare",
        "select distinct id, o from bare",
        "select id, o from (select * from bare) as b",
        "select id, o from bare union all select id, o from bare",
        "select b.id, b.o, p.a from bare b join pair p on p.a = b.id",
        "select id, o, (select max(n) from pair) as m from bare",
        "select id, o from bare order by o limit 3",
    ],
)
@pytest.mark.parametrize("engine", ["postgres", "spark"])
def test_refused_where_the_key_does_not_find_the_rows(shop: Shop, query: str, engine: EngineChoice) -> None:
    with pytest.raises(PlanError) as error:
        create_view(shop.connection, "v", QUEUE, query, "public.v", engine=engine)
    assert error.value.code in ("pk-columns-missing", "column-not-captured")
    assert "key" in str(error.value.hint)


def test_hint_names_the_columns_to_include(shop: Shop) -> None:
    with pytest.raises(PlanError) as error:
        explain_view(shop.connection, QUEUE, "select o, count(*) as n from bare where n > 1 group by o")
    assert error.value.code == "pk-columns-missing"
    assert "--include o,n," in str(error.value.hint)
