"""The data source `gdq` read by Spark on this machine into nothing, every row and column, in some partitions."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg

from bench.packages import BenchError, Place
from gdq.consumer import Consumer
from gdq.consumers.spark.table_sql import BLOCK_BYTES
from gdq.embedded.java import java_home
from gdq.errors import EmbeddedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK = "Spark"
# Of each way to read.
PARTITIONS = {f"gdq Spark, {number} partition{'' if number == 1 else 's'}": number for number in (1, 2, 4)}
_WAIT_SECONDS = 60.0


def missing() -> dict[str, str]:
    """{SPARK: why} where there is no Spark or no Java for it, else nothing."""
    if importlib.util.find_spec("pyspark") is None:
        return {SPARK: "pyspark missing: pip install 'gdq[spark]'"}
    try:
        java_home()
    except EmbeddedError as error:
        return {SPARK: str(error)}
    return {}


def read(place: Place, queue: str, name: str, table: str, *, partitions: int, go: Callable[[], None]) -> int:
    """Read the consumer's first batch of a table twice, the first time to warm up; the events of the second time.

    A session of `partitions` threads is left running: stop() ends it. The consumer stays where it is.
    """
    from gdq.consumers.spark.session import spark_session  # noqa: PLC0415 (the other readers need none of it)
    from gdq.consumers.spark.source import register  # noqa: PLC0415

    spark = spark_session("bench", threads=partitions)
    register(spark)
    options = batch_options(place.conninfo, queue, name, table, partitions)
    _pull(spark, options)
    go()
    return _pull(spark, options)


def batch_options(conninfo: str, queue: str, name: str, table: str, partitions: int) -> dict[str, str]:
    """Options of the data source: a consumer's first batch of a table whose log is in one segment, in equal parts."""
    with Consumer(conninfo, queue, name) as consumer:
        batch = next(iter(consumer.batches(timeout=_WAIT_SECONDS)), None)
        if batch is None:
            raise BenchError(f"no batch for {name}")
        interval = {"from": batch.snapshot_from, "to": batch.snapshot_to}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        query = "select max(pg_relation_size(s)) from gdq.log_segments(%s, array[%s::regclass]) s"
        row = connection.execute(query, [queue, table]).fetchone()
    blocks = int(row[0]) // BLOCK_BYTES if row else 0
    size = BLOCK_BYTES * -(-blocks // partitions)
    return {"dsn": conninfo, "queue": queue, "table": table, "partition_bytes": str(size), **interval}


def stop() -> None:
    """End the session and its JVM, and wait for that."""
    from pyspark import SparkContext  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if (session := SparkSession.getActiveSession()) is not None:
        session.stop()
    if (gateway := SparkContext._gateway) is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()


def _pull(spark: SparkSession, options: dict[str, str]) -> int:
    """The number of events that came; an update is two rows."""
    from pyspark.sql import Observation, functions  # noqa: PLC0415

    seen = Observation()
    events = functions.count_if(functions.col("_change_type") != "update_preimage").alias("events")
    changes = spark.read.format("gdq").options(**options).load()
    changes.observe(seen, events).write.format("noop").mode("overwrite").save()
    return int(seen.get["events"])
