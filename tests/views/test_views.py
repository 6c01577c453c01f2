"""Views without Spark: registration, what the server refuses, and merging into the target."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from gdq.cli import main
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import OutputType, Target
from gdq.errors import GdqError, RefreshConflict
from gdq.plan.postgres import PostgresPlan
from gdq.plan.spark.keys import SparkKeyPlan
from gdq.plan.table import PlanError, RefreshPlan
from gdq.view.target_merge import Merge
from gdq.view.view import create_view, drop_view, explain_view, load_plan, view_info
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
    assert json.loads(gdq(captured, "explain-view", "v", "--json").stdout)["strategy"] == "projection-delta"
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
        ("select id, at::date as d from orders", "nondeterministic"),
        ("select id from orders where at > now()", "nondeterministic"),
        ("select id, to_char(at, 'YYYY') as y from orders", "nondeterministic"),
        ("select id from nowhere", "unknown-table"),
    ],
)
def test_server_refuses(captured: Shop, query: str, code: str) -> None:
    with pytest.raises(PlanError) as error:
        explain_view(captured.connection, QUEUE, query, engine="spark")
    assert error.value.code in (code, "function")


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
    assert explain_view(captured.connection, QUEUE, f"select id, {columns} from orders").strategy == "projection-delta"


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


Merger = Callable[..., Merge]


@pytest.fixture
def merger(captured: Shop) -> Merger:
    """Makes the Merge of a query with these staged rows; the caller's transaction is open."""

    def make(query: str, types: list[str], columns: list[str], rows: list[tuple[str | None, ...]]) -> Merge:
        plan = explain_view(captured.connection, QUEUE, query)
        assert isinstance(plan, RefreshPlan)
        target = Target("v", "mark", '"public"."v"')
        outputs = [OutputType(name, kind) for name, kind in zip(plan.columns, types, strict=True)]
        captured.execute("drop table if exists pg_temp.gdq_stage, pg_temp.gdq_keys, pg_temp.gdq_sums")
        stage = target.temporary_stage(captured.connection, columns, rows)
        return Merge(captured.connection, target, plan, outputs, stage)

    return make


def test_bag_loses_exactly_as_many_copies(captured: Shop, merger: Merger) -> None:
    query, types, columns = "select status, note from orders", ["text", "text"], ["c1", "c2", "w"]
    with captured.connection.transaction():
        assert merger(query, types, columns, [("a", None, "3"), ("a", "", "2"), (None, None, "2")]).full() == 7
        assert merger(query, types, columns, [("a", None, "-2"), (None, None, "-1"), ("b", "", "1")]).difference() == 4
        rows = captured.execute("select status, note, count(*) from v group by 1, 2 order by 1, 2")
        assert rows == [("a", "", 2), ("a", None, 1), ("b", "", 1), (None, None, 1)]
        with pytest.raises(Diverged), captured.connection.transaction():
            merger(query, types, columns, [("a", None, "-2")]).difference()


def test_sums_of_null_groups(captured: Shop, merger: Merger) -> None:
    query = "select status, count(*), sum(n) as s, avg(n) as a from orders group by status"
    types, columns = ["text", "bigint", "bigint", "numeric"], ["c1", "n", "a1_n", "a1_s"]
    with captured.connection.transaction():
        merger(query, types, columns, [("x", "2", "2", "5"), (None, "1", "0", "0")]).full()
        assert captured.execute("select status, count, s, a from v order by 1 nulls last") == [
            ("x", 2, 5, pytest.approx(2.5)),
            (None, 1, None, None),
        ]
        merger(
            query, types, columns, [("x", "-2", "-2", "-5"), (None, "1", "1", "4"), ("y", "0", "0", "0")]
        ).difference()
        assert captured.execute("select status, count, s from v") == [(None, 2, 4)]
        with pytest.raises(Diverged), captured.connection.transaction():
            merger(query, types, columns, [(None, "-3", "-1", "-4")]).difference()


def test_groups_that_spark_tells_apart_are_one_in_postgresql(captured: Shop, merger: Merger) -> None:
    captured.execute("alter table orders add weight numeric")
    query = "select weight, count(*) from orders group by weight"
    with captured.connection.transaction():
        merger(query, ["numeric", "bigint"], ["c1", "n"], [("1.0", "2"), ("1.00", "1")]).full()
        assert captured.execute("select weight, count from v") == [(1, 3)]
        merger(query, ["numeric", "bigint"], ["c1", "n"], [("1.0", "-1"), ("1.00", "1")]).difference()
        merger(query, ["numeric", "bigint"], ["c1", "n"], [("1", "-3")]).difference()
        assert captured.execute("select weight, count from v") == []


def test_key_that_should_go_but_is_missing(captured: Shop, merger: Merger) -> None:
    query, types, columns = "select id, status from orders", ["integer", "text"], ["c1", "c2", "w"]
    with captured.connection.transaction():
        merger(query, types, columns, [("1", "a", "1"), ("2", "b", "1")]).full()
        assert merger(query, types, columns, [("1", "a", "-1"), ("1", "c", "1")]).difference() == 2
        with pytest.raises(Diverged), captured.connection.transaction():
            merger(query, types, columns, [("7", "a", "-1")]).difference()


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


def test_engine_is_chosen(captured: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    grouped, joined = "select status, count(*) from orders group by status", "select a.id from orders a, orders b"
    connection = captured.connection
    assert isinstance(explain_view(connection, QUEUE, grouped), RefreshPlan)
    assert not isinstance(explain_view(connection, QUEUE, joined), RefreshPlan)
    assert isinstance(explain_view(connection, QUEUE, grouped, elsewhere=True), RefreshPlan)
    assert isinstance(explain_view(connection, QUEUE, joined, elsewhere=True), PostgresPlan)
    outer = "select a.id from orders a full join orders b on b.id = a.id"
    for elsewhere in (False, True):
        assert isinstance(explain_view(connection, QUEUE, outer, engine="spark", elsewhere=elsewhere), SparkKeyPlan)
    # what the planner of one table takes for a column of it
    nested = "select id, case when exists (select from orders b where b.id = o.id) then 1 end as x from orders o"
    assert type(explain_view(connection, QUEUE, nested)) is PostgresPlan
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not isinstance(explain_view(connection, QUEUE, grouped), RefreshPlan)
