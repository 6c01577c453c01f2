"""The Spark session of a refresh, local or on a cluster, quiet and without a web interface."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

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
