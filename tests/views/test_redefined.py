"""A view is loaded in full when what its text names means something else: functions, operators, casts, aggregates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gdq.consumers.refresh.refresher import Refresher
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

pytestmark = pytest.mark.server

_SQL = "language sql immutable as"


@dataclass(frozen=True, slots=True)
class Case:
    """A view's query, what it needs, and statements after which the query gives other rows of the same table."""

    query: str
    before: tuple[str, ...]
    after: tuple[str, ...]


CASES = {
    "default": Case(
        "select id, f1(v) as v from t",
        (f"create function f1(int, int default 1) returns int {_SQL} 'select $1 * $2'",),
        (f"create or replace function f1(int, int default 2) returns int {_SQL} 'select $1 * $2'",),
    ),
    "default_calls": Case(
        "select id, f2(v) as v from t",
        (
            f"create function d2() returns int {_SQL} 'select 1'",
            f"create function f2(int, int default d2()) returns int {_SQL} 'select $1 * $2'",
        ),
        (f"create or replace function d2() returns int {_SQL} 'select 2'",),
    ),
    "names": Case(
        "select id, f3(v, id) as v from t",
        (f"create function f3(a int, b int) returns int {_SQL} 'select a - b'",),
        ("drop function f3(int, int)", f"create function f3(b int, a int) returns int {_SQL} 'select a - b'"),
    ),
    "result": Case(
        "select id, f4(v)::text as v from t",
        (f"create function f4(int) returns numeric(9,2) {_SQL} 'select $1 + 0.50'",),
        ("drop function f4(int)", f"create function f4(int) returns float8 {_SQL} 'select $1 + 0.50'"),
    ),
    "operator": Case(
        "select id, v operator(public.@@) id as v from t",
        (
            f"create function plus7(int, int) returns int {_SQL} 'select $1 + $2'",
            f"create function minus7(int, int) returns int {_SQL} 'select $1 - $2'",
            "create operator @@ (leftarg = int, rightarg = int, function = plus7)",
        ),
        ("drop operator @@ (int, int)", "create operator @@ (leftarg = int, rightarg = int, function = minus7)"),
    ),
    "operator_of_postgresql": Case(
        "select id, v operator(public.&&) id as v from t",
        ("create operator && (leftarg = int, rightarg = int, function = int4pl)",),
        (
            "drop operator && (int, int)",
            "create operator && (leftarg = int, rightarg = int, function = int4mi)",
        ),
    ),
    "operator_function": Case(
        "select id, v operator(public.~) id as v from t",
        (
            f"create function plus8(int, int) returns int {_SQL} 'select $1 + $2'",
            "create operator ~ (leftarg = int, rightarg = int, function = plus8)",
        ),
        (f"create or replace function plus8(int, int) returns int {_SQL} 'select $1 - $2'",),
    ),
    "cast": Case(
        "select id, (v::pair).a as v from t",
        (
            "create type pair as (a int, b int)",
            f"create function pair_of(int) returns pair {_SQL} 'select row($1, 1)::public.pair'",
            f"create function other_pair_of(int) returns pair {_SQL} 'select row(-$1, 1)::public.pair'",
            "create cast (int as pair) with function pair_of(int)",
        ),
        ("drop cast (int as pair)", "create cast (int as pair) with function other_pair_of(int)"),
    ),
    "aggregate_calls": Case(
        "select v % 2 as g, sum11(v) as v from t group by v % 2",
        (
            f"create function add11(int, int) returns int {_SQL} 'select $1 + $2'",
            "create aggregate sum11(int) (sfunc = add11, stype = int, initcond = '0')",
        ),
        (f"create or replace function add11(int, int) returns int {_SQL} 'select $1 - $2'",),
    ),
    "aggregate": Case(
        "select v % 2 as g, sum12(v) as v from t group by v % 2",
        ("create aggregate sum12(int) (sfunc = int4pl, stype = int, initcond = '0')",),
        ("create or replace aggregate sum12(int) (sfunc = int4pl, stype = int, initcond = '100')",),
    ),
}


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    rows = "insert into t select i, 10 * i from generate_series(1, 6) i"
    capture = f"select gdq.add_table('{QUEUE}', 't')"
    yield from make_shop(db, ["create table t (id int primary key, v int)", rows, capture])


@pytest.mark.long
def test_what_a_view_names_is_defined_anew(shop: Shop) -> None:
    """All of them are refreshed by one process, which remembers what it read."""
    views = {f"v_{name}": case.query for name, case in CASES.items()}
    for name, case in CASES.items():
        for statement in case.before:
            shop.execute(statement)
        shop.view(f"v_{name}", case.query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, views)
        for case in CASES.values():
            for statement in case.after:
                shop.execute(statement)
        shop.execute("update t set v = v + 1 where id = 1")
        shop.check(refresher, views)
        shop.execute("update t set v = v + 1 where id = 2")
        results = shop.check(refresher, views)
        incremental = {name for name, result in results.items() if result.action == "delta"}
        assert incremental == views.keys() - {"v_aggregate", "v_aggregate_calls"}


def test_an_aggregate_is_defined_anew(shop: Shop) -> None:
    """The table has not changed."""
    cases = {f"v_{name}": CASES[name] for name in ("aggregate", "aggregate_calls")}
    views = {name: case.query for name, case in cases.items()}
    for name, case in cases.items():
        for statement in case.before:
            shop.execute(statement)
        shop.view(name, case.query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, views)
        for case in cases.values():
            for statement in case.after:
                shop.execute(statement)
        results = shop.check(refresher, views)
        assert {result.action for result in results.values()} == {"full"}
