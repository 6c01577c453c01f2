"""`python -m bench.mirror_spark SETTINGS`: a session of Spark that loads a table by JDBC and merges changes into it.

Says when it is ready, then reads a line of JSON for each order and answers with one: {"seconds", "cpu"} or what was
asked for. SETTINGS is JSON: jdbc (the address), table, churn, rows, partitions, folder, jars.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from bench import processes
from gdq.embedded.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SESSION = {
    "spark.master": "local[2]",
    "spark.driver.memory": "4g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # two processors: each of the default's 200 tasks would cost more than it brings
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.lake.type": "hadoop",
}
_FETCH_ROWS = 10_000
_MERGE = """
merge into {target} t using changes c on t.id = c.id
 when matched and c.op = 'D' then delete
 when matched then update set {updates}
 when not matched and c.op <> 'D' then insert ({columns}) values ({values})"""


class Work:
    """What is ordered of the session."""

    def __init__(self, spark: SparkSession, settings: dict[str, Any]) -> None:
        self._spark = spark
        self._settings = settings

    def warm(self, kind: str) -> None:
        """Load and merge a few rows, so that neither classes nor plans are made for the first time."""
        few = self._read(self._settings["table"], 1000).where("id < 2000")
        self._create(few, kind, "warm")
        self._merge(kind, "warm")

    def load(self, kind: str) -> None:
        """The table by JDBC, in partitions by ranges of its key, into a new table of the lake."""
        self._create(self._read(self._settings["table"], self._settings["rows"]), kind, "big")

    def merge(self, kind: str) -> None:
        """The changes, read by JDBC, merged into the table of the lake."""
        self._merge(kind, "big")

    def sums(self, kind: str) -> list[str]:
        """What tells whether the lake table is the source's."""
        row = self._spark.sql(f"select count(*), sum(id), sum(amount) from {self._target(kind, 'big')}").first()
        return [str(value) for value in row or ()]

    def forget(self, kind: str) -> None:
        """Drop the table of the lake."""
        self._spark.sql(f"drop table if exists {self._target(kind, 'big')}")

    def _read(self, table: str, most: int | None = None) -> DataFrame:
        given = {"url": self._settings["jdbc"], "dbtable": table, "fetchsize": str(_FETCH_ROWS)}
        given["driver"] = "org.postgresql.Driver"
        if most is not None:
            bounds = {"partitionColumn": "id", "lowerBound": "1", "upperBound": str(most)}
            given |= bounds | {"numPartitions": str(self._settings["partitions"])}
        return self._spark.read.format("jdbc").options(**given).load()

    def _create(self, rows: DataFrame, kind: str, name: str) -> None:
        target = self._target(kind, name)
        self._spark.sql(f"drop table if exists {target}")
        if kind == "delta":
            rows.write.format("delta").option("path", f"{self._settings['folder']}/delta_{name}").saveAsTable(target)
        else:
            rows.writeTo(target).using("iceberg").create()

    def _merge(self, kind: str, name: str) -> None:
        changes = self._read(self._settings["churn"])
        changes.createOrReplaceTempView("changes")
        columns = [column for column in changes.columns if column != "op"]
        updates = ", ".join(f"t.{column} = c.{column}" for column in columns)
        values = ", ".join(f"c.{column}" for column in columns)
        target = self._target(kind, name)
        self._spark.sql(_MERGE.format(target=target, updates=updates, columns=", ".join(columns), values=values))

    def _target(self, kind: str, name: str) -> str:
        return f"lake.db.{name}" if kind == "iceberg" else f"default.{name}_delta"


def main(text: str) -> None:
    settings = json.loads(text)
    started = time.perf_counter()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("JAVA_HOME", str(java_home()))
    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        f"--driver-memory {_SESSION['spark.driver.memory']} --jars {settings['jars']} pyspark-shell"
    )
    from pyspark.sql import SparkSession  # noqa: PLC0415 (its launch reads the variables)

    builder = SparkSession.builder.appName("bench")
    for name, value in _SESSION.items():
        builder = builder.config(name, value)
    builder = builder.config("spark.sql.catalog.lake.warehouse", f"{settings['folder']}/iceberg")
    builder = builder.config("spark.sql.warehouse.dir", f"{settings['folder']}/warehouse")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.sql("select 1").collect()
    work = Work(spark, settings)
    _say({"seconds": time.perf_counter() - started})
    for line in sys.stdin:
        order = json.loads(line)
        cpu, started = processes.seconds_below(os.getpid()), time.perf_counter()
        result = getattr(work, order["do"])(order["kind"])
        seconds = time.perf_counter() - started
        _say({"seconds": seconds, "cpu": processes.seconds_below(os.getpid()) - cpu, "result": result})
    spark.stop()


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
