"""The tables that Spark's AUTO CDC makes of gdq's changes are those of `gdq mirror`: type 1, and type 2 with history.

The target is the in-memory catalog of Spark's own tests, so that a single run makes the tables and writes them out.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from gdq.consumers.mirror.mirror import Mirror
from gdq.consumers.mirror.state import History
from gdq.embedded.java import java_home
from tests.support.lake_spark import jar
from tests.support.page import ROOT, blocks
from tests.support.server import Database
from tests.support.waiting import SECONDS

# The Python of an environment with gdq[spark] and pyspark[pipelines] of Spark 4.3.
PYTHON = os.environ.get("GDQ_TEST_PIPELINES", "")
PAGE = "docs/pipelines.md"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="GDQ_TEST_PIPELINES names no Python"),
    pytest.mark.skipif(not (ROOT / PAGE).exists(), reason="an sdist has no documentation"),
]

# Spark 4.3 has not published the jar of its tests; that of 4.2 works with it, too.
_CATALOG_JAR = "org.apache.spark:spark-catalyst_2.13:4.2.0:jar:tests"
_CATALOG = "org.apache.spark.sql.connector.catalog.SharedTablesInMemoryRowLevelOperationTableCatalog"
_SPEC = "name: flows\nstorage: file://{}/storage\nlibraries:\n  - glob:\n      include: flows/**\n"
_TARGETS = ("customer_now", "customer_history")
_OUT = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()


@dp.materialized_view(name="out_customer_now", format="parquet")
def out_now():
    return spark.read.table("memory.db.customer_now")


@dp.materialized_view(name="out_customer_history", format="parquet")
def out_history():
    return spark.read.table("memory.db.customer_history")
"""

_COLUMNS = ("id", "name", "amount", "day")
_SETUP = (
    "create table customer (id int primary key, name text, amount numeric(10, 2), day date)",
    "select gdq.create_queue('shop')",
    "select gdq.add_table('shop', 'customer')",
    "select gdq.register_consumer('shop', 'customer_pipeline', tables => '{customer}')",
    "select gdq.register_consumer('shop', 'history_pipeline', tables => '{customer}')",
)

# {0} and {1}: small numbers.
_CHANGES = (
    "insert into customer values ({0}, 'a{1}', {1}, null) on conflict (id) do update set name = 'again'",
    """insert into customer select i, null, i, date '2024-02-29' from generate_series({0}, {0} + 3) i
       on conflict do nothing""",
    "update customer set amount = {1}, day = date '2024-01-01' + {1} where id % 4 = {0} % 4",
    "update customer set name = name where id % 3 = {0} % 3",
    "update customer set id = id + 40 where id = {0} and not exists (select from customer where id = {0} + 40)",
    """update customer set id = id - 40
        where id > 40 and not exists (select from customer c where c.id = customer.id - 40)""",
    "delete from customer where id % 5 = {0} % 5",
    # rows that go and come again, as they were or not
    """with gone as (delete from customer where id % 3 = {0} % 3 returning *)
       insert into customer select id + 100, name, amount, day from gone;
       update customer set id = id - 100 where id >= 100""",
    """create temporary table kept on commit drop as select * from customer where id % 2 = 0;
       delete from customer where id % 2 = 0;
       insert into customer select id, name, {1}, day from kept; drop table kept""",
    # two rows that change their keys with each other
    """update customer set id = 1000 where id = {0}; update customer set id = {0} where id = {0} + 1;
       update customer set id = {0} + 1 where id = 1000""",
)

_Version = tuple[tuple[Any, ...], int, int | None]


def test_the_tables_of_auto_cdc_are_those_of_a_mirror(db: Database, tmp_path: Path) -> None:
    """Keys that change and change places, deletes and inserts in one transaction, updates that change nothing."""
    with db.connect() as connection:
        for statement in _SETUP:
            connection.execute(statement.encode())
        _mirror_all(db, tmp_path)
        _random_transactions(connection)
    _mirror_all(db, tmp_path)
    _run_flows(db, tmp_path)

    mirrored = sorted(_rows(tmp_path / "mirror_now/public.customer/current"))
    assert sorted(_rows(tmp_path / "warehouse/out_customer_now")) == mirrored
    assert len(mirrored) > 5

    feed = pq.read_table(tmp_path / "mirror_feed/public.customer/current").select(["ev_id", "_commit_version"])
    ticks = {row["ev_id"]: row["_commit_version"] for row in feed.to_pylist()}
    versions = sorted(_versions(tmp_path / "mirror_scd2/public.customer/current"), key=_place)
    found = [
        (row, ticks[start], None if end is None else ticks[end])
        for row, start, end in _versions(tmp_path / "warehouse/out_customer_history")
    ]
    assert _at_ticks(found) == versions
    assert len([row for row, _, end in versions if end is not None]) > 50


