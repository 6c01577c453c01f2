"""Delta and Iceberg tables that Spark fills by MERGE: exactly the rows of their query, whatever is killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gdq.consumers.lake.open import open_lake
from gdq.consumers.lake.types import differing_lake_rows, lake_columns, read_lake_rows
from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import GdqError
from gdq.owner_sql import OwnerSql
from gdq.plan.spark.keys import SparkKeyPlan
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings, describe_query
from gdq.view.view import create_view, explain_view, view_info
from tests.support.lake_spark import Job, jars, spark_job
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

SCHEMA = (
    """create table sale (id int primary key, grp text, k int, amount numeric(10,2), price numeric, ratio float8,
                          at timestamptz, local timestamp, day date, flag bool, raw bytea, small smallint, big bigint,
                          what text[])""",
    "create table mark (k int, label text, qty int)",
    "create table ware (k int primary key, name text, extra text)",
    """insert into sale
       select i, nullif('g' || i % 4, 'g0'), nullif(i % 6, 0), i / 3.0, i / 4.0,
              (array['NaN', '-0', '0', 'Infinity', '0.1', null])[1 + i % 6]::float8,
              '1969-12-31 23:59:59.999999+00'::timestamptz + i * interval '1 day',
              '0001-01-01'::timestamp + i * interval '1 h', '1582-10-01'::date + i, i % 3 = 0,
              decode(lpad(to_hex(i), 4, '0'), 'hex'), i, 9007199254740993 + i, array[i, null]
         from generate_series(1, 60) i""",
    "insert into mark select nullif(i % 5, 0), nullif('l' || i % 3, 'l2'), i % 2 from generate_series(1, 40) i",
    "insert into ware select i, 'n' || i, 'x' from generate_series(0, 5) i",
    "select gdq.add_table('q', 'sale')",
    "select gdq.add_table('q', 'mark')",
    "select gdq.add_table('q', 'ware', mode => 'pk')",
)
CHANGES = """insert into mark select k, label, qty from mark limit 5;
       delete from mark where ctid in (select ctid from mark where label is null limit 4);
       update sale set ratio = -ratio, grp = nullif(grp, 'g1'), k = 1 where id % 7 = 0; delete from sale where id = 11;
       update ware set name = 'm' || k, extra = 'y' where k > 3; delete from ware where k = 0;
       update mark set qty = null where label = 'l1'; insert into sale (id) values (100), (101);
       update sale set amount = -amount, at = null, raw = null, price = price * 1.00 where id < 9"""
NOTHING = """insert into mark values (1, 'z', 9); delete from mark where label = 'z';
             insert into sale (id, grp) values (999, 'z'); delete from sale where id = 999"""
# By sign, a bag, by keys that may be NULL, by the keys of the log, rows of a join, groups of one, DISTINCT, and rows
# that are computed by key though the view does not show the key.
VIEWS = {
    "typed": "select * from sale",
    "bag": "select label, qty from mark",
    "groups": "select grp, flag, count(*) as n, sum(amount) as total, sum(ratio) as float from sale group by grp, flag",
    "keyed": "select k, name, extra from ware",
    "joined": "select m.label, s.grp, s.at, s.ratio from sale s join mark m on m.k = s.k",
    "grouped_join": """select s.grp, max(s.day) as last, count(*) as n, sum(s.price) as price, avg(s.big) as big
                         from sale s left join mark m on m.k = s.k and m.qty > 0 group by s.grp""",
    "by_number": "select price, ratio, count(*) as n, bool_or(flag) as some from sale group by price, ratio",
    "different": "select distinct grp, k, flag from sale",
    "ranked": "select label, qty, row_number() over (partition by k order by label, qty) as n from mark",
    "computed": "select s.id, m.label from sale s join mark m on m.k = s.k where s.small > m.qty * 20",
}
REASONS = {"first load", None}
BAG = VIEWS["bag"]


@dataclass(frozen=True, slots=True)
class SparkLakes:
    """The source, and a folder for the targets of one kind."""

    shop: Shop
    folder: Path
    kind: str

    def view(self, name: str, query: str) -> None:
        place = f"{self.folder}/w/ns.{name}" if self.kind == "iceberg" else f"{self.folder}/{name}"
        create_view(self.shop.connection, name, QUEUE, query, f"{self.kind}:{place}", engine="spark")

    def differences(self, name: str) -> tuple[int, int]:
        """Rows that the table lacks, and rows that it has too many, as another reader than Spark finds them."""
        (info,) = view_info(self.shop.connection, name)
        assert info.lake is not None
        with self.shop.connection.transaction():
            columns = lake_columns(describe_query(self.shop.connection, info.definition, info.settings), info.lake.kind)
            apply_view_settings(self.shop.connection, READ_SETTINGS | info.settings)
            expected = list(read_lake_rows(OwnerSql(self.shop.connection, None), info.definition, columns))
        found = open_lake(info.lake, f"view {name}", info.source).scan()
        _, lacking, surplus = differing_lake_rows(expected, found, columns)
        return len(lacking), len(surplus)


@pytest.fixture(params=["delta", "iceberg"])
def lakes(db: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SparkLakes]:
    for shop in make_shop(db, SCHEMA):
        yield SparkLakes(shop, tmp_path, request.param)


@pytest.fixture
def job(lakes: SparkLakes) -> Iterator[Job]:
    with spark_job(lakes.shop.db.dsn, jars(lakes.kind)) as started:
        yield started


@pytest.mark.long
def test_equal_to_the_query(lakes: SparkLakes, job: Job) -> None:
    for name, query in VIEWS.items():
        lakes.view(name, query)
    actions: dict[str, list[str]] = {name: [] for name in VIEWS}
    for changes in ("", CHANGES, NOTHING):
        lakes.shop.execute(changes)
        for name in VIEWS:
            told = job.refresh(name)
            assert told["reason"] in REASONS, name
            actions[name].append(told["action"])
            assert changes != NOTHING or told["rows"] == 0
            assert lakes.differences(name) == (0, 0), (name, changes)
    assert {name: told[:2] for name, told in actions.items()} == {name: ["full", "delta"] for name in VIEWS}
    # the log of one table is as it was, changes of the others come to nothing
    assert {name for name, told in actions.items() if told[2] == "none"} == {"keyed"}


@pytest.mark.long
def test_killed(lakes: SparkLakes) -> None:
    """The driver as its commit is on the way, and before it has said that it is done; then tasks' own processes."""
    paths, dsn = jars(lakes.kind), lakes.shop.db.dsn
    lakes.view("bag", BAG)
    with spark_job(dsn, paths) as job:
        job.refresh("bag")
        lakes.shop.execute(CHANGES)
        known = set(lakes.folder.rglob("*.parquet"))
        job.send("bag")
        job.kill_when(lambda: bool(set(lakes.folder.rglob("*.parquet")) - known))
    with spark_job(dsn, paths) as job:
        assert job.refresh("bag")["action"] in ("delta", "none")
        assert lakes.differences("bag") == (0, 0)
        lakes.shop.execute("insert into mark values (1, 'l0', 1), (1, 'l0', 1); delete from mark where qty is null")
        job.send("bag", die="committed")
        job.process.wait(300)
        assert lakes.differences("bag") == (0, 0)
    with spark_job(dsn, paths, "local[2,4]") as job:
        assert job.refresh("bag")["action"] == "none"
        lakes.shop.execute("insert into mark values (1, 'l0', 1), (1, 'l0', 1); delete from mark where label = 'l1'")
        job.send("bag")
        assert job.kill_workers(2) == 2
        told = job.answer()
        if told["action"] == "failed":  # one that plans is not tried again, as one that runs a task is
            assert "\n" not in told["error"]
            told = job.refresh("bag")
        assert told["action"] == "delta"
        assert lakes.differences("bag") == (0, 0)


