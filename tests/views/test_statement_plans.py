"""`gdq explain-view --plans` shows how the server would run the statements of a refresh."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gdq.cli import main
from gdq.consumers.refresh.new_view import create_view
from tests.support.spark import Shop
from tests.views.test_compiled_view import call

pytestmark = pytest.mark.server

JOIN = "select k.name, count(*) as rows, sum(s.n) as n from sale s join kind k using (k) group by k.name"


@pytest.fixture
def sales(viewed: Shop) -> Shop:
    viewed.execute(
        "create table kind (k int primary key, name text); create table sale (id int primary key, k int, n int)"
    )
    viewed.execute("insert into kind select i, 'kind ' || i from generate_series(1, 5000) i")
    viewed.execute("insert into sale select i, i % 5000 + 1, i from generate_series(1, 20000) i; analyze kind, sale")
    for table in ("kind", "sale"):
        viewed.capture(table)
    return viewed


def explain(shop: Shop, view: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["explain-view", view, "--plans", "-d", shop.db.dsn, *options])


def made(shop: Shop, name: str, query: str) -> list[dict[str, Any]]:
    """The plans of a new view, loaded."""
    assert create_view(shop.connection, name, "q", query, f"public.{name}") is not None
    call(shop, name)
    done = explain(shop, name, "--json")
    assert done.exit_code == 0, done.output
    plans: list[dict[str, Any]] = json.loads(done.stdout)["plans"]
    return plans


def test_a_statement_that_reads_a_whole_table_is_named(sales: Shop) -> None:
    plans = made(sales, "v_sums", JOIN)
    assert [(one["changed"], one["task"]) for one in plans] == [
        ('"public"."kind"', "net the changes"),
        ('"public"."kind"', "change the target"),
        ('"public"."sale"', "net the changes"),
        ('"public"."sale"', "change the target"),
        (None, "fill the state"),
        (None, "fill the target"),
    ]
    # sale has no index on k, kind has its primary key
    whole = "public.sale (Seq Scan)"
    assert [whole in one["whole"] for one in plans] == [False, True, False, False, True, False]
    assert [any("kind" in table for table in one["whole"]) for one in plans] == [*[False] * 4, True, False]
    assert set(plans[4]["whole"]) == {"public.kind (Seq Scan)", "public.sale (Seq Scan)"}
    assert "Index Scan using kind_pkey on kind" in plans[3]["plan"]
    assert "Delete on v_sums" in plans[3]["plan"]
    assert "gdq_log" in plans[2]["sql"]
    text = explain(sales, "v_sums").stdout
    assert f'-- changes of "public"."kind": change the target\n-- reads the whole of {whole}' in text
    # an index on it ends that
    sales.execute("create index on sale (k)")
    again = json.loads(explain(sales, "v_sums", "--json").stdout)["plans"]
    assert [whole in one["whole"] for one in again[:4]] == [False] * 4


def test_nothing_is_executed(sales: Shop) -> None:
    plans = made(sales, "v_keys", "select k.k, k.name from kind k where exists (select from sale s where s.k = k.k)")
    assert {one["task"] for one in plans} >= {"collect keys", "fill the target"}
    sales.execute("delete from sale where k = 7")
    before = sales.execute("select * from v_keys order by k")
    assert explain(sales, "v_keys").exit_code == 0
    assert sales.execute("select * from v_keys order by k") == before
    assert call(sales, "v_keys")[0] == "delta"


@pytest.mark.parametrize(
    "query",
    [
        "select id, n from sale order by n desc, id limit 3",
        "select id, n from sale where n > (select max(k) from kind)",
        "select k, max(n) as most from sale group by k",
        "select id, rank() over (partition by k order by n, id) as place from sale",
        "select k from sale except select k from kind",
        "select count(*) as rows from sale",
        "select id as gdq_rows, 'gdq_most' as gdq_x from sale",
    ],
)
def test_every_statement_is_planned(sales: Shop, query: str) -> None:
    plans = made(sales, "v_any", query)
    assert any(one["changed"] for one in plans)
    assert all("cost=" in one["plan"] for one in plans)


def test_what_has_no_plans(sales: Shop) -> None:
    create_view(sales.connection, "v_sums", "q", JOIN, "public.v_sums")
    done = explain(sales, "v_sums")
    assert (done.exit_code, done.stderr) == (
        1,
        "Error: view v_sums is not loaded yet\nHint: gdq refresh v_sums loads it.\n",
    )
    create_view(sales.connection, "v_far", "q", JOIN, "public.v_far", target_dsn="dbname=other")
    assert "view v_far is refreshed by no function" in explain(sales, "v_far").stderr
    assert explain(sales, "v_sums", "--functions").exit_code == 2
