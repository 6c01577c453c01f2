"""The DAG of examples/airflow: its commands work, and where there is an Airflow, it runs the DAG."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest

from tests.support.examples import EXAMPLES, command_folder, make_shop, program_environment
from tests.support.programs import gdq
from tests.support.server import Database

FILE = EXAMPLES / "airflow" / "gdq_views.py"
AIRFLOW = os.environ.get("GDQ_TEST_AIRFLOW")


@dataclass
class Operator:
    """What the DAG says of a task."""

    made: dict[str, Any]
    after: list[str] = field(default_factory=list)

    def set_downstream(self, other: Operator) -> None:
        other.after.append(self.made["task_id"])


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Operator]]:
    """The names that the DAG takes from Airflow, which only note what they are given."""
    found: list[Operator] = []

    class Bash(Operator):
        def __init__(self, **made: Any) -> None:
            super().__init__(made)
            found.append(self)

    class Dag:
        def __init__(self, **_: Any) -> None: ...
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

    names: dict[str, dict[str, Any]] = {
        "airflow.sdk": {"DAG": Dag},
        "airflow.providers.standard.operators.bash": {"BashOperator": Bash},
    }
    for name, content in names.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(".".join(parts[:length])))
        vars(sys.modules[name]).update(content)
    yield found


@pytest.fixture
def viewed(empty_db: Database, tmp_path: Path) -> Database:
    """The shop with the views that the folder of views has."""
    make_shop(empty_db, command_folder(tmp_path / "bin"))
    query = EXAMPLES / "view_folder" / "views" / "customers.sql"
    made = gdq("create-view", "customers", "--sql", str(query), "--target", "public.customers", dsn=empty_db.su_dsn)
    assert made.returncode == 0, made.stderr
    return empty_db


@pytest.mark.long
@pytest.mark.server
def test_the_commands(viewed: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refresh, then verify; a view whose rows differ fails its task, which is not tried again.

    It ends with 3, or with 1 if an audit of the refresh within it has found the rows before.
    """
    monkeypatch.setenv("GDQ_COMMAND", str(tmp_path / "bin" / "gdq"))
    monkeypatch.setenv("GDQ_VERIFIED_VIEWS", "customers")
    with stand_in(monkeypatch) as tasks:
        runpy.run_path(str(FILE))
    order = [(task.made["task_id"], task.after) for task in tasks]
    assert order == [("refresh", []), ("verify_customers", ["refresh"])]

    def run(task: Operator) -> int:
        assert task.made["env"] == {"GDQ_DSN": "{{ conn.gdq.get_uri() }}"}
        env = program_environment(tmp_path / "bin", {"GDQ_DSN": viewed.su_dsn})
        command = ["bash", "-c", task.made["bash_command"]]
        return subprocess.run(command, env=env, capture_output=True, check=False).returncode

    with viewed.connect("su") as su:
        su.execute("insert into orders (customer, amount) values ('Ann', 9.90)")
        assert [run(task) for task in tasks] == [0, 0]
        assert su.execute("select customer, orders from customers").fetchall() == [("Ann", 1)]
        su.execute("update customers set orders = 2")
        assert run(tasks[1]) in (1, 3)
    assert tasks[1].made["retries"] == 0


@pytest.mark.long
@pytest.mark.skipif(AIRFLOW is None, reason="GDQ_TEST_AIRFLOW names no Python with apache-airflow")
def test_airflow_runs_the_dag(viewed: Database, tmp_path: Path) -> None:
    assert AIRFLOW is not None
    server = viewed.server.conninfo(dbname=viewed.name)
    host, port = (word.partition("=")[2] for word in server.split() if word.startswith(("host=", "port=")))
    uri = f"postgres://postgres@{host}:{port}/{viewed.name}"
    env = program_environment(
        tmp_path / "bin",
        {
            "AIRFLOW_HOME": str(tmp_path / "airflow"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(FILE.parent),
            "AIRFLOW_CONN_GDQ": uri,
            "GDQ_COMMAND": str(tmp_path / "bin" / "gdq"),
            "GDQ_VERIFIED_VIEWS": "customers",
        },
    )
    program = f"""
from airflow.models.dagbag import DagBag
bag = DagBag({str(FILE.parent)!r}, include_examples=False)
assert not bag.import_errors, bag.import_errors
run = bag.get_dag("gdq_views").test()
assert str(run.state) == "success", run.state
"""
    for command in ([AIRFLOW, "-m", "airflow", "db", "migrate"], [AIRFLOW, "-c", program]):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    with viewed.connect("su") as su:
        assert su.execute("select action from gdq.view_history('customers')").fetchall()