@pytest.mark.long
def test_without_jars(shop: Shop, spark: object, tmp_path: Path) -> None:
    shop.capture("orders")
    create_view(shop.connection, "v", QUEUE, "select id, n from orders", f"delta:{tmp_path}/v", engine="spark")
    with Refresher(shop.db.dsn) as refresher, pytest.raises(GdqError, match="Spark has no jar of Delta Lake"):
        refresher.refresh("v")


def test_parquet_is_refused_when_made(shop: Shop) -> None:
    """Spark cannot merge into it."""
    shop.capture("orders")
    with pytest.raises(GdqError, match="Delta and Iceberg"):
        create_view(shop.connection, "v", QUEUE, "select id from orders", "parquet:/nowhere", engine="spark")


def test_what_postgresql_would_finish_is_computed_by_key(shop: Shop) -> None:
    shop.capture("orders")
    for query in (
        "select distinct status from orders",
        "select o.id from orders o join orders p on p.n = o.n where o.amount > p.amount",
        "select o.status, count(*) from orders o join orders p on p.n = o.n group by o.status",
        "select count(*) from orders",
    ):
        plan = explain_view(shop.connection, QUEUE, query, engine="spark", elsewhere=True, lake=True)
        assert isinstance(plan, SparkKeyPlan)
        assert plan.refused.endswith("[spark-lake]")
