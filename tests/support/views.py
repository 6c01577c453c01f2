"""A captured table, and views of it inside PostgreSQL, as fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

VIEWED = "select id, n from orders where n > 4"
GROUPED = {
    "rows": "select id, k, n from item",
    "sums": "select k, count(*) as rows, sum(n) as n from item group by k",
    "tops": "select k, max(n) as top from item group by k",
}


@pytest.fixture
def taken(db: Database) -> Iterator[Shop]:
    """A captured table orders, and the consumer lake."""
    tables = ["create table orders (id int primary key, note text, n int)"]
    for shop in make_shop(db, [*tables, "insert into orders select i, 'n', i from generate_series(1, 400) i"]):
        shop.capture("orders")
        shop.execute(f"select gdq.register_consumer('{QUEUE}', 'lake')")
        yield shop


@pytest.fixture
def viewed(db: Database) -> Iterator[Shop]:
    """A view `v` inside PostgreSQL."""
    orders = "create table orders (id int primary key, status text, n int)"
    rows = "insert into orders select i, 's' || mod(i, 5), mod(i, 10) from generate_series(1, 400) i"
    for shop in make_shop(db, [orders, rows]):
        shop.capture("orders")
        shop.view("v", VIEWED, engine="postgres")
        yield shop


@pytest.fixture
def grouped(db: Database) -> Iterator[Shop]:
    """The views of GROUPED inside PostgreSQL, none in a group yet."""
    statements = [
        "create table item (id int primary key, k int, n bigint)",
        "insert into item select i, i % 5, i from generate_series(1, 100) i",
    ]
    for shop in make_shop(db, statements):
        shop.capture("item")
        for name, query in GROUPED.items():
            shop.view(name, query, engine="postgres")
        yield shop


# Views of orders (fixture `viewed`) and kind of all rules for changes, and changes that reach them.
MANY_VIEWS = {
    "bag": "select status, n from orders where n > 2",
    "sums": "select status, count(*) as rows, sum(n) as n, avg(n) as mean from orders group by status",
    "tops": "select status, max(id) as top, array_agg(id order by id) as ids from orders group by status",
    "outer": "select o.id, k.label from orders o left join kind k on k.status = o.status and k.n = o.n",
    "set": "select status from orders union select label from kind",
    "distinct": "select distinct n::numeric as n from orders",
    "window": "select id, status, row_number() over (partition by status order by id) as nth from orders",
    "exists": "select id from orders o where exists (select from kind k where k.status = o.status)",
    "value": "select id from orders where n > (select min(n) from kind)",
    "least": "select min(n) as low, max(id) as high, count(*) as rows from orders",
    "limited": "select status, sum(n) as n from orders group by status order by 2 desc limit 2",
}
MANY_CHANGES = [
    "insert into public.orders select i, 's' || mod(i, 7), mod(i, 10) from generate_series(500, 520) i",
    "update public.orders set n = n + 1, status = 's1' where mod(id, 20) = 0",
    "delete from public.orders where id > 510 or mod(id, 25) = 0",
    "insert into public.kind values ('s6', 'six', 1), ('s1', 'uno', 5)",
    "delete from public.kind where n = 3",
]


def make_kinds(shop: Shop) -> None:
    """A second table for MANY_VIEWS."""
    shop.execute("create table kind (status text, label text, n int)")
    shop.execute("insert into kind select 's' || i, 'l' || i, i from generate_series(1, 5) i")
    shop.capture("kind")
