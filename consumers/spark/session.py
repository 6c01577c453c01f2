"""The Spark session of a refresh, local or on a cluster, quiet and without a web interface; what engines get of it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdq.conninfo import for_other_machines, without_password
from gdq.embedded.server import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOGGING = Path(__file__).resolve().with_name("log4j2.properties")
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    # A refresh is a handful of short jobs: compiling them well costs more than it saves [measured: half the time].
    "spark.sql.codegen.wholeStage": "false",
    # Where its jar is missing, Spark goes on without.
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    # The lowest level of compiling comes with 48 MB for the code, which a few hundred refreshes fill.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m "
    f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
}


@dataclass(frozen=True, slots=True)
class SparkRun:
    """The part of Spark that engines need: the session, and the connection string of its workers without a password.

    A refresh that reads at most `driver_bytes` passes its result through this process.
    """

    spark: SparkSession
    worker_dsn: str
    driver_bytes: int


@contextmanager
def start_run(dsn: str, given: str, driver_bytes: int) -> Iterator[SparkRun]:
    """Start Spark, or find it started, and make gdq's data sources known to it; its password file ends with the block.

    `dsn` leads to the tables' database; the user gave `given` for it. Ctrl-C goes on to whoever handled it before.
    """
    from gdq.consumers.spark.source import register  # noqa: PLC0415 (half a gigabyte of package)
    from gdq.consumers.spark.stage import register_stage  # noqa: PLC0415

    with without_password(dsn) as own:
        handler = signal.getsignal(signal.SIGINT)
        session = spark_session()
        local = str(session.sparkContext.master).startswith("local")
        worker_dsn = own if local else for_other_machines(own, given)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)  # Spark has taken it
        register(session)
        register_stage(session)
        yield SparkRun(session, worker_dsn, driver_bytes)


def spark_session(name: str = "gdq", *, threads: int = 2) -> SparkSession:
    """The running session, or a new one with `threads` local threads.

    spark-submit's own settings (master, memory) win. Sets PYSPARK_PYTHON, SPARK_LOCAL_IP and JAVA_HOME where they are
    not set: workers otherwise run whatever python3 is on the path.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if "JAVA_HOME" not in os.environ and "PYSPARK_GATEWAY_PORT" not in os.environ:
        os.environ["JAVA_HOME"] = str(java_home())
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 (half a gigabyte of package)
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if "PYSPARK_GATEWAY_PORT" in os.environ:
        SparkContext._ensure_initialized()  # or a SparkConf knows nothing of what spark-submit was told
    conf = SparkConf()
    for key, value in {"spark.master": f"local[{threads}]", "spark.app.name": name, **_SETTINGS}.items():
        conf.setIfMissing(key, value)
    return SparkSession.builder.config(conf=conf).getOrCreate()
