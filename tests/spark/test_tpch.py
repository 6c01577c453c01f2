"""The 22 queries of TPC-H as views that are refreshed by Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdq.consumers.refresh.refresher import Refresher
from tests.support import tpch
from tests.support.server import Database
from tests.support.spark import SPARK_MARKS, make_shop

pytestmark = [*SPARK_MARKS, pytest.mark.long]

SCALE = 0.01
# Of 22; the others may load in full, and then say why.
FROM_CHANGES = 18


def test_every_query_stays_exact_on_spark(db: Database, tmp_path: Path) -> None:
    for shop in make_shop(db, []):
        tpch.load(shop.connection, tmp_path, SCALE)
        for table in tpch.TABLES:
            shop.capture(table)
        for name, query in tpch.QUERIES.items():
            shop.view(name, query, engine="spark")
        with Refresher(db.dsn) as refresher:
            loads = shop.check(refresher, tpch.QUERIES)
            assert {result.action for result in loads.values()} == {"full"}
            for transaction in tpch.churn(1):
                shop.execute("; ".join(["begin", *transaction, "commit"]))
            results = shop.check(refresher, tpch.QUERIES)
        kinds = dict(
            shop.execute("select v.view_name, h.kind from gdq.view_info() v, gdq.view_history(v.view_name, 1) h")
        )
        assert all(result.action == "delta" or result.reason for result in results.values()), results
        from_changes = [name for name, result in results.items() if result.action == "delta"]
        assert len(from_changes) >= FROM_CHANGES, results
        assert {kinds[name] for name in from_changes} <= {"incremental", "by-key", "none"}
        unchanged = [name for name, result in results.items() if not result.rows_changed]
        assert unchanged == [], results
