"""The data source gdq: signed changes and base rows, typed, under one snapshot."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from gdq.conninfo import conninfo_without_password
from gdq.consumers.spark.source import register
from gdq.consumers.views.snapshot_holder import hold_snapshot
from tests.support.spark import QUEUE, SPARK_MARKS, Shop

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = SPARK_MARKS


def read(spark: SparkSession, dsn: str, table: str, **options: str) -> DataFrame:
    register(spark)
    named = {name.removesuffix("_"): value for name, value in options.items()}
    return spark.read.format("gdq").options(dsn=dsn, queue=QUEUE, table=table, **named).load()


def snapshot(shop: Shop) -> str:
    ((now,),) = shop.execute("select pg_current_snapshot()::text")
    return str(now)


def test_spark_finds_the_source_by_itself(shop: Shop, spark: SparkSession) -> None:
    """In a session in which nothing is registered. What Spark imports for that loads nothing more of gdq."""
    fresh = spark.newSession()
    with conninfo_without_password(shop.db.dsn) as dsn:
        shop.capture("orders")
        rows = fresh.read.format("gdq").options(dsn=dsn, queue=QUEUE, table="orders").load()
        assert rows.count() == 400
    loaded = "import sys, pyspark_gdq; print([name for name in sys.modules if name.partition('.')[0] == 'gdq'])"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, check=True, text=True).stdout == "[]\n"


def test_changes_in_signed_long_form(shop: Shop, spark: SparkSession) -> None:
    shop.capture("orders")
    before = snapshot(shop)
    shop.execute("insert into orders (id, status, amount, ratio) values (1001, 'new', 1.50, 'NaN')")
    shop.execute("update orders set amount = amount + 1 where id = 1001")
    shop.execute("delete from orders where id = 1001")
    with conninfo_without_password(shop.db.dsn) as dsn:
        assert "secret" not in dsn
        after = snapshot(shop)
        rows = read(spark, dsn, "orders", from_=before, to=after).orderBy("ev_id", "_change_type").collect()
        few = read(spark, dsn, "orders", from_=before, to=after, images="new", columns="amount").orderBy("ev_id")
        assert few.columns[4:] == ["id", "amount"]
        assert [(row["_change_type"], row["id"], str(row["amount"])) for row in few.collect()] == [
            ("insert", 1001, "1.50"),
            ("update_postimage", 1001, "2.50"),
            ("delete", 1001, "None"),
        ]
    found = [(row["_change_type"], str(row["amount"])) for row in rows]
    assert found == [
        ("insert", "1.50"),
        ("update_postimage", "2.50"),
        ("update_preimage", "1.50"),
        ("delete", "2.50"),
    ]
    assert len({row["_commit_version"] for row in rows}) == 3
    assert rows[0].asDict()["_commit_timestamp"] is not None


def test_changes_name_the_columns_that_they_lack(shop: Shop, spark: SparkSession) -> None:
    shop.execute("update orders set note = (select string_agg(md5(i::text), '') from generate_series(1, 400) i)")
    shop.capture("orders", unchanged="omit")
    before = snapshot(shop)
    shop.execute("update orders set n = 1 where id = 7")
    shop.execute("update orders set note = '' where id = 7")
    with conninfo_without_password(shop.db.dsn) as dsn:
        after = snapshot(shop)
        rows = read(spark, dsn, "orders", from_=before, to=after).orderBy("ev_id", "_change_type").collect()
        assert [row["_unchanged"] for row in rows] == [["note"], ["note"], None, None]
        assert [row["note"] is None for row in rows] == [True, True, False, False]
        blind = spark.read.format("gdq").schema("id int, note string")
        options = {"dsn": dsn, "queue": QUEUE, "table": "orders", "from": before, "to": after}
        with pytest.raises(Exception, match="an update, does not log note, which it left as it was"):
            blind.options(**options).load().collect()
        some = spark.read.format("gdq").schema("id int, n int").options(**options).load().collect()
        assert [row["n"] for row in some].count(1) == 3


@pytest.mark.long
def test_base_rows_of_an_inheritance_parent_are_its_own(shop: Shop, spark: SparkSession) -> None:
    """As its changes are: those of a child are the child's."""
    shop.execute("create table child () inherits (orders); insert into child (id) values (1001), (1002)")
    shop.capture("child")
    shop.capture("orders")
    with conninfo_without_password(shop.db.dsn) as dsn, hold_snapshot(shop.db.dsn, QUEUE, ["public.orders"]) as holder:
        assert read(spark, dsn, "orders", snapshot=holder.exported, partition_bytes="8192").count() == 400
        assert read(spark, dsn, "orders").count() == 400
        assert read(spark, dsn, "child").count() == 2


