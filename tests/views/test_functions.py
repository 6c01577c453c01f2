"""Views that call functions of users: in FROM, under names that must be quoted, and replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gdq.consumers.refresh.refresher import Refresher
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

pytestmark = pytest.mark.server

STATEMENTS = [
    "create table t (id int primary key, g int, v int)",
    "create function twice(int) returns int immutable language sql as 'select $1 * 2'",
    "create function two(int) returns table (n int) immutable language sql as 'select $1 union all select $1 + 1'",
    """create schema "Odd One"; create function "Odd One"."Two Of"(int default 5) returns setof int immutable
       language sql as 'select $1 union all select $1 + 1'""",
    f"select gdq.add_table('{QUEUE}', 't')",
    "insert into t select i, i % 3, i from generate_series(1, 12) i",
]
CHANGES = [
    "insert into t values (20, 1, 4), (21, null, 4)",
    "update t set v = v + 10, g = 2 where id in (1, 4)",
    "delete from t where id in (2, 20)",
]


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    yield from make_shop(db, STATEMENTS)


def test_replaced_function(shop: Shop) -> None:
    """The rows of a view change with a function that it calls."""
    views = {"v": "select id, twice(v) as v from t", "of_set": "select t.id, f.n from t, two(t.v) f"}
    for name, query in views.items():
        shop.view(name, query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, views)
        shop.execute("update t set v = v + 1 where id = 1")
        assert shop.check(refresher, views)["v"].action == "delta"
        shop.execute("create or replace function twice(int) returns int immutable language sql as 'select $1 * 3'")
        results = shop.check(refresher, views)
        assert (results["v"].action, results["of_set"].action) == ("full", "none")
        shop.execute("update t set v = v + 1 where id = 1")
        assert shop.check(refresher, views)["v"].action == "delta"


NESTED = {
    "sql": "language sql as 'select public.twice($1)'",
    "atomic": "language sql begin atomic select public.twice($1); end",
    "plpgsql": "language plpgsql as 'begin return public.TWICE($1); end'",
    "deeper": """language sql as 'select "Odd One"."Twice of"($1)'""",
}


@pytest.mark.parametrize("body", NESTED)
def test_function_that_is_replaced_below_another(shop: Shop, body: str) -> None:
    shop.execute("""create function "Odd One"."Twice of"(int) returns int immutable language sql
                    as 'select public.twice($1)'""")
    shop.execute(f"create function outer_one(int) returns int immutable {NESTED[body]}")
    views = {"v": "select id, outer_one(v) as v from t"}
    shop.view("v", views["v"], engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, views)
        shop.execute("create or replace function twice(int) returns int immutable language sql as 'select $1 * 3'")
        assert shop.check(refresher, views)["v"].action == "full"
        shop.execute("update t set v = v + 1 where id = 1")
        assert shop.check(refresher, views)["v"].action == "delta"


@pytest.mark.long
def test_functions_with_names_that_must_be_quoted(shop: Shop) -> None:
    odd = '"Odd One"."Two Of"'
    views = {
        "v_one": f"select t.id, n from t, {odd}(t.v) n",
        "v_none": f"select t.id, n from t, {odd}() n",
        "v_join": f"select t.id, n from t left join {odd}(3) f(n) on f.n = t.id",
        "v_rows": f"select t.id, n, m from t, rows from ({odd}(), two(3)) f(n, m)",
        "v_rows_group": f"select f.m, count(*) as many from t, rows from (two(4), {odd}(7)) f(n, m) group by f.m",
        "v_rows_in": f"select t.id from t where t.v in (select f.m from rows from (two(4), {odd}(7)) f(n, m))",
        "v_listed": f"select id, {odd}(v) as n from t",
        "v_groups": f"select n, count(*) as many from t, {odd}(t.g) n group by n",
    }
    for name, query in views.items():
        shop.view(name, query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        for change in ["", *CHANGES]:
            shop.execute(change)
            shop.check(refresher, views)
