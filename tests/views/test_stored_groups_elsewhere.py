"""Groups whose targets are in another PostgreSQL move there in one transaction; lakes and mixtures are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gdq.conninfo import conninfo_without_password
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.view.group import create_group
from gdq.view.view import create_view
from tests.support.endings import Deaths, Killed
from tests.support.server import Database
from tests.support.spark import Shop, make_shop

# by key, by signed rows, in full
VIEWS = {
    "sums": "select k, count(*) as rows, sum(n) as n from item group by k",
    "rows": "select k, n from item",
    "total": "select count(*) as rows, sum(n) as n from item",
}
SAME = """
select (select array_agg((k, c, s) order by k) from (select k, count(*) as c, sum(n) as s from rows group by k) as r)
         is not distinct from (select array_agg((k, rows, n) order by k) from sums),
       (select (count(*), sum(n))::text from rows) is not distinct from (select (rows, n)::text from total)"""
CHANGE = "update item set n = n + {0}, k = (k + 1) % 5 where id % 3 = {0} % 3"


@dataclass(frozen=True, slots=True)
class Places:
    """The source, and the database of the targets."""

    shop: Shop
    far: Database
    far_dsn: str

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        with self.far.connect() as connection:
            return connection.execute(query.encode()).fetchall()


@pytest.fixture
def places(db: Database, empty_db: Database) -> Iterator[Places]:
    statements = [
        "create table item (id int primary key, k int, n bigint)",
        "insert into item select i, i % 5, i from generate_series(1, 100) i",
    ]
    with conninfo_without_password(empty_db.dsn) as dsn:
        for shop in make_shop(db, statements):
            shop.capture("item")
            for name, query in VIEWS.items():
                shop.view(name, query, engine="postgres", target_dsn=dsn)
            create_group(shop.connection, "g", list(VIEWS))
            yield Places(shop, empty_db, dsn)


@pytest.mark.long
@pytest.mark.server
def test_all_move_in_one_transaction_whatever_is_killed(places: Places) -> None:
    names, dsn = list(VIEWS), places.shop.db.dsn
    done = threading.Event()
    seen: set[tuple[Any, ...]] = set()

    def read() -> None:
        with places.far.connect() as connection:
            while not done.is_set():
                seen.update(connection.execute(SAME).fetchall())

    with Refresher(dsn) as refresher:
        actions = [result.action for result in refresher.refresh_together(names, group="g")]
    assert actions == ["full"] * 3
    reader = threading.Thread(target=read)
    reader.start()
    points: tuple[RefreshPoint, ...] = ("begun", "exported", "ticked", "applied", "committed")
    try:
        for number, wanted in enumerate(points, 1):
            places.shop.execute(CHANGE.format(number))
            with Refresher(dsn, at=Deaths([wanted])) as refresher, pytest.raises(Killed):
                refresher.refresh_together(names, group="g")
            assert places.ask("select count(distinct split_part(position, '/', 3)) from gdq_target.position") == [(1,)]
            places.shop.execute(CHANGE.format(number))
            with Refresher(dsn) as refresher:
                results = refresher.refresh_together(names, group="g")
                assert [result.action for result in results] == ["delta", "delta", "full"]
                assert verify_with(refresher, "rows").equal
    finally:
        done.set()
        reader.join()
    assert seen == {(True, True)}
    for name, query in VIEWS.items():
        expected = places.shop.execute(f"select q::text from ({query}) q order by 1")
        assert places.ask(f"select t::text from {name} t order by 1") == expected


@pytest.mark.long
@pytest.mark.server
def test_writes_after_the_snapshot_reach_no_view(places: Places) -> None:
    names, dsn = list(VIEWS), places.shop.db.dsn
    late = iter(range(1, 100))

    def write(point: RefreshPoint) -> None:
        if point in ("exported", "staged", "ticked"):
            places.shop.execute(f"insert into item values (1000 + {next(late)}, 1, 7)")
            places.shop.execute(CHANGE.format(next(late)))

    for actions in (["full"] * 3, ["delta", "delta", "full"], ["delta", "delta", "full"]):
        with Refresher(dsn, at=write) as refresher:
            assert [result.action for result in refresher.refresh_together(names, group="g")] == actions
        assert places.ask(SAME) == [(True, True)]
    with Refresher(dsn) as refresher:
        refresher.refresh_together(names, group="g")
    for name, query in VIEWS.items():
        expected = places.shop.execute(f"select q::text from ({query}) q order by 1")
        assert places.ask(f"select t::text from {name} t order by 1") == expected


def test_lakes_and_two_databases_are_refused(places: Places, tmp_path: Path) -> None:
    connection = places.shop.connection
    places.shop.view("here", VIEWS["rows"], engine="postgres")
    create_view(connection, "lake", "q", VIEWS["rows"], f"parquet:{tmp_path}/lake")
    refused = psycopg.errors.FeatureNotSupported
    with pytest.raises(refused, match='views "rows" and "here" have targets in two databases: no group'):
        create_group(connection, "h", ["rows", "here"])
    with pytest.raises(refused, match='view "lake" cannot be in a group: its target is a lake table'):
        create_group(connection, "h", ["lake"])
