"""Queries that PostgreSQL takes and few people write: each is refreshed as a view, or refused in one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import PlanError
from gdq.view.view import create_view
from tests.support.server import Database
from tests.support.spark import Shop, make_shop

pytestmark = pytest.mark.server

STATEMENTS = [
    "create table t (id int primary key, k int, n int)",
    "create table u (id int primary key, k int)",
    "insert into t select i, i % 3, i from generate_series(1, 20) i",
    "insert into u select i, i % 3 from generate_series(1, 5) i",
]
REFRESHED = {
    "grouping of one set": "select k, grouping(k) as g, count(*) as n from t group by grouping sets (k)",
    "having": "select k, grouping(k) as g from t group by k having grouping(k) >= 0",
    "grouping of a query's column": """select grouping(s.x) as g from t cross join lateral (select (select t.k) as x) s
                                       group by s.x""",
}
REFUSED = {
    "no column": "select from t group by k having count(*) > 0",
    "a whole row of a join": "select (j.*) is null as b from (t join u using (id)) j",
    "cycle": """with recursive r (id, k) as (select id, k from t union all select t.id, t.k from t, r where t.k = r.id)
                cycle id, k set looped to 'Y' default 'N' using path select id, k from r""",
}


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    for shop in make_shop(db, STATEMENTS):
        for table in ("t", "u"):
            shop.capture(table)
        yield shop


def test_odd_queries_are_refreshed(shop: Shop) -> None:
    with Refresher(shop.db.dsn) as refresher:
        for number, (name, query) in enumerate(REFRESHED.items()):
            view = f"v{number}"
            shop.view(view, query, engine="postgres")
            refresher.refresh(view)
            more = f"insert into t select i, 7, i from generate_series({100 + 10 * number}, {103 + 10 * number}) i"
            changes = ("update t set k = k + 1 where n % 3 = 1", more, "delete from t where n % 3 = 2")
            for statement in changes:
                shop.execute(statement)
                refresher.refresh(view)
                assert shop.differences(view, query) == (0, 0), name


@pytest.mark.parametrize("name", REFUSED)
def test_odd_queries_are_refused(shop: Shop, name: str) -> None:
    with pytest.raises(PlanError):
        create_view(shop.connection, "v", "q", REFUSED[name], "public.v", engine="postgres")


def test_a_join_with_a_name_is_loaded(shop: Shop) -> None:
    query = "select j.* from (t join u using (id, k)) j"
    shop.view("v", query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("v")
        shop.execute("delete from u where id = 2")
        assert refresher.refresh("v").action == "full"
        assert shop.differences("v", query) == (0, 0)