@pytest.mark.parametrize("mode", ["full", pytest.param("pk", marks=pytest.mark.long)])
def test_log_in_segments_and_block_ranges(shop: Shop, spark: SparkSession, mode: str) -> None:
    include = ["note"] if mode == "pk" else None
    shop.capture("orders", mode=mode, include=include)
    shop.execute(f"select gdq.register_consumer('{QUEUE}', 'keeps the rows')")
    before = snapshot(shop)
    for _ in range(2):
        shop.execute("update orders set note = repeat('y', 60), id = id + 1000")
        shop.keep_house()
    with conninfo_without_password(shop.db.dsn) as dsn:
        after = snapshot(shop)
        whole = read(spark, dsn, "orders", from_=before, to=after)
        parts = read(spark, dsn, "orders", from_=before, to=after, partition_bytes="65536")
        assert whole.rdd.getNumPartitions() == 1
        assert parts.rdd.getNumPartitions() > 2
        assert sorted(map(str, parts.collect())) == sorted(map(str, whole.collect()))
        assert whole.count() == 1600


def test_partitions_share_one_snapshot(shop: Shop, spark: SparkSession) -> None:
    shop.capture("orders")
    shop.execute("update orders set note = repeat('x', 200)")
    with conninfo_without_password(shop.db.dsn) as dsn, hold_snapshot(shop.db.dsn, QUEUE, ["public.orders"]) as holder:
        shop.execute("update orders set n = 77; insert into orders (id) values (-1)")
        data = read(spark, dsn, "orders", snapshot=holder.exported, partition_bytes="16384")
        assert data.rdd.getNumPartitions() > 3
        rows = data.select("id", "n").collect()
    assert len(rows) == 400
    assert not any(row["n"] == 77 for row in rows)


@pytest.mark.long
def test_partitioned_table_by_blocks_and_keys(shop: Shop, spark: SparkSession) -> None:
    shop.execute("create table parts (id int, region text, primary key (id, region)) partition by list (region)")
    shop.execute("create table parts_a partition of parts for values in ('a')")
    shop.execute("create table parts_b (region text not null, id int not null)")
    shop.execute("alter table parts attach partition parts_b for values in ('b')")
    shop.execute("insert into parts select i, case when i < 3000 then 'a' else 'b' end from generate_series(1, 4000) i")
    shop.capture("parts")
    with conninfo_without_password(shop.db.dsn) as dsn:
        with hold_snapshot(shop.db.dsn, QUEUE, ["public.parts"]) as holder:
            data = read(spark, dsn, "parts", snapshot=holder.exported, partition_bytes="32768")
            assert data.rdd.getNumPartitions() > 1
            assert data.distinct().count() == data.count() == 4000
        keys = json.dumps([["1", "a"], ["3500", "b"], ["3500", "a"]])
        rows = read(spark, dsn, "parts", keys=keys).orderBy("id").collect()
    assert [(row["id"], row["region"]) for row in rows] == [(1, "a"), (3500, "b")]


def test_schema_prunes_and_as_text_reads_the_rest(shop: Shop, spark: SparkSession) -> None:
    shop.execute("alter table orders add span interval default '1 day'")
    shop.capture("orders")
    register(spark)
    with conninfo_without_password(shop.db.dsn) as dsn:
        options: dict[str, Any] = {"dsn": dsn, "queue": QUEUE, "table": "orders"}
        pruned = spark.read.format("gdq").schema("id int, big bigint").options(**options).load()
        assert pruned.orderBy("id").first() == (1, 9007199254740994)
        with pytest.raises(Exception, match='column "span" has type interval'):
            spark.read.format("gdq").options(**options).load()
        first = read(spark, dsn, "orders", as_text="span, amount").orderBy("id").first()
    assert first is not None
    assert (first["span"], first["amount"]) == ("1 day", "1.25")


def test_position_below_the_horizon_is_an_error(shop: Shop, spark: SparkSession) -> None:
    before = snapshot(shop)
    shop.capture("orders")
    for _ in range(3):
        shop.execute("update orders set n = n + 1")
        shop.execute(f"select gdq.force_tick('{QUEUE}')")
        shop.keep_house()
    with conninfo_without_password(shop.db.dsn) as dsn, pytest.raises(Exception, match="no longer all there"):
        read(spark, dsn, "orders", from_=before, to=snapshot(shop)).count()


def test_no_password_in_a_plan(shop: Shop, spark: SparkSession) -> None:
    shop.capture("orders")
    with conninfo_without_password(shop.db.dsn) as dsn:
        data = read(spark, dsn, "orders")
        plan = data._jdf.queryExecution().toString()
    assert "secret" not in plan
