"""Refreshes and reads by spark-submit on a standalone cluster: a master and workers, each a process of its own.

Each takes most of a minute, so they run only where GDQ_TEST_CLUSTER is set, as `make test-all` does.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyarrow.parquet as pq
import pyspark
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.embedded.java import java_home
from tests.mirror.conftest import Lake
from tests.published import build_wheel
from tests.support.lake_spark import jars
from tests.support.page import ROOT
from tests.support.spark import Shop
from tests.support.waiting import SECONDS, until

HOME = Path(pyspark.__file__).parent

# A machine that stands still for some minutes, as one that is shared may, would otherwise lose all its executors at
# once: they and the workers are given up when no heartbeat has come for one or two minutes.
PATIENCE = {"spark.network.timeout": f"{SECONDS}s", "spark.worker.timeout": f"{SECONDS}"}

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif("GDQ_TEST_CLUSTER" not in os.environ, reason="set GDQ_TEST_CLUSTER=1 for a cluster of Spark"),
]

QUERY = "select id, status, note || repeat('-', 100) as note, amount * 2 as double from orders"

# Parts of 512 kB instead of 64 MB, and nothing may pass through the driver. What Spark shows of the job is kept.
JOB = """
import json, sys, urllib.request
from gdq.consumers.spark import jobs
from gdq.consumers.refresh.__main__ import main
from gdq.consumers.refresh.refresher import Refresher

assert jobs.PARTITION_BYTES > 2**19
jobs.PARTITION_BYTES = 2**19
with Refresher(driver_bytes=0) as refresher:
    results = [refresher.refresh("copy")]
    refresher.control.execute("update public.orders set amount = amount + 1, note = note || 'x' where id % 3 = 0")
    results.append(refresher.refresh("copy"))
    refresher.control.execute("delete from public.orders where id % 100 = 0")
    try:
        main(["copy"])  # as spark-submit of consumers/refresh/__main__.py; little enough to pass through the driver
    except SystemExit as end:
        assert not end.code, end.code
    context = refresher.spark_run.spark.sparkContext
    base = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}"
    pages = ["environment", "jobs", "stages?details=true", "executors", "sql?details=true&length=999"]
    shown = {page: urllib.request.urlopen(f"{base}/{page}").read().decode() for page in pages}
    asked = refresher.spark_run.worker_dsn
json.dump({"actions": [r.action for r in results], "shown": shown, "asked": asked}, open(sys.argv[1], "w"))
"""


# Two tables at one snapshot each, in parts of 256 kB; then what changed after it, by parts of the log.
COPY_JOB = """
import json, os, sys
from contextlib import ExitStack
import gdq, psycopg
from pyspark.sql import SparkSession

spark, dsn, folder = SparkSession.builder.getOrCreate(), os.environ["GDQ_DSN"], sys.argv[1]
tables, starts, parts = ("orders", "lines"), {}, []
for name in tables:
    with gdq.copy_table(dsn, f"public.{name}") as copy:
        reader = spark.read.format("gdq").options(queue="q", table=copy.table, snapshot=copy.exported)
        rows = reader.option("partition_bytes", str(2**18)).load()
        parts.append(rows.rdd.getNumPartitions())
        rows.write.parquet(f"{folder}/first/{name}")
        starts[name] = copy.snapshot
with psycopg.connect(dsn, autocommit=True) as connection:
    for name in tables:
        connection.execute(f"update {name} set note = repeat('m', 150) || id where id % 2 = 0")
        connection.execute(f"update {name} set id = -id where id % 11 = 0")
        connection.execute(f"delete from {name} where id % 7 = 0")
    (now,) = connection.execute("select pg_current_snapshot()::text").fetchone()
for name, start in starts.items():
    options = {"queue": "q", "table": f"public.{name}", "from": start, "to": now}
    changes = spark.read.format("gdq").options(partition_bytes=str(2**18), **options).load()
    parts.append(changes.rdd.getNumPartitions())
    changes.write.parquet(f"{folder}/changes/{name}")

def place(_):
    import gdq
    return [gdq.__file__.rpartition("/gdq/")[0]]

found = spark.sparkContext.parallelize(range(8), 8).mapPartitions(place).collect()
json.dump({"parts": parts, "gdq": found}, open(f"{folder}/told.json", "w"))
"""


# `gdq mirror --engine spark` as spark-submit runs it: all tables are large, in parts of 512 kB.
MIRROR_JOB = """
import sys
import gdq
from gdq.consumers.mirror import spark_tables
from gdq.consumers.mirror.__main__ import main
from gdq.consumers.spark import jobs

assert gdq.__file__.startswith(sys.argv[1])
assert jobs.PARTITION_BYTES > 2**19 < spark_tables.LARGE_BYTES
jobs.PARTITION_BYTES, spark_tables.LARGE_BYTES = 2**19, -1
main(["q", "public", "--target", sys.argv[2]])
"""


@contextmanager
def process(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process and what it starts, until the block ends; its output in a file."""
    with log.open("wb") as output:
        started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(environment))
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


