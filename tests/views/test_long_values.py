"""Views whose rows are found by values that are too long for an index: over a third of a page, and incompressible."""

from __future__ import annotations

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.view.view import view_history
from tests.support.server import Database
from tests.support.spark import Shop, make_shop

SHAPES = {
    "extremes": "select body, max(n) as most from document group by body",
    "groups": "select body, count(*) as lines, sum(n) as n from document group by body",
    "distinct": "select distinct body, mod(n, 2) as part from document",
}
LONG = "(select string_agg(md5(i::text || {n}), '') from generate_series(1, 300) i)"


def different(shop: Shop, view: str) -> int:
    """The rows that the view's target has more or less than its query."""
    query, table = SHAPES[view], f'select * from "{view}"'
    row = shop.connection.execute(
        f"select count(*) from ((({query}) except all ({table})) union all (({table}) except all ({query}))) as d"
    ).fetchone()
    return -1 if row is None else int(row[0])


@pytest.mark.long
@pytest.mark.parametrize("view", SHAPES)
def test_values_too_long_for_an_index(db: Database, view: str) -> None:
    table = "create table document (id int primary key, body text, n int)"
    for shop in make_shop(db, [table, "insert into document select i, 'b' || i / 2, i from generate_series(1, 9) i"]):
        shop.capture("document")
        shop.view(view, SHAPES[view], engine="postgres")
        with Refresher(db.dsn) as refresher:
            refresher.refresh(view)
            shop.execute(f"insert into document select 9 + i, {LONG.format(n=1)}, i from generate_series(1, 2) i")
            assert refresher.refresh(view).action == "full"
            assert different(shop, view) == 0
            shop.execute(f"insert into document values (20, {LONG.format(n=2)}, 5)")
            shop.execute("delete from document where id in (2, 10); update document set n = n + 1 where id = 11")
            assert refresher.refresh(view).action == "delta"
            assert different(shop, view) == 0
            assert refresher.refresh(view, full=True).action == "full"
        assert different(shop, view) == 0
        reasons = [run.reason for run in view_history(shop.connection, view, 9)]
        assert sum("too long for an index" in (reason or "") for reason in reasons) == 1
