"""Windows without PARTITION BY: only the rows near a change, or behind it, are written; else a reason is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlglot import exp

from gdq.consumers.refresh.refresher import Refresher
from gdq.plan import delta, postgres
from gdq.plan.query import Query
from gdq.plan.window_order import WindowOrder, window_order
from gdq.view.view import explain_view, set_view_audit, view_history
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

pytestmark = pytest.mark.server

ROWS = 3000
STATEMENTS = [
    "create table reading (id int primary key, at int, v int)",
    "create table place (id int primary key, v int)",
    "create index on reading (at)",
    f"select gdq.add_table('{QUEUE}', 'reading'), gdq.add_table('{QUEUE}', 'place')",
    f"insert into reading select i, i / 3, i % 7 from generate_series(1, {ROWS}) i",
    f"insert into place select i, i % 7 from generate_series(1, {ROWS}) i",
]
VIEWS = {
    "steps": "select at, id, v - lag(v) over (order by at, id) as step from reading",
    "means": "select id, avg(v) over (order by id rows between 3 preceding and current row) as mean from place",
    "hidden": "select v, lead(v, 2) over (order by at desc, id) as next from reading",
    "by_time": "select at, sum(v) as v, lag(sum(v)) over (order by at) as before from reading group by at",
    "totals": "select id, sum(v) over (order by id) as total from place",
    "rest": "select at, id, row_number() over (order by at desc, id) as place from reading",
}
# Changes at both ends, in the middle, side by side, of many rows, to and from NULL.
CHANGES = [
    "update reading set v = v + 1 where id = 1500; update place set v = v + 1 where id = 2990",
    "delete from reading where id between 1000 and 1004; delete from place where id in (2980, 2981, 2984)",
    "insert into reading values (0, -1, 5), (5000, 9999, 5), (5001, 9999, 6); insert into place values (5000, 1)",
    "update reading set at = null where id in (7, 2999); update place set v = null where id > 2995",
    "update reading set at = at + 1 where id % 100 = 0; delete from place where id % 500 = 0",
    "update reading set at = 4 where at is null; insert into place select i + 6000, i from generate_series(1, 9) i",
    "delete from reading where at is not null and id > 20; delete from place where id > 20",
    "delete from reading; delete from place",
    "insert into reading values (3, null, 1), (2, 8, 1); insert into place values (3, 1)",
]


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    for shop in make_shop(db, STATEMENTS):
        for name, query in VIEWS.items():
            shop.view(name, query, engine="postgres")
            set_view_audit(shop.connection, name, 0)
        yield shop


def test_rows_near_a_change_are_replaced(shop: Shop) -> None:
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, VIEWS)
        shop.execute("analyze reading, place")
        results = []
        for change in CHANGES:
            shop.execute(change)
            results.append(shop.check(refresher, VIEWS))
        assert {result.action for found in results for result in found.values()} <= {"delta", "none"}, results
    written = {name: result.rows_changed for name, result in results[0].items()}
    # the groups of three rows around the one that changed
    assert min(written[name] for name in ("steps", "means", "hidden", "by_time")) > 0, written
    assert max(written[name] for name in ("steps", "means", "hidden", "by_time")) <= 30, written
    # all rows behind it in the order: eleven replaced; 1,004 deleted, of which 999 come again
    assert (written["totals"], results[1]["rest"].rows_changed) == (22, 2003), written
    for name in ("steps", "means"):
        first = view_history(shop.connection, name, len(CHANGES))[-1]
        assert (first.kind, int(first.rows_read or ROWS) < 200) == ("by-key", True), (name, first)


def narrower(order: WindowOrder) -> WindowOrder:
    """A row depends on one row less on each side."""
    return WindowOrder(order.by, order.below and order.below - 1, order.above and order.above - 1, order.nulls_low)


def turned(order: WindowOrder) -> WindowOrder:
    """NULL is at the other end."""
    return WindowOrder(order.by, order.below, order.above, not order.nulls_low)


@pytest.mark.long
@pytest.mark.parametrize(("mutation", "victim"), [(narrower, "steps"), (turned, "hidden")])
def test_each_neighbour_is_needed(
    shop: Shop, mutation: Callable[[WindowOrder], WindowOrder], victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mutated(query: Query, select: exp.Select) -> WindowOrder | None:
        order = window_order(query, select)
        return None if order is None else mutation(order)

    postgres._plan_changes.cache_clear()
    monkeypatch.setattr(delta, "window_order", mutated)
    wrong = set()
    with Refresher(shop.db.dsn) as refresher:
        for change in ["select", *CHANGES]:
            shop.execute(change)
            for name, query in VIEWS.items():
                action = refresher.refresh(name).action
                if shop.differences(name, query) != (0, 0) or (action == "full" and change != "select"):
                    wrong.add(name)
    postgres._plan_changes.cache_clear()
    assert victim in wrong


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("select id, ntile(4) over (order by id) as quarter from place", "window-no-partition"),
        ("select id, count(*) over () as n from place", "window-no-partition"),
        ("select id, v - avg(v) over () as off from place", "window-no-partition"),
        ("select id, lag(v, id) over (order by id) as before from place", "window-no-partition"),
        (
            "select id, lag(id) over (order by v, id) as a, lag(id) over (order by id) as b from place",
            "window-no-partition",
        ),
        (
            "select id, sum(v) over (order by id) as a, sum(v) over (order by id desc) as b from place",
            "window-no-partition",
        ),
        ("select id, lag(id) over (order by v) as before from place", "window-order"),
        ("select at, sum(v) over (order by at rows 2 preceding) as s from reading", "window-order"),
        ("select at, array_agg(v) over (order by at) as vs from reading", "window-order"),
    ],
)
def test_reason_for_a_full_load(db: Database, query: str, code: str) -> None:
    for shop in make_shop(db, STATEMENTS[:4]):
        plan = explain_view(shop.connection, QUEUE, query, engine="postgres")
        assert (plan.strategy, str(plan).count(f"[{code}]") > 0) == ("full", True)
