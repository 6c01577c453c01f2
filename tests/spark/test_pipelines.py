"""docs/pipelines.md as it stands: run, killed and run again, in an environment that has what pipelines need."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gdq.embedded.java import java_home
from gdq.installer.install import install
from tests.support.page import ROOT, blocks
from tests.support.server import Database
from tests.support.waiting import SECONDS, until

# The Python of an environment with gdq[spark] and pyspark[pipelines].
PYTHON = os.environ.get("GDQ_TEST_PIPELINES", "")
PAGE = "docs/pipelines.md"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="GDQ_TEST_PIPELINES names no Python"),
    pytest.mark.skipif(not (ROOT / PAGE).exists(), reason="an sdist has no documentation"),
]

_SETUP = """create table orders (id int primary key, customer text, amount numeric(10, 2));
    create table customer (id int primary key, name text);
    insert into orders select i, 'Ann', i from generate_series(1, 20) i; insert into customer values (1, 'Ann')"""
_CAPTURE = "select gdq.create_queue('shop'), gdq.add_table('shop', 'orders'), gdq.add_table('shop', 'customer')"
_FLOWS = "name: flows\nstorage: file://{}/flow_storage\nlibraries:\n  - glob:\n      include: flows/**\n"

_READ = """
import json
from gdq.consumers.spark import session
session._SETTINGS["spark.sql.catalogImplementation"] = "hive"
spark = session.spark_session()
tables = {name: spark.table(name).collect() for name in ("orders", "customers", "order_changes")}
print(json.dumps({name: [row.asDict() for row in rows] for name, rows in tables.items()}, default=str))
"""


@pytest.fixture
def project(empty_db: Database, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder with the page's files, and the environment that its commands run in."""
    install(empty_db.su_dsn)
    with empty_db.connect("su") as su:
        su.execute(_SETUP)
        su.execute(_CAPTURE)
        for flow in ("customer", "history"):
            su.execute(f"select gdq.register_consumer('shop', '{flow}_pipeline', tables => '{{customer}}')".encode())
    for block in blocks(PAGE):
        if block.file:
            path = tmp_path / block.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text.replace("/srv/shop", str(tmp_path)))
    (tmp_path / "flows.yml").write_text(_FLOWS.format(tmp_path))
    programs = str(Path(PYTHON).parent)
    own = {"PATH": os.pathsep.join([programs, os.environ["PATH"]]), "DATABASE_URL": empty_db.su_dsn}
    own |= {"JAVA_HOME": str(java_home()), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": PYTHON}
    return tmp_path, {name: value for name, value in os.environ.items() if name != "GDQ_DSN"} | own


def run(project: tuple[Path, dict[str, str]], *command: str) -> str:
    folder, env = project
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands(project: tuple[Path, dict[str, str]]) -> list[str]:
    """The page's commands, without those that install."""
    texts = (block.text.replace("/srv/shop", str(project[0])) for block in blocks(PAGE) if block.language == "sh")
    return ["\n".join(line for line in text.splitlines() if not line.startswith("pip ")) for text in texts]


def kill_a_run(project: tuple[Path, dict[str, str]], command: str) -> None:
    """Start a run, and kill all its processes some time after it has begun to read the changes."""
    folder, env = project
    log = folder / "killed.log"
    with log.open("w") as told:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=env, stdout=told, stderr=told, start_new_session=True
        )
    until(lambda: "order_changes is RUNNING" in log.read_text(), "the stream")
    time.sleep(random.Random(1).uniform(0, 10))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_the_page(project: tuple[Path, dict[str, str]], empty_db: Database) -> None:
    """Each change is in the pipeline's tables once, though a run was killed; and Spark takes the flows as they are."""
    start, again = commands(project)
    run(project, "bash", "-ec", start)
    with empty_db.connect("su") as su:
        _change(su, 1)
        run(project, "bash", "-ec", again)
        _change(su, 2)
        kill_a_run(project, again)
        _change(su, 3)
        run(project, "bash", "-ec", again)
        found: dict[str, Any] = json.loads(run(project, PYTHON, "-c", _READ).splitlines()[-1])
        rows = su.execute("select id, customer, amount::text from orders order by id").fetchall()
    assert sorted((row["id"], row["customer"], row["amount"]) for row in found["orders"]) == rows
    assert found["customers"] == [{"id": 1, "name": "Ann"}]
    changes = [(row["ev_id"], row["id"]) for row in found["order_changes"]]
    assert len(changes) == len(set(changes)) > 10
    version = run(project, PYTHON, "-c", "import pyspark; print(pyspark.__version__)")
    if version.startswith("4.3."):
        run(project, "spark-pipelines", "dry-run", "--spec", "flows.yml")


def _change(connection: psycopg.Connection[Any], number: int) -> None:
    connection.execute("insert into orders values (%s, 'Bob', %s)", [100 + number, number])
    connection.execute("update orders set amount = amount + 1 where id %% 3 = %s", [number % 3])
    connection.execute("update orders set id = id + 1000 where id = %s", [number])
    connection.execute("delete from orders where id = %s", [10 + number])
