"""What is published, used as its pages say: in an empty environment, from the wheel alone.

`make test-published` builds the wheel. It counts and times the commands from nothing to a first event, a first view and
a first Delta table. Then it runs README, every page of docs/ and the demo, on PostgreSQL 15 and 18. Exit code 1 if a
step fails or a page says something else than what happens.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from gdq.embedded.files import MAJORS
from gdq.embedded.server import EmbeddedServer
from tests.support.waiting import SECONDS

ROOT = Path(__file__).parent.parent

_EXTRAS = "arrow,views,spark,lake,metrics,http,nats,kafka,embedded,demo"
_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
# The tests that run the blocks of the pages.
_TESTS = (
    "tests/docs_and_bench/test_pages.py",
    "tests/docs_and_bench/test_views_doc.py::test_examples",
    "tests/spark/test_stream.py",
)
_TABLE = """create table orders (id int primary key, customer text, amount numeric(10, 2));
    insert into orders values (1, 'Ann', 9.90)"""
_QUEUE = ("gdq install", "gdq create-queue shop", "gdq add-table shop public.orders")
_QUERY = "select customer, count(*) as orders, sum(amount) as amount from orders group by customer"
_VIEW = f"echo '{_QUERY}' | gdq create-view by_customer --sql -"

# What a new user types, by what they want first and how many commands that may take.
PATHS = {
    ("the first event", 5): ("pip install '{wheel}'", *_QUEUE, "gdq consume shop printer --register"),
    ("the first refreshed view", 8): (
        "pip install '{wheel}[views]'", *_QUEUE, f"{_VIEW} --target public.by_customer", "gdq refresh by_customer",
    ),
    ("the first Delta table", 9): (
        "pip install '{wheel}[lake]'", *_QUEUE, f"{_VIEW} --target 'delta:{{folder}}/by_customer'",
        "gdq refresh by_customer",
    ),
}  # fmt: skip


class StepError(Exception):
    """A step of a path or page failed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.published", description=__doc__)
    parser.add_argument("--pg", type=int, nargs="+", choices=MAJORS, default=[15, 18])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gdq-published-") as name:
        folder = Path(name)
        try:
            wheel = build_wheel(folder)
            for (goal, most), commands in PATHS.items():
                follow_path(goal, most, commands, wheel, folder)
            run_pages(wheel, folder, given.pg)
        except StepError as error:
            print(f"FAILED: {error}")
            return 1
    return 0


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout."""
    _run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder / "dist"), str(ROOT)])
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def follow_path(goal: str, most: int, commands: tuple[str, ...], wheel: Path, folder: Path) -> None:
    """Run the commands in an environment of their own, and say how many they were and how long they took."""
    with _environment(folder, "path") as bin_folder, _shop() as dsn:
        environment = _variables(bin_folder) | {"DATABASE_URL": dsn}
        begin = time.monotonic()
        for command in commands:
            text = command.format(wheel=wheel, folder=bin_folder.parent)
            if "consume" in text:
                _see_event(text, environment, dsn)
            else:
                _run(["bash", "-e", "-o", "pipefail", "-c", text], environment)
        seconds = time.monotonic() - begin
    print(f"{goal}: {len(commands)} commands, {seconds:.0f} s", flush=True)
    if len(commands) > most:
        raise StepError(f"{goal} takes more than {most} commands")


def _see_event(command: str, environment: dict[str, str], dsn: str) -> None:
    """Start a consumer that goes on for ever, write a row, and end it with the row's event."""
    words = ["bash", "-c", f"exec {command}"]
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as consumer:
        assert consumer.stdout is not None
        assert consumer.stderr is not None
        try:
            said = consumer.stderr.readline()
            with psycopg.connect(dsn) as connection:
                connection.execute("insert into orders values (2, 'Bob', 3.00)")
            event = consumer.stdout.readline()
        finally:
            consumer.terminate()
            consumer.wait(SECONDS)
    if '"customer": "Bob"' not in event:
        raise StepError(f"{command}\n{said}{event}")


def run_pages(wheel: Path, folder: Path, majors: list[int]) -> None:
    """Run the blocks of all pages and the demo where nothing but the wheel, its extras and the tests is to be found."""
    checkout = folder / "pages"
    checkout.mkdir()
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout / name)
    with _environment(folder, "all") as bin_folder:
        environment = _variables(bin_folder)
        pip = [str(bin_folder / "pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        _run([*pip, f"{wheel}[{_EXTRAS}]", *_TOOLS], environment)
        for major in majors:
            print(f"README, the pages and the demo on PostgreSQL {major}", flush=True)
            tests = [str(bin_folder / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pg", str(major)]
            _run([*tests, *_TESTS], environment, checkout)
            _run([str(bin_folder / "gdq"), "demo", "--pg", str(major)], environment, checkout)


@contextmanager
def _environment(folder: Path, name: str) -> Iterator[Path]:
    """The folder of programs of a new environment of Python, which is removed at the end."""
    venv.create(folder / name, with_pip=True)
    yield folder / name / "bin"
    shutil.rmtree(folder / name)


@contextmanager
def _shop() -> Iterator[str]:
    """The connection to a new server with a table that somebody uses already."""
    with EmbeddedServer() as server:
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            connection.execute(_TABLE)
        yield server.conninfo()


def _variables(bin_folder: Path) -> dict[str, str]:
    """The variables of a shell in which an environment was activated."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV", "GDQ_DSN"}}
    return kept | {"PATH": f"{bin_folder}{os.pathsep}{kept['PATH']}", "PYTHONUNBUFFERED": "1"}


def _run(command: list[str], environment: dict[str, str] | None = None, folder: Path | None = None) -> None:
    done = subprocess.run(
        command, env=environment, cwd=folder, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise StepError(f"{' '.join(command)}\n{done.stdout}")


if __name__ == "__main__":
    sys.exit(main())