class Arguments(threading.Thread):
    """Watches the command lines of all processes for a word."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word.encode()
        self.found: set[bytes] = set()
        self.looks = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.2):
            self.looks += 1
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    line = path.read_bytes()
                except OSError:
                    continue
                if self.word in line:
                    self.found.add(line)


@pytest.fixture
def password(shop: Shop) -> str:
    """That of the role `carrier`, which nothing else on this machine knows; it works as the owner."""
    word = secrets.token_hex(12)
    with shop.db.connect("su") as su:
        su.execute("drop role if exists carrier")
        su.execute(sql.SQL("create role carrier login password {} in role gdq_owner").format(sql.Literal(word)))
        su.execute("alter role carrier set role to gdq_owner")
    return word


@pytest.fixture
def environment(shop: Shop, password: str, tmp_path: Path) -> dict[str, str]:
    """What every process of the cluster has: Python, Java, gdq, and the password in a file of libpq's."""
    passfile = tmp_path / "pgpass"
    passfile.touch(mode=0o600)
    passfile.write_text(f"*:*:*:*:{password}\n")
    parameters: dict[str, Any] = dict(conninfo_to_dict(shop.db.dsn)) | {"user": "carrier"}
    del parameters["password"]
    return os.environ | {
        "GDQ_DSN": make_conninfo(**parameters),
        "JAVA_HOME": str(java_home()),
        "PGPASSFILE": str(passfile),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "SPARK_DAEMON_JAVA_OPTS": " ".join(
            ["-XX:TieredStopAtLevel=1", *(f"-D{name}={value}" for name, value in PATIENCE.items())]
        ),
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@contextmanager
def cluster(environment: Mapping[str, str], folder: Path, workers: int) -> Iterator[str]:
    """The address of a cluster of workers with a core each."""
    logs, port = folder / "logs", free_port()
    logs.mkdir()
    url = f"spark://127.0.0.1:{port}"
    daemon = [str(HOME / "bin" / "spark-class")]
    common = ["--host", "127.0.0.1", "--webui-port", "0"]
    with ExitStack() as stack:
        command = [*daemon, "org.apache.spark.deploy.master.Master", *common, "--port", str(port)]
        stack.enter_context(process(command, logs / "master", environment))
        told = [logs / f"worker{number}" for number in range(workers)]
        for number, log in enumerate(told):
            own = ["--cores", "1", "--memory", "600m", "--work-dir", str(folder / f"work{number}"), url]
            command = [*daemon, "org.apache.spark.deploy.worker.Worker", *common, *own]
            stack.enter_context(process(command, log, environment))
        until(lambda: all("Successfully registered" in log.read_text() for log in told), "the workers")
        yield url


def submit(master: str, environment: Mapping[str, str], folder: Path, *job: str, **settings: str) -> None:
    """Run a job on a cluster to its end, with what Spark logs of it in the folder `events`."""
    (folder / "events").mkdir()
    known = PATIENCE | {
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.eventLog.enabled": "true",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.executor.memory": "512m",
        # all executors take part from the first stage on, whenever the last one is there
        "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{SECONDS}s",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    }
    options = [part for name, value in (known | settings).items() for part in ("--conf", f"{name}={value}")]
    command = [str(HOME / "bin" / "spark-submit"), "--master", master, *options, *job]
    with process(command, folder / "logs" / "driver", environment) as submitted:
        code = submitted.wait(SECONDS)
    assert code == 0, (folder / "logs" / "driver").read_text()[-3000:]


def install_wheel(environment: dict[str, str], folder: Path) -> Path:
    """Give the cluster gdq from its wheel alone: neither the tests are there nor this checkout, only its packages."""
    installed = folder / "installed"
    with ZipFile(build_wheel(folder)) as wheel:
        wheel.extractall(installed)
    places = [place for place in sys.path if place and not Path(place).resolve().is_relative_to(ROOT)]
    environment["PYTHONPATH"] = os.pathsep.join([str(installed), *places])
    return installed


def executors_by_stage(folder: Path) -> list[set[str]]:
    """The executors that took part in each stage of the job; one that was lost is followed by one of another number."""
    log = "".join(path.read_text() for path in (folder / "events").rglob("*") if path.is_file())
    ended = [json.loads(line) for line in log.splitlines() if '"SparkListenerTaskEnd"' in line]
    stages: dict[int, set[str]] = {}
    for task in ended:
        stages.setdefault(task["Stage ID"], set()).add(task["Task Info"]["Executor ID"])
    return [*stages.values()]


def test_refresh_on_a_cluster(shop: Shop, environment: dict[str, str], password: str, tmp_path: Path) -> None:
    shop.execute(
        "insert into orders (id, status, amount, note) select i, 's', i, repeat('n', 90)"
        " from generate_series(1001, 15000) i"
    )
    shop.capture("orders")
    shop.view("copy", QUERY, engine="spark")
    job, told = tmp_path / "job.py", tmp_path / "told"
    job.write_text(JOB)
    # the table is twenty times as large as what the driver takes
    settings = {"spark.cores.max": "2", "spark.driver.maxResultSize": "256k"}
    settings |= {"spark.ui.enabled": "true", "spark.ui.port": "0"}
    watch = Arguments(password)
    with cluster(environment, tmp_path, 2) as master:
        watch.start()
        try:
            submit(master, environment, tmp_path, str(job), str(told), **settings)
        finally:
            watch.over.set()
            watch.join()
    report = json.loads(told.read_text())
    assert report["actions"] == ["full", "delta"]
    assert shop.differences("copy", QUERY) == (0, 0)
    assert not {"password", "passfile"} & conninfo_to_dict(report["asked"]).keys()
    # both machines took part in reading the table and in reading its changes
    stages = executors_by_stage(tmp_path)
    assert stages.count({"0", "1"}) >= 2, stages
    # nobody was told the password
    assert watch.looks > 3
    assert not watch.found
    kept = [path for folder in ("logs", "work0", "work1", "events") for path in (tmp_path / folder).rglob("*")]
    texts = {str(path): path.read_bytes() for path in kept if path.is_file() and path.suffix != ".jar"}
    assert any(re.search(r"work\d/.*/std(out|err)$", name) for name in texts)
    texts |= {page: text.encode() for page, text in report["shown"].items()}
    assert b"gdq" in texts["sql?details=true&length=999"]
    assert [name for name, text in texts.items() if password.encode() in text] == []


@pytest.mark.parametrize("executors", [1, 2, 4])
def test_a_copy_and_its_changes_by_executors(
    shop: Shop, environment: dict[str, str], executors: int, tmp_path: Path
) -> None:
    """Tables in chunks at one snapshot, then changes by table and range of blocks, with gdq from its wheel alone."""
    shop.execute("create table lines (id int primary key, note text)")
    shop.execute("insert into lines select i, repeat('l', 200) from generate_series(1, 20000) i")
    shop.execute("insert into orders (id, note) select i, repeat('n', 200) from generate_series(1001, 20000) i")
    shop.capture("orders")
    shop.capture("lines")
    installed = install_wheel(environment, tmp_path)
    job = tmp_path / "job.py"
    job.write_text(COPY_JOB)
    with cluster(environment, tmp_path, executors) as master:
        submit(master, environment, tmp_path, str(job), str(tmp_path), **{"spark.cores.max": str(executors)})
    told = json.loads((tmp_path / "told.json").read_text())
    assert set(told["gdq"]) == {str(installed)}
    assert min(told["parts"]) >= 8, told
    assert [len(some) for some in executors_by_stage(tmp_path)].count(executors) >= 4
    for table in ("orders", "lines"):
        rows = {row["id"]: row["note"] for row in pq.read_table(tmp_path / "first" / table).to_pylist()}
        changes = pq.read_table(tmp_path / "changes" / table).to_pylist()
        numbers = [(row["ev_id"], row["_change_type"]) for row in changes]
        assert len(numbers) == len(set(numbers)) > 10000
        for row in sorted(changes, key=lambda row: (row["ev_id"], row["_change_type"] != "update_preimage")):
            if row["_change_type"] in ("delete", "update_preimage"):
                del rows[row["id"]]
            else:
                rows[row["id"]] = row["note"]
        assert rows == dict(shop.execute(f"select id, note from {table}"))


@pytest.mark.parametrize("executors", [1, 2, 4])
def test_a_mirror_by_executors(shop: Shop, environment: dict[str, str], executors: int, tmp_path: Path) -> None:
    """The first load in ranges of blocks, then changes by table and range of the log; the same tables in the end."""
    paths = ",".join(map(str, jars("delta")))
    shop.execute("create table lines (id int primary key, note text)")
    shop.execute("insert into lines select i, repeat('l', 200) from generate_series(1, 20000) i")
    shop.execute("insert into orders (id, note) select i, repeat('n', 200) from generate_series(1001, 20000) i")
    shop.capture("orders")
    shop.capture("lines")
    installed, job = install_wheel(environment, tmp_path), tmp_path / "job.py"
    job.write_text(MIRROR_JOB)
    lake = Lake(shop.db, tmp_path / "lake")
    settings = {"spark.cores.max": str(executors), "spark.jars": paths}
    with cluster(environment, tmp_path, executors) as master:
        for run in ("load", "changes"):
            submit(master, environment, tmp_path, str(job), str(installed), lake.target, **settings)
            assert [len(some) for some in executors_by_stage(tmp_path)].count(executors) >= 2
            (tmp_path / "events").rename(tmp_path / run)
            lake.same("public.orders", "public.lines")
            for table in ("orders", "lines"):
                shop.execute(f"update {table} set note = repeat('m', 150) || id where id % 2 = 0")
                shop.execute(f"update {table} set id = -id where id % 11 = 0")
                shop.execute(f"delete from {table} where id % 7 = 0")
