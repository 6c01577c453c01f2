"""Commands load what they need and no more: pyspark is half a gigabyte, Alembic half a second."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import Database

_PROGRAM = """
import json, sys
from gdq.cli import main
try:
    main(json.loads(sys.argv[1]))
except SystemExit as stop:
    assert not stop.code, stop.code
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded(*arguments: str) -> set[str]:
    """The top-level modules in memory after a command."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {"sqlalchemy", "alembic", "pyarrow", "adbc_driver_manager", "sqlglot", "pyspark"}


@pytest.mark.parametrize("option", ["-h", "--version"])
def test_the_list_of_commands_loads_no_command(option: str) -> None:
    assert loaded(option) & (HEAVY | {"psycopg", "rich"}) == set()


@pytest.mark.parametrize("command", ["consume", "add-table", "create-view", "install", "relay"])
def test_help_loads_nothing_heavy(command: str) -> None:
    assert loaded(command, "-h") & (HEAVY | {"rich"}) == set()


@pytest.mark.parametrize("command", ["refresh", "verify-view"])
def test_help_of_refresh_loads_no_engine(command: str) -> None:
    assert loaded(command, "-h") & (HEAVY | {"rich"}) == set()


def test_public_names_need_no_extra() -> None:
    program = "import sys; sys.modules |= dict.fromkeys(sys.argv[1:]); from gdq import *"
    arrow, relays = ["pyarrow", "adbc_driver_manager"], ["urllib3", "nats", "confluent_kafka", "fastavro"]
    extras = [*arrow, *relays, "sqlglot", "pyspark", "deltalake", "pyiceberg", "prometheus_client"]
    done = subprocess.run([sys.executable, "-c", program, *extras], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("sqlglot", "views", ["create-view", "v", "--queue", "q", "--sql", "-", "--target", "public.v"]),
        ("sqlglot", "views", ["refresh"]),
        ("prometheus_client", "metrics", ["metrics", "--once"]),
        ("urllib3", "http", ["relay", "q", "c", "http://127.0.0.1:1/", "--once"]),
        ("nats", "nats", ["relay", "q", "c", "nats://127.0.0.1:1/q", "--once"]),
        ("confluent_kafka", "kafka", ["relay", "q", "c", "kafka://127.0.0.1:1/q", "--once"]),
        ("fastavro", "avro", ["relay", "q", "c", "kafka://127.0.0.1:1/q", "--form", "avro", "--registry", "http://h"]),
    ],
)
def test_a_missing_extra_is_told_in_one_line(db: Database, package: str, extra: str, arguments: list[str]) -> None:
    """`pip install gdq` alone brings no sqlglot: the command names what is missing, without a traceback."""
    with db.connect() as connection:
        connection.execute("create table t (id int primary key); select gdq.create_queue('q')")
        connection.execute("select gdq.add_table('q', 't')")
    program = f"import sys; sys.modules['{package}'] = None; from gdq.cli import main; main(prog_name='gdq')"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--dsn", db.dsn],
        capture_output=True,
        text=True,
        check=False,
        input="select id from t",
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: this needs the Python package {package}\nHint: pip install 'gdq[{extra}]'\n")


def test_commands_load_neither_spark_nor_what_others_need(db: Database) -> None:
    with db.connect() as connection:
        connection.execute("create table t (id int primary key); select gdq.create_queue('q')")
        connection.execute("select gdq.add_table('q', 't')")
    for arguments in (
        ["register-consumer", "q", "c"],
        ["queues"],
        ["tables"],
        ["consumers"],
        ["tick", "q"],
        ["ticker", "--once"],
        ["peek", "q"],
        ["consume", "q", "c", "--once"],
        ["views"],
    ):
        assert loaded(*arguments, "--dsn", db.dsn) & HEAVY == set(), arguments


def test_install_loads_no_spark(db: Database) -> None:
    assert loaded("install", "--dsn", db.dsn) & {"pyspark", "pyarrow"} == set()


_CALLS = """
import sys
sys.modules[sys.argv[1]] = None
import gdq
dsn = sys.argv[2]
with gdq.connect(dsn) as connection:
    connection.autocommit = True
    try:
        match sys.argv[3]:
            case "create_view": gdq.create_view(connection, "v", "q", "select id from t", "public.v")
            case "Refresher": gdq.Refresher(dsn)
            case method:
                with gdq.Consumer(dsn, "q", "c") as consumer:
                    for batch in consumer.batches(once=True):
                        getattr(batch, method)("public.t")
    except ModuleNotFoundError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("package", "extra", "target"),
    [
        ("deltalake", "lake", ["delta:TMP/t"]),
        ("pyiceberg", "lake", ["iceberg:TMP/t/n.t"]),
        ("pyarrow", "lake", ["parquet:TMP/t"]),
        pytest.param("pyspark", "spark", ["delta:TMP/t", "--engine", "spark"], marks=pytest.mark.long),
    ],
)
def test_a_missing_extra_of_a_target(db: Database, tmp_path: Path, package: str, extra: str, target: list[str]) -> None:
    """The refresh names it, in one line; the view can be made elsewhere than where it is refreshed."""
    with db.connect() as connection:
        connection.execute("create table t (id int primary key); select gdq.create_queue('q')")
        connection.execute("select gdq.add_table('q', 't')")
    program = f"import sys; sys.modules['{package}'] = None; from gdq.cli import main; main(prog_name='gdq')"
    made = ["create-view", "v", "--queue", "q", "--sql", "-", "--target", target[0].replace("TMP", str(tmp_path))]
    for arguments, code in (([*made, *target[1:]], 0), (["refresh"], 1)):
        command = [sys.executable, "-c", program, *arguments, "--dsn", db.dsn]
        done = subprocess.run(command, capture_output=True, text=True, check=False, input="select id from t")
        assert done.returncode == code, done.stderr
    assert re.match(f"Error: .*needs the Python package {package}\nHint: pip install 'gdq\\[{extra}\\]'\n", done.stderr)


@pytest.mark.parametrize(
    ("call", "package", "extra"),
    [
        ("arrow", "pyarrow", "arrow"),
        ("arrow_batches", "pyarrow", "arrow"),
        ("delta", "pyarrow", "arrow"),
        ("create_view", "sqlglot", "views"),
        ("Refresher", "sqlglot", "views"),
    ],
)
def test_a_missing_extra_is_named_to_programs(db: Database, call: str, package: str, extra: str) -> None:
    with db.connect() as connection:
        connection.execute("create table t (id int primary key); select gdq.create_queue('q')")
        connection.execute("select gdq.add_table('q', 't')")
        connection.execute("select gdq.register_consumer('q', 'c')")
        connection.execute("insert into t values (1)")
    command = [sys.executable, "-c", _CALLS, package, db.dsn, call]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"this needs the Python package {package}: pip install 'gdq[{extra}]'\n"