def _random_transactions(connection: psycopg.Connection[Any]) -> None:
    """Transactions of one to three changes, each of which has a tick of its own or shares one with others."""
    choice = random.Random(20)
    for _ in range(60):
        some = choice.choices(_CHANGES, k=choice.randint(1, 3))
        with connection.transaction():
            for change in some:
                numbers = str(choice.randrange(1, 20)), str(choice.randrange(1, 9))
                connection.execute(change.replace("{0}", numbers[0]).replace("{1}", numbers[1]).encode())
        if choice.random() < 0.6:
            connection.execute("select gdq.force_tick('shop')")


def _mirror_all(source: Database, folder: Path) -> None:
    forms: dict[str, History | None] = {"mirror_now": None, "mirror_feed": "feed", "mirror_scd2": "scd2"}
    for name, history in forms.items():
        target = f"parquet:{folder / name}"
        with Mirror(source.dsn, "shop", name, target, ["public.customer"], history=history) as mirror:
            list(mirror.run())


def _run_flows(source: Database, folder: Path) -> None:
    """Run the page's flows, in a few batches, into a catalog in memory, and write their tables as Parquet files."""
    (folder / "flows").mkdir()
    (folder / "flows.yml").write_text(_SPEC.format(folder))
    (folder / "flows/out.py").write_text(_OUT)
    flows = [block for block in blocks(PAGE) if (block.file or "").startswith("flows/")]
    assert len(flows) == len(_TARGETS)
    for block in flows:
        text = block.text.replace('"images": "net"', '"images": "net", "max_events": "100"')
        for target in _TARGETS:
            text = text.replace(f'"{target}"', f'"memory.db.{target}"')
        (folder / str(block.file)).write_text(text)
    options = [
        f"--jars {jar(_CATALOG_JAR)}",
        f"--conf spark.sql.catalog.memory={_CATALOG}",
        f"--conf spark.sql.warehouse.dir={folder}/warehouse",
        "--conf spark.sql.shuffle.partitions=2",
        "--conf spark.ui.enabled=false",
    ]
    programs = str(Path(PYTHON).parent)
    own = {"PATH": os.pathsep.join([programs, os.environ["PATH"]]), "DATABASE_URL": source.dsn}
    own |= {"JAVA_HOME": str(java_home()), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": PYTHON}
    own |= {"PYSPARK_SUBMIT_ARGS": f"{' '.join(options)} pyspark-shell"}
    env = {name: value for name, value in os.environ.items() if name != "GDQ_DSN"} | own
    command = ["spark-pipelines", "run", "--spec", "flows.yml"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


def _rows(place: Path) -> Iterator[tuple[Any, ...]]:
    for row in pq.read_table(place).to_pylist():
        yield tuple(row[name] for name in _COLUMNS)


def _versions(place: Path) -> Iterator[_Version]:
    for row in pq.read_table(place).to_pylist():
        yield tuple(row[name] for name in _COLUMNS), row["__START_AT"], row["__END_AT"]


def _at_ticks(versions: list[_Version]) -> list[_Version]:
    """Versions of committed transactions as a reader finds them who looks at ticks alone.

    What comes and goes between two ticks is not seen, nor that a row goes and comes again.
    """
    seen: list[_Version] = []
    for row, start, end in sorted((one for one in versions if one[1] != one[2]), key=_place):
        goes_on = bool(seen) and seen[-1][0] == row and seen[-1][2] == start
        seen.append((row, seen.pop()[1] if goes_on else start, end))
    assert all(one[0][0] != other[0][0] or (one[2] or 0) <= other[1] for one, other in pairwise(seen))
    return seen


def _place(version: _Version) -> tuple[int, int]:
    """A version's key and start, which order versions."""
    return version[0][0], version[1]
