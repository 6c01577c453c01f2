"""The planner: which plan a view gets, and what is refused, without a server."""

from __future__ import annotations

import dataclasses
import json

import pytest

from gdq.plan.number import column_number, number_of, numbers_of
from gdq.plan.parse import parse_view
from gdq.plan.table import PlanError, RefreshPlan, TableColumn, TableSchema, plan_view, referenced_table

COLUMNS = (
    TableColumn("id", "integer", not_null=True, key=True),
    TableColumn("status", "text"),
    TableColumn("amount", "numeric(12,2)"),
    TableColumn("loose", "numeric"),
    TableColumn("ratio", "double precision"),
    TableColumn("n", "integer"),
    TableColumn("big", "bigint"),
    TableColumn("tags", "text[]"),
)
FULL = TableSchema("public", "orders", "full", COLUMNS)
KEYLESS = TableSchema("public", "orders", "full", tuple(dataclasses.replace(c, key=False) for c in COLUMNS))


def pk(*include: str) -> TableSchema:
    columns = tuple(dataclasses.replace(c, images=c.name in include) for c in COLUMNS)
    return TableSchema("public", "orders", "pk", columns)


def plan(query: str, table: TableSchema = FULL) -> RefreshPlan:
    return plan_view(query, [table])


@pytest.mark.parametrize(
    ("query", "table", "strategy", "rule"),
    [
        ("select id, amount * 2 as double from orders where status <> 'x'", FULL, "projection-delta", "keys"),
        ("select status, amount from public.orders o", FULL, "projection-delta", "bag"),
        ("select id, status from orders", KEYLESS, "projection-delta", "bag"),
        ("select * from orders", pk(), "projection-recompute", "keys"),
        ("select status, count(*), sum(amount) as s from orders group by 1", FULL, "group-delta", "state"),
        ("select status, avg(n) as a from orders where n > 3 group by status", FULL, "group-delta", "state"),
        ("select status, sum(amount * (1 - 0.05)) as s from orders group by status", FULL, "group-delta", "state"),
        (
            "select status, sum(case when n > 1 then n else 0 end) from orders group by status",
            FULL,
            "group-delta",
            "state",
        ),
        ("select status from orders group by status", FULL, "group-delta", "state"),
        ("select status, sum(ratio) from orders group by status", FULL, "group-recompute", "keys"),
        ("select status, sum(loose) from orders group by status", FULL, "group-recompute", "keys"),
        ("select status, sum(amount / 3) as s from orders group by status", FULL, "group-recompute", "keys"),
        ("select status, sum(amount) from orders group by status", pk("status", "amount"), "group-recompute", "keys"),
        ("select id, count(*) from orders group by id", pk(), "group-recompute", "keys"),
    ],
)
def test_strategy(query: str, table: TableSchema, strategy: str, rule: str) -> None:
    found = plan(query, table)
    assert (found.strategy, found.merge.rule) == (strategy, rule)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("select o.id from orders o join orders p on true", "join"),
        ("select o.id from orders o, orders p", "join"),
        ("select distinct id from orders", "distinct"),
        ("select id from orders union all select id from orders", "set-operation"),
        ("with o as (select 1) select id from orders", "cte"),
        ("select id from (select id from orders) o", "subquery"),
        ("select id from orders where id in (select 1)", "subquery"),
        ("select id, (select 1) as one from orders", "subquery"),
        ("select id, row_number() over () as r from orders", "window"),
        ("select id, sum(n) over (partition by status) as r from orders", "window"),
        ("select status, sum(n) from orders group by status having sum(n) > 1", "having"),
        ("select id from orders order by id", "order-limit"),
        ("select id from orders limit 3", "order-limit"),
        ("select id from orders for update", "locking"),
        ("select id from orders tablesample system (1)", "from-clause"),
        ("select id from only orders", "from-clause"),
        ("select i from generate_series(1, 3) i", "table-function"),
        ("select 1 as one", "no-table"),
        ("select id, now() as at from orders", "nondeterministic"),
        ("select id from orders where random() < 0.5", "nondeterministic"),
        ("select id, 'today'::date as d from orders", "nondeterministic"),
        ("select id, my_function(n) as f from orders", "function"),
        ("select status, max(n) from orders group by status", "aggregate"),
        ("select status, string_agg(status, ',') as s from orders group by status", "aggregate"),
        ("select status, count(distinct n) from orders group by status", "distinct-aggregate"),
        ("select status, count(*) filter (where n > 1) as c from orders group by status", "aggregate-filter"),
        ("select status, sum(n order by n) as s from orders group by status", "aggregate-argument"),
        ("select status, sum(n) + 1 as s from orders group by status", "expression-over-aggregate"),
        ("select status, count(*) from orders group by rollup (status)", "grouping-sets"),
        ("select upper(status) as u, count(*) from orders group by upper(status)", "group-expression"),
        ("select n, count(*) from orders group by status, n", "group-key-not-selected"),
        ("select status, n, count(*) from orders group by status", "column-not-grouped"),
        ("select tags, count(*) from orders group by tags", "group-by-array"),
        ("select count(*) from orders", "no-group-by"),
        ("select upper(status) from orders", "alias-missing"),
        ("select id, n as id from orders", "duplicate-column"),
        ("select orders from orders", "whole-row"),
        ("select id, ctid from orders", "unknown-column"),
        ("select p.id from orders o", "unknown-column"),
        ("select id from elsewhere", "unknown-table"),
        ("delete from orders", "not-a-select"),
        ("select id from orders; select 1", "several-statements"),
        ("select id from orders where (", "syntax"),
    ],
)
def test_refused_in_one_line_with_a_code(query: str, code: str) -> None:
    with pytest.raises(PlanError) as error:
        plan(query)
    assert error.value.code == code
    assert str(error.value).endswith(f"[{code}]")
    assert "\n" not in str(error.value)


