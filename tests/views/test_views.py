"""Views without Spark: registration, what the server refuses, and merging into the target."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from gdq.cli import main
from gdq.consumers.views.target import Target
from gdq.errors import GdqError, PlanError, RefreshConflict
from gdq.plan.postgres import PostgresPlan
from gdq.plan.spark.keys import SparkKeyPlan
from gdq.plan.spark.plan import SparkPlan
from gdq.view.view import EngineChoice, create_view, drop_view, explain_view, load_plan, view_info
from tests.support.spark import QUEUE, Shop


@pytest.fixture
def captured(shop: Shop) -> Shop:
    shop.capture("orders")
    return shop


def gdq(shop: Shop, *arguments: str, query: str | None = None) -> Any:
    return CliRunner().invoke(main, [*arguments, "--dsn", shop.db.dsn], input=query)


def test_life_of_a_view(captured: Shop) -> None:
    query = "select id, status from orders where n > 3"
    create = ("create-view", "v", "--queue", QUEUE, "--sql", "-", "--target", "public.v")
    assert gdq(captured, *create, query=query).exit_code == 0
    again = gdq(captured, *create, query=query)
    assert again.exit_code == 0
    assert "already" in again.stderr
    other = gdq(captured, *create, query="select id from orders")
    assert other.exit_code == 1
    (listed,) = json.loads(gdq(captured, "views", "--json").stdout)
    assert (listed["view_name"], listed["target"], listed["last_action"]) == ("v", '"public"."v"', None)
    assert listed["tables"] == ["public.orders"]
    (consumer,) = captured.execute("select consumer_name, tables from gdq.consumer_info()")
    assert consumer == ("view:v", ["public.orders"])
    assert json.loads(gdq(captured, "explain-view", "v", "--json").stdout)["strategy"] == "incremental"
    assert gdq(captured, "drop-view", "v").exit_code == 0
    assert gdq(captured, "drop-view", "v").exit_code == 0
    assert captured.execute("select consumer_name from gdq.consumer_info()") == []


def test_explain_of_a_query_that_is_refused(captured: Shop) -> None:
    arguments = ("explain-view", "--queue", QUEUE, "--sql", "-", "--engine", "spark", "--json")
    result = gdq(captured, *arguments, query="select id, random() as r from orders")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["code"] == "nondeterministic"
    assert captured.execute("select * from gdq.view_info()") == []


def test_star_means_the_columns_of_today(captured: Shop) -> None:
    create_view(captured.connection, "v", QUEUE, "select * from orders", "public.v")
    before = view_info(captured.connection, "v")[0].definition
    captured.execute("alter table orders add extra int")
    assert "extra" not in before
    assert len(load_plan(captured.connection, view_info(captured.connection, "v")[0]).columns) == 8


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("select id, note::date as d from orders", "nondeterministic"),
        ("select id from orders where at > now()", "nondeterministic"),
        ("select id, to_char(at, 'TMMonth') as y from orders", "nondeterministic"),
        ("select id from orders where (", "syntax"),
        ("select id from orders; select 1", "syntax"),
        ("delete from orders", "syntax"),
        ("select id from orders for update", "locking"),
        ("select n, n from orders", "duplicate-column"),
        ("select 1 as one", "no-table"),
    ],
)
@pytest.mark.parametrize("engine", ["postgres", "spark"])
def test_refused_in_one_line_with_a_code(captured: Shop, query: str, code: str, engine: EngineChoice) -> None:
    with pytest.raises(PlanError) as error:
        explain_view(captured.connection, QUEUE, query, engine=engine)
    assert error.value.code == code
    assert str(error.value).endswith(f"[{code}]")
    assert "\n" not in str(error.value)


def test_wrong_syntax_is_told_as_the_server_sees_it(captured: Shop) -> None:
    with pytest.raises(PlanError) as error:
        explain_view(captured.connection, QUEUE, "\nselect id\n  form orders;")
    told = 'the view\'s SQL, line 3: syntax error at or near "orders" [syntax]'
    assert (str(error.value), error.value.hint) == (told, "A view is one SELECT.")


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("select id from orders order by n limit 3", "order-limit"),
        ("select string_agg(status, ',') as s from orders", "no-group-by"),
        ("select id, ntile(2) over (order by id) as r from orders", "window-no-partition"),
        (
            "select status, count(*) as m from orders group by distinct rollup (status, n), rollup (status)",
            "grouping-sets",
        ),
        (
            "select distinct on (n) n, count(*) as c from orders group by n, big order by n, big",
            "distinct-on-aggregate",
        ),
        ("with recursive r as (select id from orders union select id + 1 from r where id < 9) table r", "recursive"),
        ("select a, b from orders as o (a, b)", "column-aliases"),
        ("select id from orders tablesample system (1) repeatable (1)", "table-function"),
        ("select orders from orders", "whole-row"),
        ("select id, ctid::text as place from orders", "system-column"),
        ("select id from orders a full join orders b using (id)", "column-unresolved"),
        ("select id from orders o where n not in (select n from orders p where p.big = o.big)", "not-in-correlated"),
        (f"select o1.id from {', '.join(f'orders o{n}' for n in range(1, 8))} where o1.n = 1", "join-wide"),
        ('select note collate "C" as note, count(*) as n from orders group by 1', "collation"),
    ],
)
def test_reason_for_a_full_load(captured: Shop, query: str, code: str) -> None:
    plan = explain_view(captured.connection, QUEUE, query, engine="postgres")
    assert isinstance(plan, PostgresPlan)
    assert plan.strategy == "full"
    assert str(plan.full).endswith(f"[{code}]")


EXPRESSIONS = [
    "upper(note) || 'x'",
    "n % 3",
    "-n",
    "n between 1 and 5",
    "status is not distinct from 'a'",
    "note like 'n%'",
    "note ilike 'N_'",
    "note ~ '^n'",
    "coalesce(status, note, '')",
    "nullif(n, 3)",
    "greatest(n, 3)",
    "round(amount, 1)",
    "substring(note from 1 for 1)",
    "position('n' in note)",
    "trim(note)",
    "case n when 1 then 'a' else 'b' end",
    "(at at time zone 'UTC')::date",
    "extract(year from at at time zone 'UTC')",
    "date_trunc('month', timestamp '2024-02-03')",
    "n in (1, 2)",
    "n = any (array[1, 2])",
    "amount / 3",
    "n / 3",
    "md5(note)",
    "left(note, 1)",
    "abs(n)",
    "not (n = 1)",
    "status is null",
    "interval '1 day'",
    r"E'a\\b'",
    "'it''s'",
    "1e3",
    "0.10",
    "ratio::text",
    """'{"a": 1}'::jsonb -> 'a'""",
]


def test_expressions_that_the_server_reads_as_the_planner(captured: Shop) -> None:
    columns = ", ".join(f"{expression} as c{n}" for n, expression in enumerate(EXPRESSIONS))
    query = f"select id, {columns} from orders"
    for engine in ("postgres", "spark"):
        plan = explain_view(captured.connection, QUEUE, query, engine=engine)
        assert isinstance(plan, PostgresPlan | SparkPlan)
        assert plan.strategy == "incremental"


def test_group_by_a_type_of_the_source_alone(shop: Shop) -> None:
    shop.execute("create type span as range (subtype = int)")
    shop.execute("alter table orders add period span")
    shop.capture("orders")
    query = "select period, count(*) from orders group by period"
    plan = explain_view(shop.connection, QUEUE, query, engine="spark", elsewhere=True)
    assert isinstance(plan, SparkKeyPlan)
    assert "group-by-type" in plan.refused
    assert create_view(shop.connection, "v", QUEUE, query, "public.v") is not None


def test_target_dsn_holds_no_password(captured: Shop) -> None:
    with pytest.raises(GdqError, match="password"):
        create_view(
            captured.connection, "v", QUEUE, "select id from orders", "public.v", target_dsn="host=x password=y"
        )


@pytest.mark.parametrize("target", ["v", "a.b.c", "", "a.b; drop table x"])
def test_target_is_schema_and_table(captured: Shop, target: str) -> None:
    with pytest.raises(GdqError):
        create_view(captured.connection, "v", QUEUE, "select id from orders", target)


def test_dropping_a_queue_with_a_view_is_refused(captured: Shop) -> None:
    create_view(captured.connection, "v", QUEUE, "select id from orders", "public.v")
    with pytest.raises(psycopg.errors.ObjectInUse):
        captured.execute(f"select gdq.drop_queue('{QUEUE}')")
    assert drop_view(captured.connection, "v")
    assert not drop_view(captured.connection, "v")


def test_position_moves_from_where_it_was(captured: Shop) -> None:
    plan = explain_view(captured.connection, QUEUE, "select id from orders").fingerprint()
    target = Target("v", "mark", '"public"."v"')
    target.prepare(captured.connection)
    with captured.connection.transaction():
        target.move(captured.connection, None, plan, "one")
    stored = target.position(captured.connection)
    assert stored is not None
    assert stored.position == "one"
    with pytest.raises(RefreshConflict), captured.connection.transaction():
        target.move(captured.connection, None, plan, "two")
    with pytest.raises(GdqError, match="another origin"):
        Target("v", "other", '"public"."w"').position(captured.connection)


def test_table_of_somebody_else_is_no_target(captured: Shop) -> None:
    captured.execute("create table v (id int)")
    with pytest.raises(GdqError, match="not the target"):
        Target("v", "mark", '"public"."v"').exists(captured.connection)


@pytest.mark.parametrize("pyspark", [True, False])
def test_auto_is_postgres_whatever_is_installed(captured: Shop, monkeypatch: pytest.MonkeyPatch, pyspark: bool) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: known(name, package) if pyspark or name != "pyspark" else None,
    )
    for query in (
        "select status, count(*) from orders group by status",
        "select a.id from orders a, orders b",
        "with o as (select status, n from orders) select status, count(*), sum(n) as n from o group by status",
        "select id, case when exists (select from orders b where b.id = o.id) then 1 end as x from orders o",
    ):
        for elsewhere in (False, True):
            plan = explain_view(captured.connection, QUEUE, query, elsewhere=elsewhere)
            assert type(plan) is PostgresPlan
            assert plan.full is None


def test_spark_joins_or_computes_by_key(captured: Shop) -> None:
    joined = "with o as (select * from orders) select a.status, b.n from o as a join o as b on b.id = a.n"
    outer = "select a.id from orders a full join orders b on b.id = a.id"
    for query, kind in (("select id from orders", SparkPlan), (joined, SparkKeyPlan), (outer, SparkKeyPlan)):
        for elsewhere in (False, True):
            assert type(explain_view(captured.connection, QUEUE, query, engine="spark", elsewhere=elsewhere)) is kind
