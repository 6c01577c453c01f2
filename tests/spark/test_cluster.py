"""A refresh by spark-submit on a standalone cluster: a master and two workers, each a process of its own.

It takes most of a minute, so it runs only where GDQ_TEST_CLUSTER is set, as `make test-all` does.
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

import pyspark
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.embedded.java import java_home
from tests.support.spark import Shop
from tests.support.waiting import SECONDS, until

HOME = Path(pyspark.__file__).parent

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
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@pytest.fixture
def master(environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The address of a cluster of two workers with a core each."""
    logs, port = tmp_path / "logs", free_port()
    logs.mkdir()
    url = f"spark://127.0.0.1:{port}"
    daemon = [str(HOME / "bin" / "spark-class")]
    common = ["--host", "127.0.0.1", "--webui-port", "0"]
    with ExitStack() as stack:
        command = [*daemon, "org.apache.spark.deploy.master.Master", *common, "--port", str(port)]
        stack.enter_context(process(command, logs / "master", environment))
        for number in range(2):
            own = ["--cores", "1", "--memory", "600m", "--work-dir", str(tmp_path / f"work{number}"), url]
            command = [*daemon, "org.apache.spark.deploy.worker.Worker", *common, *own]
            stack.enter_context(process(command, logs / f"worker{number}", environment))
        workers = [logs / f"worker{number}" for number in range(2)]
        until(lambda: all("Successfully registered" in log.read_text() for log in workers), "the workers")
        yield url


def test_refresh_on_a_cluster(
    shop: Shop, environment: dict[str, str], master: str, password: str, tmp_path: Path
) -> None:
    shop.execute(
        "insert into orders (id, status, amount, note) select i, 's', i, repeat('n', 90)"
        " from generate_series(1001, 15000) i"
    )
    shop.capture("orders")
    shop.view("copy", QUERY, engine="spark")
    job, told, events = tmp_path / "job.py", tmp_path / "told", tmp_path / "events"
    job.write_text(JOB)
    events.mkdir()
    settings = {
        "spark.cores.max": "2",
        "spark.driver.maxResultSize": "256k",  # the table is twenty times as large
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.enabled": "true",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.executor.memory": "512m",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
    }
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    command = [str(HOME / "bin" / "spark-submit"), "--master", master, *options, str(job), str(told)]
    watch = Arguments(password)
    watch.start()
    try:
        with process(command, tmp_path / "logs" / "driver", environment) as submitted:
            code = submitted.wait(SECONDS)
    finally:
        watch.over.set()
        watch.join()
    assert code == 0, (tmp_path / "logs" / "driver").read_text()[-3000:]
    report = json.loads(told.read_text())
    assert report["actions"] == ["full", "delta"]
    assert shop.differences("copy", QUERY) == (0, 0)
    assert not {"password", "passfile"} & conninfo_to_dict(report["asked"]).keys()
    # both machines took part in reading the table and in reading its changes
    log = "".join(path.read_text() for path in events.rglob("*") if path.is_file())
    ended = [json.loads(line) for line in log.splitlines() if '"SparkListenerTaskEnd"' in line]
    stages: dict[int, set[str]] = {}
    for task in ended:
        stages.setdefault(task["Stage ID"], set()).add(task["Task Info"]["Executor ID"])
    assert sum(executors == {"0", "1"} for executors in stages.values()) >= 2, stages
    # nobody was told the password
    assert watch.looks > 3
    assert not watch.found
    kept = [path for folder in ("logs", "work0", "work1", "events") for path in (tmp_path / folder).rglob("*")]
    texts = {str(path): path.read_bytes() for path in kept if path.is_file() and path.suffix != ".jar"}
    assert any(re.search(r"work\d/.*/std(out|err)$", name) for name in texts)
    texts |= {page: text.encode() for page, text in report["shown"].items()}
    assert b"gdq" in texts["sql?details=true&length=999"]
    assert [name for name, text in texts.items() if password.encode() in text] == []