def test_pk_mode_names_the_columns_to_include() -> None:
    with pytest.raises(PlanError) as error:
        plan("select status, sum(amount) from orders where n > 1 group by status", pk())
    assert error.value.code == "pk-columns-missing"
    assert error.value.hint is not None
    assert "--include status,amount,n" in error.value.hint


def test_pk_mode_needs_the_key_in_a_projection() -> None:
    with pytest.raises(PlanError, match='"id"') as error:
        plan("select status from orders", pk())
    assert error.value.code == "pk-view-needs-key"


def test_column_that_is_not_captured() -> None:
    columns = tuple(dataclasses.replace(c, images=c.name != "amount") for c in COLUMNS)
    table = TableSchema("public", "orders", "full", columns)
    assert plan("select id, amount from orders", table).strategy == "projection-recompute"
    for query in ("select status, amount from orders", "select status, sum(amount) from orders group by status"):
        with pytest.raises(PlanError, match='"amount"') as error:
            plan(query, table)
        assert error.value.code == "column-not-captured"


def test_collation_that_takes_different_values_for_equal() -> None:
    columns = tuple(dataclasses.replace(c, folded=c.name in ("id", "status")) for c in COLUMNS)
    table = TableSchema("public", "orders", "full", columns)
    with pytest.raises(PlanError) as error:
        plan("select status, count(*) from orders group by status", table)
    assert error.value.code == "group-by-collation"
    assert plan("select id, n from orders", table).merge.rule == "bag"


def test_names_are_folded_and_quoted_as_in_postgresql() -> None:
    odd = TableSchema("S", 'we"ird', "full", (TableColumn("Id", "integer", True, True), TableColumn("É", "text")))
    found = plan('select X."Id", x."É" as É from "S"."we""ird" x', odd)
    assert found.columns == ("Id", "É")
    assert found.table == '"S"."we""ird"'
    with pytest.raises(PlanError, match="unknown-column"):
        plan('select id from "S"."we""ird"', odd)
    assert referenced_table('select 1 as x from "S".Orders') == ("S", "orders")


def test_null_groups_are_known() -> None:
    found = plan("select id, status, count(*) from orders group by id, status")
    assert found.merge.keys == ("id", "status")
    assert found.merge.nullable == ("status",)


@pytest.mark.parametrize(
    ("expression", "kind", "scale", "fixed"),
    [
        ("amount", "numeric", 2, True),
        ("n", "integer", 0, True),
        ("n + big", "bigint", 0, True),
        ("amount * (1 - 0.125)", "numeric", 5, True),
        ("-amount + n", "numeric", 2, True),
        ("case when n > 0 then amount else 0 end", "numeric", 2, False),
        ("coalesce(amount, 0.00)", "numeric", 2, True),
        ("loose::numeric(10, 4)", "numeric", 4, True),
        ("9999999999", "bigint", 0, True),
    ],
)
def test_known_numbers(expression: str, kind: str, scale: int, fixed: bool) -> None:
    view = parse_view(f"select {expression} as x from orders", [FULL])
    number = number_of(view.outputs[0].expression, numbers_of(FULL))
    assert number is not None
    assert (number.type, number.scale, number.fixed) == (kind, scale, fixed)


@pytest.mark.parametrize("expression", ["loose", "ratio", "amount / 2", "round(amount, 1)", "'1'", "1e3"])
def test_numbers_without_a_bound(expression: str) -> None:
    view = parse_view(f"select {expression} as x from orders", [FULL])
    assert number_of(view.outputs[0].expression, numbers_of(FULL)) is None


def test_negative_scale_has_no_digits_after_the_point() -> None:
    number = column_number("numeric(3,-2)")
    assert number is not None
    assert (number.whole, number.scale) == (5, 0)


def test_plan_is_plain_data_and_prints() -> None:
    found = plan("select status, sum(amount) as s from orders where n > 1 group by status")
    assert json.loads(json.dumps(found.as_dict()))["strategy"] == "group-delta"
    assert '"orders__delta"' in str(found)
    assert found.fingerprint() == plan("select status, sum(amount) s from orders where n > 1 group by 1").fingerprint()
    assert found.fingerprint() != plan("select status, sum(amount) as s from orders group by status").fingerprint()
