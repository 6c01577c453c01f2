"""Views of tables with inheritance children, whose rows are in the logs of the children, and of ONLY a table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import PlanError
from gdq.view.view import EngineChoice, create_view
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

STATEMENTS = [
    "create table parent (id int primary key, v int)",
    "create table child (w int, primary key (id)) inherits (parent)",
    "create table root (id int primary key, v int) partition by list (id)",
    "create table leaf partition of root default",
    "create table plain (id int primary key, v int)",
    *(f"select gdq.add_table('{QUEUE}', '{table}')" for table in ("child", "parent", "root", "plain")),
]


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    yield from make_shop(db, STATEMENTS)


@pytest.mark.parametrize(
    "query",
    [
        "select id from parent",
        "select id from only parent",
        "select p.id from plain p where exists (select from parent x where x.id = p.id)",
        "with a as (select id from parent) select id from a",
        "select id from only root",
        "select a.id from plain p join (only root a join plain b on b.id = a.id) on p.id = a.id",
    ],
)
@pytest.mark.parametrize("engine", ["postgres", "spark"])
def test_refused(shop: Shop, query: str, engine: EngineChoice) -> None:
    with pytest.raises(PlanError) as error:
        create_view(shop.connection, "v", QUEUE, query, "public.v", engine=engine)
    assert error.value.code == "inheritance"


def test_child_and_only_a_table_without_children(shop: Shop) -> None:
    views = {"of_child": "select id, v, w from child", "of_plain": "select p.id, c.v from only plain p, child c"}
    for name, query in views.items():
        shop.view(name, query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, views)
        shop.execute("insert into plain values (1, 1); insert into child values (1, 1, 1), (2, 2, 2)")
        shop.execute("insert into parent values (3, 3); update parent set v = v + 1")
        assert {result.action for result in shop.check(refresher, views).values()} == {"delta"}


def test_child_that_comes_later(shop: Shop) -> None:
    """The refresh fails as long as the child is there; else it would miss the child's rows."""
    query = "select id, v from plain"
    shop.view("v", query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("v")
        shop.execute("create table late (primary key (id)) inherits (plain)")
        shop.capture("late")
        shop.keep_house()
        shop.execute("insert into late values (1, 1)")
        with pytest.raises(PlanError, match="inheritance children"):
            refresher.refresh("v")
        shop.execute("drop table late")
        shop.keep_house()
        shop.check(refresher, {"v": query})
