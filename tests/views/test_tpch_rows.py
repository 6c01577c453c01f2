"""A refresh from few changes reads few rows: TPC-H, counted by the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import sql

from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.view.view import create_view
from tests.support import tpch
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

pytestmark = pytest.mark.long

SCALE = 0.05
CHURN = 0.0001
# Of 22: so many are refreshed from changes and read less than this share of what their query reads.
WANTED, SHARE = 18, 0.2

# As few rows of two other tables, or one view more would have nothing to do.
OTHERS = (
    "update customer set c_acctbal = c_acctbal + 1 where c_custkey = 4711",
    "update part set p_retailprice = p_retailprice + 1, p_size = 15 where p_partkey = 1147",
)


@pytest.fixture
def tpch_shop(db: Database, tmp_path: Path) -> Iterator[Shop]:
    with db.connect("su") as connection:
        # all is in memory
        setting = sql.SQL("alter database {} set random_page_cost = 1.1").format(sql.Identifier(db.name))
        connection.execute(setting)
    for shop in make_shop(db, []):
        tpch.load(shop.connection, tmp_path, SCALE)
        for table in tpch.TABLES:
            shop.capture(table)
        yield shop


def read_by(shop: Shop, refresher: Refresher, name: str) -> tuple[RefreshResult, int]:
    """A refresh, and the rows that the server handed out meanwhile."""
    tell(refresher)
    before = tpch.rows_read(shop.connection)
    result = refresher.refresh(name)
    tell(refresher)
    return result, tpch.rows_read(shop.connection) - before


def tell(refresher: Refresher) -> None:
    """Make the sessions of refreshes tell the server what they have read, which they do once a second at most."""
    for purpose, autocommit in (("target", True), ("snapshot", False)):
        session = refresher.connection(purpose, refresher.dsn, autocommit=autocommit)
        session.execute("select pg_stat_force_next_flush()")
        session.commit()


def test_few_changes_read_few_rows(tpch_shop: Shop) -> None:
    shop = tpch_shop
    shares: dict[str, str] = {}
    passed = []
    with Refresher(shop.db.dsn) as refresher:
        for name, query in tpch.QUERIES.items():
            # audits read rows too, as many as the time that they may take allows
            create_view(shop.connection, name, QUEUE, query, f"public.{name}", engine="postgres", audit_share=0.0)
            refresher.refresh(name)
        assert tpch.change_lines(shop.connection, SCALE, CHURN, 1, 1) > 0
        shop.execute("; ".join(OTHERS))
        for name, query in tpch.QUERIES.items():
            result, mine = read_by(shop, refresher, name)
            before = tpch.rows_read(shop.connection)
            shop.execute(query)
            whole = tpch.rows_read(shop.connection) - before
            shares[name] = f"{result.action}, {mine} of {whole} rows ({mine / whole:.1%}) {result.reason or ''}"
            if result.action == "delta" and mine < SHARE * whole:
                passed.append(name)
            assert shop.differences(name, query) == (0, 0), name
    print(*(f"{name}: {share}" for name, share in shares.items()), sep="\n")
    failed = {name: share for name, share in shares.items() if name not in passed}
    assert len(passed) >= WANTED, failed
