"""Whether changes or a full load cost less is told by the history; what each refresh did is in it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.views import compiled_steps, computation
from gdq.view.cost import BY_COST, choose_by_cost
from gdq.view.view import ViewRun, create_view, view_history
from tests.support.server import Database
from tests.support.spark import Shop, make_shop

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def run(
    action: str, seconds: float, delta_rows: int | None = None, reason: str | None = None, read: int | None = None
) -> ViewRun:
    return ViewRun(NOW, NOW, action, reason, 1, seconds, None, None, delta_rows, read, seconds, None)


HELD = 10**7
PAST = [run("delta", 2.0, 1000), run("delta", 0.1, 10), run("none", 0.01), run("full", 10.0, None, "first load")]
CHOSEN = run("full", 10.0, None, f"{BY_COST}, ...")


@pytest.mark.parametrize(
    ("runs", "rows", "full"),
    [
        ([], 10**6, False),
        (PAST[:2], 10**6, False),
        (PAST[-1:], 10**6, False),
        (PAST, 5, False),
        (PAST, 1000, False),
        (PAST, 6000, False),
        (PAST, 9000, True),
        ([run("full", 0.05), *PAST[:2]], 400, False),
        ([run("delta", 40.0, 12000), *PAST], 11000, True),
        ([run("delta", 4.0, 12000), *PAST], 11000, False),
        ([*[CHOSEN] * 8, *PAST], 9000, False),
        ([*[CHOSEN] * 7, *PAST], 9000, True),
        # 5.7 times as much
        ([*[CHOSEN] * 37, *PAST], 30_000, True),
        ([*[CHOSEN] * 38, *PAST], 30_000, False),
        ([*[CHOSEN] * 79, *PAST], 10**6, True),
        ([*[CHOSEN] * 80, *PAST], 10**6, False),
    ],
)
def test_choice(runs: list[ViewRun], rows: int, full: bool) -> None:
    chosen = choose_by_cost(runs, rows, HELD)
    assert chosen.full == full
    assert bool(chosen.why) == (len(runs) > 2)


def test_seconds_that_starting_spark_takes_are_no_measure() -> None:
    runs = [run("delta", 14.0, 1000), run("full", 2.0)]
    assert [choose_by_cost(runs, 1000, HELD, on_spark=spark).full for spark in (False, True)] == [True, False]
    assert choose_by_cost([run("delta", 16.0, 1000), *runs[1:]], 1000, HELD, on_spark=True).full


@pytest.mark.parametrize(
    ("runs", "rows", "full"),
    [
        # made on empty tables
        ([run("full", 0.02, read=0)], 60_000, False),
        ([run("full", 0.02)], 60_000, False),
        # rows came and went: it read about as many
        ([run("full", 0.02, read=49_000)], 60_000, False),
        ([run("full", 0.02, read=50_000)], 60_000, True),
        ([run("delta", 2.0, 90_000), run("full", 0.02, read=60_000)], 5000, True),
        # an index led it to few rows
        ([run("full", 0.02, read=10)], 5000, True),
        ([run("full", 0.02, read=10)] * 5, 5000, True),
        ([run("delta", 2.0, 60_000), run("full", 0.02, read=10)], 5000, False),
        # one of the grown tables does not speak for those before
        ([run("full", 10.0, read=100_000), *[run("full", 0.02, read=0)] * 4], 5000, False),
    ],
)
def test_full_loads_of_smaller_tables_do_not_count(runs: list[ViewRun], rows: int, full: bool) -> None:
    assert choose_by_cost([run("delta", 2.0, 1000), *runs], rows, 100_000).full == full


@pytest.mark.server
def test_history_tells_what_a_refresh_did(db: Database) -> None:
    statements = [
        "create table item (id int primary key, k int) partition by range (id)",
        "create table item_0 partition of item for values from (0) to (600)",
        "create table item_1 partition of item for values from (600) to (9999)",
        "insert into item select i, i % 100 from generate_series(1, 1000) i; analyze item",
        "create index on item (k)",
        f"alter database {db.name} set random_page_cost = 1.1",
    ]
    for shop in make_shop(db, statements):
        shop.capture("item")
        for name, query in {
            "rows": "select id, k from item where k < 50",
            "groups": "select k, count(distinct id) as n from item group by k",
            "text": "select string_agg(id::text, ',' order by id) as ids from item where k < 10",
        }.items():
            create_view(shop.connection, name, "q", query, f"public.{name}", engine="postgres")
        changes = ("select 1", "update item set k = k + 1 where id in (3, 700); update item set k = 0 where k = 0",
                   "update item set k = 60 where id in (110, 111, 112)")  # fmt: skip
        with Refresher(db.dsn) as refresher:
            for change in changes:
                shop.execute(change)
                for name in ("rows", "groups", "text"):
                    refresher.refresh(name)
        seen = {name: history(shop, name) for name in ("rows", "groups", "text")}
        # images that the conditions leave out are not counted
        assert [run[:2] for run in seen["rows"]] == [("full", None), ("incremental", 4), ("incremental", 3)]
        assert [run[:2] for run in seen["groups"]] == [("full", None), ("by-key", 4), ("by-key", 6)]
        # what a change does not reach is not read
        assert [run[:2] for run in seen["text"]] == [("full", None), ("full", None), ("none", None)]
        assert 500 <= seen["rows"][0][2] <= seen["groups"][0][2] == 1000
        assert all(10 <= run[2] < 1000 for run in seen["groups"][1:]), seen
        assert [seen["rows"][1][2], seen["rows"][2][2], seen["text"][2][2]] == [0, 0, 0]


def test_first_load_of_an_empty_table_is_no_measure(db: Database) -> None:
    for shop in make_shop(db, ["create table item (id int primary key, k int)"]):
        shop.capture("item")
        shop.view("v", "select id, k from item", engine="postgres")
        with Refresher(db.dsn) as refresher:
            refresher.refresh("v")
            shop.execute(
                "select gdq.finish_view_run(gdq.start_view_run('v'), 'delta',"
                " kind => 'x', delta_rows => 10, work_seconds => 2.0)"
            )
            shop.execute("insert into item select i, i from generate_series(1, 1000) i; analyze item")
            assert refresher.refresh("v").action == "delta"


def history(shop: Shop, name: str) -> list[tuple[Any, ...]]:
    runs = view_history(shop.connection, name)[::-1]
    assert all(run.work_seconds and run.seconds and run.work_seconds < run.seconds for run in runs)
    return [(run.kind, run.delta_rows or None, run.rows_read) for run in runs]


def test_what_is_expected_to_cost_more_is_not_done(db: Database) -> None:
    table = "create table item (id int primary key, k int)"
    for shop in make_shop(db, [table, "insert into item select i, i from generate_series(1, 50) i"]):
        shop.capture("item")
        shop.view("v", "select id, k from item where k > 3", engine="postgres")
        past = (
            "select gdq.finish_view_run(gdq.start_view_run('v'), %s, kind => 'x', delta_rows => %s, work_seconds => %s)"
        )
        with Refresher(db.dsn) as refresher:
            refresher.refresh("v")
            shop.execute(past, "delta", 4, 60.0)
            shop.execute("update item set k = 2 where id < 10")
            result = refresher.refresh("v")
            assert (result.action, str(result.reason).startswith(BY_COST)) == ("full", True)
            assert shop.differences("v", "select id, k from item where k > 3") == (0, 0)
            last = view_history(shop.connection, "v", 1)[0]
            assert last.choice == last.reason == result.reason
            shop.execute(past, "full", None, 100.0)
            shop.execute(past, "full", None, 100.0)
            shop.execute("update item set k = 9 where id < 10")
            assert refresher.refresh("v").action == "delta"
            assert str(view_history(shop.connection, "v", 1)[0].choice).startswith("delta, ")


def test_more_keys_than_statements_take_are_not_followed(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (computation, compiled_steps):
        monkeypatch.setattr(module, "KEYS_MAX", 10)
        monkeypatch.setattr(module, "KEYS_BYTES_MAX", 150)
    table = "create table item (id int primary key, k text)"
    for shop in make_shop(db, [table, "insert into item select i, 'k' || i from generate_series(1, 100) i"]):
        shop.capture("item")
        query = "select k, max(id) as most from item group by k"
        shop.view("v", query, engine="postgres")
        with Refresher(db.dsn) as refresher:
            refresher.refresh("v")
            for change, action, reason in (
                ("update item set id = id + 1000 where id <= 10", "delta", None),
                ("update item set id = id + 1000 where id <= 21", "full", "more than 10 keys changed"),
                ("update item set k = repeat(k, 80) where id = 50", "full", "the keys that changed take more than"),
            ):
                shop.execute(change)
                result = refresher.refresh("v")
                assert (result.action, (result.reason or "")[: len(reason or "")] or None) == (action, reason)
                assert shop.differences("v", query) == (0, 0)
