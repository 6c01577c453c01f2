"""Views that are refreshed together are never seen at different snapshots, whatever is killed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.view.view import create_view, view_history
from tests.support.endings import Deaths, Killed
from tests.support.programs import gdq
from tests.support.server import Database
from tests.support.spark import Shop, make_shop

VIEWS = {
    "rows": "select id, k, n from item",
    "sums": "select k, count(*) as rows, sum(n) as n from item group by k",
    "tops": "select k, max(n) as top, count(distinct n) as values from item group by k",
    "total": "select count(*) as rows, sum(i.n) as n, max(i.n) as top from item i join kind on kind.k = i.k",
}
# One statement that sees all targets: what the others say of the rows that one shows.
WRONG = """
select (select array_agg((k, c, s) order by k) from (select k, count(*) as c, sum(n) as s from rows group by k) as r)
         is distinct from (select array_agg((k, rows, n) order by k) from sums),
       (select array_agg((k, top) order by k) from (select k, max(n) as top from rows group by k) as r)
         is distinct from (select array_agg((k, top) order by k) from tops),
       (select (count(*), sum(n), max(n))::text from rows) is distinct from (select (rows, n, top)::text from total)"""
CHANGE = """
with gone as (delete from item where id % 7 = {0}), moved as (update item set k = (k + 1) % 5 where id % 7 = {0} + 1)
insert into item select i, i % 5, i * {0} from generate_series({0} * 1000 + 200, {0} * 1000 + 210) i
on conflict do nothing"""


@pytest.fixture
def grouped(db: Database) -> Iterator[Shop]:
    statements = [
        "create table item (id int primary key, k int, n bigint); create table kind (k int primary key)",
        "insert into kind select generate_series(0, 4)",
        "insert into item select i, i % 5, i from generate_series(1, 100) i",
    ]
    for shop in make_shop(db, statements):
        shop.capture("item")
        shop.capture("kind")
        for name, query in VIEWS.items():
            shop.view(name, query, engine="postgres")
        yield shop


@pytest.mark.server
def test_reader_never_sees_two_snapshots(grouped: Shop) -> None:
    stop = threading.Event()
    seen: list[object] = []

    def read() -> None:
        with grouped.db.connect() as connection:
            while not stop.is_set():
                seen.append(connection.execute(WRONG).fetchone())

    def write() -> None:
        with grouped.db.connect() as connection:
            for number in range(10**6):
                if stop.is_set():
                    return
                connection.execute(CHANGE.format(number % 6).encode())

    with Refresher(grouped.db.dsn) as refresher:
        refresher.refresh_together(list(VIEWS))
        threads = [threading.Thread(target=read), threading.Thread(target=write)]
        for thread in threads:
            thread.start()
        try:
            results = [result for _ in range(4) for result in refresher.refresh_together(list(VIEWS))]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        refresher.refresh_together(list(VIEWS))
    assert set(seen) == {(False, False, False)}
    assert "delta" in {result.action for result in results}
    assert all(grouped.differences(name, query) == (0, 0) for name, query in VIEWS.items())
    runs = [[run.action for run in view_history(grouped.connection, name)] for name in VIEWS]
    assert [len(actions) for actions in runs] == [6] * 4


@pytest.mark.long
def test_killed_anywhere_a_rerun_is_right(grouped: Shop) -> None:
    points: tuple[RefreshPoint, ...] = ("begun", "exported", "ticked", "applied", "committed")
    for number, wanted in enumerate(points):
        with Refresher(grouped.db.dsn, at=Deaths([wanted])) as refresher, pytest.raises(Killed):
            refresher.refresh_together(list(VIEWS))
        if number:
            assert grouped.execute(WRONG) == [(False, False, False)]
        assert {view_history(grouped.connection, name, 1)[0].action for name in VIEWS} == {"failed"}
        with Refresher(grouped.db.dsn) as refresher:
            refresher.refresh_together(list(VIEWS))
        assert all(grouped.differences(name, query) == (0, 0) for name, query in VIEWS.items())
        grouped.execute(CHANGE.format(number))


def test_one_that_needs_a_full_load_takes_the_others_along(grouped: Shop) -> None:
    done = gdq("refresh", "--together", *VIEWS, "--json", dsn=grouped.db.dsn)
    assert [row["action"] for row in json.loads(done.stdout)] == ["full"] * 4
    grouped.execute(CHANGE.format(1))
    grouped.execute("delete from sums where k = 1; truncate kind")
    with Refresher(grouped.db.dsn) as refresher:
        results = {result.view_name: result for result in refresher.refresh_together(list(VIEWS))}
    actions = {name: result.action for name, result in results.items()}
    assert actions == {"rows": "delta", "sums": "full", "tops": "delta", "total": "full"}
    assert all(grouped.differences(name, query) == (0, 0) for name, query in VIEWS.items())


def test_refused(grouped: Shop) -> None:
    with Refresher(grouped.db.dsn) as refresher:
        refresher.refresh("rows")
    grouped.capture("rows")
    create_view(grouped.connection, "above", "q", "select k from rows", "public.above", engine="postgres")
    done = gdq("refresh", "--together", "above", "sums", "rows", dsn=grouped.db.dsn)
    assert done.returncode == 1
    told = 'Error: view "above" reads the target of view "rows": they cannot be in one group'
    assert done.stderr.splitlines()[0] == told
    assert gdq("refresh", "--together", dsn=grouped.db.dsn).returncode == 2
    assert gdq("refresh", "--together", "sums", "nothing", dsn=grouped.db.dsn).returncode == 1
