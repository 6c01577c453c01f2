"""Keys of another type than the view's column, that stand for objects of their database, or too long for an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from gdq.conninfo import conninfo_without_password
from gdq.consumers.lake.open import open_lake
from gdq.consumers.refresh.refresher import Refresher
from gdq.view.view import create_view, drop_view, view_info
from tests.support.lake import as_in_lake
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

TABLES = [
    "create table a (id int primary key, day date, code char(3), price numeric(9,2), weight real)",
    "create table b (id int primary key, a_id bigint, ts timestamp, code char(6), price numeric, weight float8)",
    "create table named (id int primary key, rel regclass, x int)",
]

# Columns of the view, and what they are compared with.
JOINS = {
    "by_day": "a.day = b.ts",
    "by_id": "b.a_id = a.id",
    "by_code": "a.code = b.code",
    "by_price": "a.price = b.price",
    "by_weight": "a.weight = b.weight",
}


@dataclass(frozen=True, slots=True)
class Places:
    """The source, and where the targets are: another database, or a folder of lake tables."""

    shop: Shop
    dsn: str | None
    folder: Path

    def view(self, name: str, query: str) -> None:
        target = f"public.{name}" if self.dsn else f"parquet:{self.folder}/{name}"
        create_view(self.shop.connection, name, QUEUE, query, target, engine="postgres", target_dsn=self.dsn)

    def rows(self, name: str) -> list[str]:
        if self.dsn:
            with psycopg.connect(self.dsn) as far:
                return sorted(_shown(row) for row in far.execute(f"select * from {name}"))
        (info,) = view_info(self.shop.connection, name)
        assert info.lake is not None
        found = open_lake(info.lake, f"view {name}", info.source).scan()
        return sorted(_shown(row.values()) for batch in found for row in batch.to_pylist())

    def expected(self, query: str) -> list[str]:
        return sorted(_shown(row) for row in self.shop.execute(query))


def _shown(row: Iterable[object]) -> str:
    """Alike from a lake, which reads a real as a double."""
    return str([round(value, 6) if isinstance(value, float) else as_in_lake(value) for value in row])


@pytest.fixture(scope="module")
def module_shop(module_db: Database) -> Iterator[Shop]:
    for shop in make_shop(module_db, TABLES):
        for table in ("a", "b", "named"):
            shop.capture(table)
        yield shop


@pytest.fixture(params=["postgres", "parquet"])
def places(
    module_shop: Shop, module_empty_db: Database, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Places]:
    module_shop.execute("truncate a, b, named")
    with conninfo_without_password(module_empty_db.dsn) as dsn:
        yield Places(module_shop, dsn if request.param == "postgres" else None, tmp_path)
    for info in view_info(module_shop.connection):
        drop_view(module_shop.connection, info.view_name)


@pytest.mark.long
def test_keys_of_a_wider_type(places: Places) -> None:
    """Values that only lose something on the way to the column's type replace no rows, and fail nothing."""
    shop = places.shop
    queries = {
        name: f"select a.id, a.day, a.code, a.price, a.weight, b.id as b from a left join b on {condition}"
        for name, condition in JOINS.items()
    }
    shop.execute("insert into a values (1, '2024-01-01', 'abc', 1.01, 0.1), (2, '2024-01-02', 'abd', 2, 0.5)")
    for name, query in queries.items():
        places.view(name, query)
    with Refresher(shop.db.dsn) as refresher:
        for change in (
            "select 1",
            "insert into b values (1, 3000000000, '2024-01-01 12:00', 'abcdef', 1.005, 0.1)",
            "insert into b values (2, 2, '2024-01-02', 'abd', 2.000, 0.5)",
            "update b set a_id = null, ts = '2024-01-02 00:00:01', code = 'abde', price = 2.001, weight = 0.3",
        ):
            shop.execute(change)
            for name, query in queries.items():
                result = refresher.refresh(name)
                assert places.rows(name) == places.expected(query), (name, change)
                assert result.action == ("full" if change == "select 1" else "delta"), (name, result)


@pytest.mark.parametrize("places", ["postgres"], indirect=True)
def test_key_that_another_name_stands_for(places: Places) -> None:
    """A table is renamed: the target has its rows under the old name."""
    shop, query = places.shop, "select 'public.' || rel as rel, max(x) as x from named group by named.rel"
    places.view("tables", "select rel, max(x) as x from named group by rel")
    shop.execute("create table here (); insert into named values (1, 'here', 1), (2, 'a', 1)")
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("tables")
        shop.execute("alter table here rename to there; insert into named values (3, 'there', 2)")
        refresher.refresh("tables")
        assert places.rows("tables") == places.expected(query) == ["['public.a', 1]", "['public.there', 2]"]


def test_values_too_long_for_an_index(module_db: Database, module_shop: Shop) -> None:
    """The changed rows of a table that a correlated subquery looks at are looked through without one then."""
    shop = module_shop
    shop.execute("create table x (id int primary key, body text); create table z (id int primary key, body text)")
    for table in ("x", "z"):
        shop.capture(table)
    query = "select x.id from x where not exists (select from z where z.body = x.body)"
    shop.view("bodies", query, engine="postgres")
    body = "(select string_agg(md5(random()::text), '') from generate_series(1, 300) where g > 0)"
    shop.execute(f"insert into x select g, case when g < 3 then {body} else g::text end from generate_series(1, 5) g")
    with Refresher(module_db.dsn) as refresher:
        refresher.refresh("bodies")
        shop.execute(
            "insert into z select g, g::text from generate_series(1, 600) g; insert into z select -id, body from x"
        )
        assert refresher.refresh("bodies").action == "delta"
        assert shop.differences("bodies", query) == (0, 0)
    drop_view(shop.connection, "bodies")
