"""A full load by Spark tells the rows that its tasks read, beside those that its tables hold."""

from __future__ import annotations

import pytest

from gdq.consumers.refresh.refresher import Refresher
from tests.support.spark import SPARK_MARKS, Shop

pytestmark = SPARK_MARKS

QUERIES = {
    "joined": "select o.id, o.status, p.id as other from orders o join orders p on p.id = o.id + 1",
    "windowed": "select id, status, row_number() over (partition by status order by id) as nth from orders",
}


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(QUERIES["joined"], id="joined"),
        pytest.param(QUERIES["windowed"], id="windowed", marks=pytest.mark.long),
    ],
)
def test_rows_of_a_full_load(shop: Shop, query: str) -> None:
    shop.capture("orders")
    shop.execute("analyze orders")
    shop.view("v", query, engine="spark")
    told: list[tuple[str, int, int | None]] = []
    with Refresher(shop.db.dsn, driver_bytes=0, progress=lambda _view, *what: told.append(what)) as refresher:
        assert refresher.refresh("v").action == "full"
        assert told[0][0] == "computing"
        rows, expected = max((rows, expected or 0) for phase, rows, expected in told if phase == "computing")
        assert 0 < expected / 2 <= rows <= expected * 2
        before = len(told)
        shop.execute("update orders set status = 'late' where id = 1")
        assert refresher.refresh("v").action == "delta"
        assert all(expected is None for phase, _, expected in told[before:] if phase == "computing")
