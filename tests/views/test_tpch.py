"""The 22 queries of TPC-H as views that are refreshed inside PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.view.view import create_view
from tests.support import tpch
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

SCALE = 0.01
ROUNDS = 2
# Of 22; the others may load in full, and then say why.
FROM_CHANGES = 18


@pytest.fixture
def tpch_shop(db: Database, tmp_path: Path) -> Iterator[Shop]:
    for shop in make_shop(db, []):
        tpch.load(shop.connection, tmp_path, SCALE)
        for table in tpch.TABLES:
            shop.capture(table)
        yield shop


def rows(shop: Shop, name: str) -> object:
    """The rows of a view as a bag, in text."""
    return shop.execute(f"select v::text, count(*) from {name} v group by 1 order by 1")


def differing(shop: Shop) -> dict[str, tuple[int, int]]:
    """The views that are not as their query: how many rows each lacks, and has too many."""
    found = {name: shop.differences(name, query) for name, query in tpch.QUERIES.items()}
    return {name: numbers for name, numbers in found.items() if numbers != (0, 0)}


@pytest.mark.long
def test_every_query_stays_exact(tpch_shop: Shop) -> None:
    shop = tpch_shop
    for name, query in tpch.QUERIES.items():
        create_view(shop.connection, name, QUEUE, query, f"public.{name}", engine="postgres")
    actions: dict[str, set[str]] = {name: set() for name in tpch.QUERIES}
    changed = dict.fromkeys(tpch.QUERIES, 0)
    with Refresher(shop.db.dsn) as refresher:
        for name in tpch.QUERIES:
            refresher.refresh(name)
        before = {name: rows(shop, name) for name in tpch.QUERIES}
        assert differing(shop) == {}
        for number in range(1, ROUNDS + 1):
            for transaction in tpch.churn(number):
                shop.execute("; ".join(["begin", *transaction, "commit"]))
            shop.execute("begin; delete from lineitem where l_orderkey < 1000; rollback")
            for name in tpch.QUERIES:
                result = refresher.refresh(name)
                actions[name].add(result.action)
                assert result.action == "delta" or result.reason, result
                now = rows(shop, name)
                changed[name] += now != before[name]
                before[name] = now
            assert differing(shop) == {}, f"round {number}: {actions}"
    assert [name for name, times in changed.items() if not times] == []
    from_changes = [name for name, seen in actions.items() if seen == {"delta"}]
    assert len(from_changes) >= FROM_CHANGES, actions
