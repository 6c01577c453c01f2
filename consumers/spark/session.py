"""The Spark session of a refresh, local or on a cluster, quiet and without web interface, and SparkRun for engines."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdq.conninfo import conninfo_for_other_machines, conninfo_without_password
from gdq.embedded.java import java_home

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
    # A refresh is a few short jobs: compiling their stages costs more than it saves [measured: half the time].
    "spark.sql.codegen.wholeStage": "false",
    # Spark ignores an extension whose jar is missing.
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    # With TieredStopAtLevel=1 the code cache is 48 MB by default, which a few hundred refreshes fill.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m "
    f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
}


@dataclass(frozen=True, slots=True)
class SparkRun:
    """Spark for engines: the session, and its workers' connection string without a password.

    A refresh that reads at most `driver_bytes` passes its result through this process.
    """

    spark: SparkSession
    worker_dsn: str
    driver_bytes: int


@contextmanager
def start_run(dsn: str, given: str, driver_bytes: int) -> Iterator[SparkRun]:
    """Start Spark unless it runs, register gdq's data sources; the workers' password file is removed after the block.

    `dsn`: resolved connection string of the tables' database; `given`: as the user gave it. Keeps the Ctrl-C handler.
    """
    from gdq.consumers.spark.source import register  # noqa: PLC0415 (half a gigabyte of package)
    from gdq.consumers.spark.stage import register_stage  # noqa: PLC0415

    with conninfo_without_password(dsn) as own:
        handler = signal.getsignal(signal.SIGINT)
        session = spark_session()
        local = str(session.sparkContext.master).startswith("local")
        worker_dsn = own if local else conninfo_for_other_machines(own, given)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)  # Spark has replaced it
        register(session)
        register_stage(session)
        yield SparkRun(session, worker_dsn, driver_bytes)


def spark_session(name: str = "gdq", *, threads: int = 2) -> SparkSession:
    """The running session, or a new one with `threads` local threads.

    spark-submit's own settings (master, memory) win. Sets PYSPARK_PYTHON, SPARK_LOCAL_IP and JAVA_HOME if unset:
    workers would otherwise run any python3 on the path.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if "JAVA_HOME" not in os.environ and "PYSPARK_GATEWAY_PORT" not in os.environ:
        os.environ["JAVA_HOME"] = str(java_home())
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 (half a gigabyte of package)
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if "PYSPARK_GATEWAY_PORT" in os.environ:
        SparkContext._ensure_initialized()  # else SparkConf lacks spark-submit's settings
    conf = SparkConf()
    for key, value in {"spark.master": f"local[{threads}]", "spark.app.name": name, **_SETTINGS}.items():
        conf.setIfMissing(key, value)
    return SparkSession.builder.config(conf=conf).getOrCreate()
