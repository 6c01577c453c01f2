"""Views of tables whose log leaves out large values that updates leave as they were."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from gdq import queue as queues
from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import PlanError
from gdq.view.view import EngineChoice, create_view
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

LARGE = "(select string_agg(md5('{}' || i::text), '') from generate_series(1, 200) i)"
STATEMENTS = [
    "create table item (id int primary key, kind int, n int, doc text)",
    f"insert into item select i, i % 3, i, {LARGE.format('a')} from generate_series(1, 30) i",
    "create table kind (id int primary key, name text)",
    "insert into kind values (0, 'zero'), (1, 'one'), (2, 'two')",
    f"select gdq.add_table('{QUEUE}', 'item', unchanged => 'omit')",
    f"select gdq.add_table('{QUEUE}', 'kind')",
]
VIEWS = {
    "sums": "select kind, sum(n) as n, count(*) as c from item group by kind",
    "joined": "select i.id, i.n, k.id as k from item i join kind k on k.id = i.kind",
    "whole_rows": "select id, doc, n from item where n > 0",
    "sizes": "select id, length(doc) as size from item",
}


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    yield from make_shop(db, STATEMENTS)


def followed(shop: Shop, engine: EngineChoice) -> None:
    for name, query in VIEWS.items():
        shop.view(name, query, engine=engine)
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, VIEWS)
        for change in (
            "update item set n = n + 1 where id < 9",
            f"update item set doc = {LARGE.format('b')} where id in (3, 4)",
            f"insert into item values (40, 1, 1, {LARGE.format('c')}); update item set n = 2 where id = 40",
            "update item set id = 100 - id where id < 3; update item set n = n + 1",
            "delete from item where kind = 2; update item set kind = 2 where id = 6",
        ):
            for statement in change.split("; "):
                shop.execute(statement)
            results = shop.check(refresher, VIEWS)
            assert {result.action for result in results.values()} <= {"delta", "none"}


def test_followed_by_postgres(shop: Shop) -> None:
    """Views that read no such column, and views of rows of the table alone, by its key."""
    followed(shop, "postgres")


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.usefixtures("spark", "closed_sockets")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_followed_by_spark(shop: Shop) -> None:
    followed(shop, "spark")


@pytest.mark.parametrize("engine", ["auto", "postgres", "spark"])
@pytest.mark.parametrize(
    "query",
    ["select n, doc from item", "select max(doc) as doc from item", "select i.id, doc, name from item i, kind k"],
)
def test_refused(shop: Shop, engine: EngineChoice, query: str) -> None:
    with pytest.raises(PlanError, match=r'the log of "public"."item" does not hold column "doc"') as refused:
        create_view(shop.connection, "v", QUEUE, query, "public.v", engine=engine)
    assert refused.value.hint is not None
    assert "with unchanged both or once" in refused.value.hint


def test_the_option_waits_for_views(shop: Shop) -> None:
    queues.alter_table_options(shop.connection, QUEUE, "item", unchanged="once")
    create_view(shop.connection, "sums", QUEUE, VIEWS["sums"], "public.sums", engine="postgres")
    with pytest.raises(psycopg.errors.ObjectInUse, match=r'table public\.item is read by the view "sums"'):
        queues.alter_table_options(shop.connection, QUEUE, "item", unchanged="omit")
    assert queues.alter_table_options(shop.connection, QUEUE, "item", unchanged="both")


def test_a_view_that_is_made_while_older_rows_omit_values(shop: Shop) -> None:
    """They are in the log that the view's first changes are read from: the column counts as missing until they go."""
    shop.execute("select gdq.register_consumer(%s, 'slow')", QUEUE)
    shop.execute("update item set n = 0")
    queues.alter_table_options(shop.connection, QUEUE, "item", unchanged="once")
    query = "select max(doc) as doc from item"
    with pytest.raises(PlanError, match="does not hold column"):
        create_view(shop.connection, "v", QUEUE, query, "public.v", engine="postgres")
    shop.execute("select gdq.unregister_consumer(%s, 'slow')", QUEUE)
    shop.execute("select gdq.force_tick(%s)", QUEUE)
    shop.keep_house()
    create_view(shop.connection, "v", QUEUE, query, "public.v", engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, {"v": query})
        shop.execute("update item set n = 1")
        shop.check(refresher, {"v": query})
