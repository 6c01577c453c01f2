"""A refresh reads in several sessions: none may wait behind a statement that waits for another of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.consumers.refresh.view_refresh import RefreshPoint
from tests.support.server import Database
from tests.support.spark import SPARK_MARKS, Shop, make_shop
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.server

QUERY = "select status, count(*) as n, max(n) as top from orders group by status"
WAITS = "select from pg_locks where relation = 'orders'::regclass and not granted"


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    orders = "create table orders (id int primary key, status text, n int)"
    rows = "insert into orders select i, 's' || mod(i, 5), i from generate_series(1, 400) i"
    for shop in make_shop(db, [orders, rows]):
        shop.capture("orders")
        yield shop


@contextmanager
def wanted(shop: Shop, statement: str) -> Iterator[Refresher]:
    """A refresher into whose first refresh a statement comes that wants the table for itself; it must get it."""
    failures: list[BaseException] = []
    begun: list[threading.Thread] = []

    def run() -> None:
        try:
            with shop.db.connect() as other:
                other.execute(f"set statement_timeout = '{SECONDS} s'".encode())
                other.execute(statement.encode())
        except BaseException as error:
            failures.append(error)

    def at(point: RefreshPoint) -> None:
        if point == "exported" and not begun:
            begun.append(threading.Thread(target=run))
            begun[0].start()
            until(lambda: shop.connection.execute(WAITS).rowcount)

    with Refresher(shop.db.dsn, at=at) as refresher:
        yield refresher
    begun[0].join()
    assert not failures


@pytest.mark.parametrize("statement", ["truncate orders", "alter table orders alter n type bigint"])
def test_in_the_database_of_the_tables(shop: Shop, statement: str) -> None:
    shop.view("v", QUERY, engine="postgres")
    shop.execute("update orders set n = n + 1")
    with wanted(shop, statement) as refresher:
        refresher.refresh("v")
        assert verify_with(refresher, "v").equal
    left = 0 if statement.startswith("truncate") else 5
    assert shop.execute("select count(*) from v") == [(left,)]


def test_group(shop: Shop) -> None:
    for name in ("v", "w"):
        shop.view(name, QUERY, engine="postgres")
    with wanted(shop, "truncate orders") as refresher:
        refresher.refresh_together(["v", "w"])
    assert shop.execute("select (select count(*) from v), (select count(*) from w)") == [(0, 0)]


def test_target_elsewhere(shop: Shop, empty_db: Database, tmp_path: Path) -> None:
    parameters: dict[str, Any] = dict(conninfo_to_dict(empty_db.dsn))
    passfile = tmp_path / "pgpass"
    passfile.touch(mode=0o600)
    passfile.write_text(f"*:*:*:*:{parameters.pop('password')}\n")
    dsn = make_conninfo("", **{**parameters, "passfile": str(passfile)})
    shop.view("v", QUERY, engine="postgres", target_dsn=dsn)
    with wanted(shop, "truncate orders") as refresher:
        refresher.refresh("v")
        assert verify_with(refresher, "v").equal


class TestSpark:
    pytestmark: Any = SPARK_MARKS

    @pytest.mark.long
    def test_workers(self, shop: Shop) -> None:
        shop.view("v", QUERY, engine="spark")
        with wanted(shop, "truncate orders") as refresher:
            refresher.refresh("v")
            assert verify_with(refresher, "v").equal
        assert shop.execute("select count(*) from v") == [(0,)]
