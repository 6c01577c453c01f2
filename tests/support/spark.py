"""One Spark session for all tests that need one, and a database with a captured table to make views of."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.view.view import create_view
from tests.support.server import Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUEUE = "q"

# Spark leaves its sockets for the garbage collector to close.
SPARK_MARKS = [
    pytest.mark.spark,
    pytest.mark.usefixtures("spark", "closed_sockets"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

PROJECTION = "select id, status, amount * 2 as double, at, 'x' as label from orders where n <> 3"
SUMS = """select status, count(*), sum(amount) as amount, avg(amount) as mean, sum(n) as n, avg(n) as n_mean,
                 count(note) as notes, sum(big) as big from orders where n < 9 group by status"""
STAGES = [pytest.param(0, id="staged", marks=pytest.mark.long), pytest.param(2**24, id="driver")]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session that every Refresher of this process uses."""
    from pyspark import SparkContext

    from gdq.consumers.spark.session import spark_session

    session = spark_session()
    yield session
    session.stop()
    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()


@pytest.fixture
def closed_sockets() -> Iterator[None]:
    """Collect what Spark has left before another test would be blamed for it."""
    yield
    gc.collect()


@dataclass(frozen=True, slots=True)
class Shop:
    """A database whose table public.orders the queue q captures."""

    db: Database
    connection: psycopg.Connection[Any]

    def execute(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(query, values or None)
        return cursor.fetchall() if cursor.description else []

    def capture(self, table: str, **options: Any) -> None:
        names = "".join(f", {name} => %s" for name in options)
        self.execute(f"select gdq.add_table('{QUEUE}', '{table}'{names})", *options.values())

    def view(self, name: str, query: str, **options: Any) -> None:
        """Make a view; without `engine` it is Spark's."""
        plan = create_view(self.connection, name, QUEUE, query, f"public.{name}", **{"engine": "spark", **options})
        assert plan is not None

    def differences(self, name: str, query: str) -> tuple[int, int]:
        """Rows that the view lacks, and rows that it has too many."""
        (row,) = self.execute(
            f"select (select count(*) from (({query}) except all select * from {name}) a),"
            f" (select count(*) from (select * from {name} except all ({query})) b)"
        )
        return row

    def check(self, refresher: Refresher, views: dict[str, str]) -> dict[str, RefreshResult]:
        """Refresh these views, and find each equal to its query."""
        results = {name: refresher.refresh(name) for name in views}
        wrong = {name: self.differences(name, query) for name, query in views.items()}
        assert wrong == dict.fromkeys(views, (0, 0))
        return results

    def keep_house(self) -> None:
        """Rotate and empty logs until nothing is due."""
        while self.execute("select gdq.maintain()") == [(True,)]:
            pass


def make_shop(db: Database, statements: Sequence[str]) -> Iterator[Shop]:
    with db.connect() as connection:
        shop = Shop(db, connection)
        shop.execute(f"select gdq.create_queue('{QUEUE}', rotation_period => '1 ms', rotation_bytes => 1)")
        for statement in statements:
            shop.execute(statement)
        yield shop


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    """Orders with NULL groups, floats, duplicates and every kind of number."""
    yield from make_shop(
        db,
        [
            """create table orders (id int primary key, status text, amount numeric(12,2), ratio float8, n int,
                                    big bigint, at timestamptz default '2024-01-01 00:00:00+00', note text)""",
            """insert into orders (id, status, amount, ratio, n, big, note)
               select i, nullif('s' || mod(i, 5), 's3'), case when mod(i, 7) > 0 then i * 1.25 end, i * 0.25,
                      mod(i, 10), 9007199254740993 + i, 'n' || mod(i, 3)
                 from generate_series(1, 400) i""",
        ],
    )


def change(shop: Shop, seed: int) -> None:
    """Change keys and groups, make NULLs, duplicates and new rows, take rows away."""
    low = 1000 * seed
    shop.execute(f"update orders set id = id + {low + 5000}, amount = amount + 1 where mod(id, 40) = {seed}")
    shop.execute(f"update orders set status = null, note = 'n1' where mod(id, 23) = {seed}")
    shop.execute(f"update orders set status = 's9', n = n where mod(id, 31) = {seed}")
    shop.execute(f"delete from orders where mod(id, 29) = {seed} or (status = 's1' and {seed} = 2)")
    shop.execute(
        "insert into orders (id, status, amount, ratio, n, big)"
        f" select {low + 600} + i, 's1', 'NaN', 0.5, 2, i from generate_series(1, 9) i"
    )
    shop.execute(f"delete from orders where amount = 'NaN' and mod(id, 2) = {seed % 2}")


def staging_and_position(shop: Shop) -> list[str]:
    query = "select relname from pg_class where relnamespace = 'gdq_target'::regnamespace and relkind = 'r'"
    return [name for (name,) in shop.execute(query)]
