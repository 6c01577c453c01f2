"""The demo, small, as a user runs it: what it says, how it fails, and that nothing is left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from gdq.cli import main
from gdq.consumers.demo import views
from gdq.consumers.demo.outcome import Step, table_lines
from gdq.consumers.refresh.verify import VerifyResult
from gdq.embedded.files import cache_folder
from tests.support.lake_spark import jars
from tests.support.waiting import SECONDS, until

SMALL = ("demo", "--scale", "0.002", "--rounds", "2")
EVENTS = 6


@dataclass(frozen=True, slots=True)
class Place:
    """Folders of one run: its cache with the server's data, and its temporary files."""

    cache: Path
    temporary: Path

    @property
    def left(self) -> list[Path]:
        """What the demo has left there."""
        return [*self.cache.glob("run/*"), *self.temporary.iterdir()]

    @property
    def env(self) -> dict[str, str]:
        own = {"GDQ_CACHE": str(self.cache), "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        return {name: value for name, value in os.environ.items() if name != "PYSPARK_SUBMIT_ARGS"} | own


@pytest.fixture
def place() -> Iterator[Place]:
    # outside tmp_path, which the account that runs the server may not enter
    with tempfile.TemporaryDirectory(prefix="gdq-test-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        found = Place(root / "cache", root / "temporary")
        found.cache.mkdir(mode=0o755)
        found.temporary.mkdir()
        (found.cache / "postgresql").symlink_to(cache_folder() / "postgresql")
        yield found


def run_demo(place: Place, *more: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """The small demo, in an environment that lacks some packages."""
    program = f"import sys; sys.modules |= dict.fromkeys({without.split()!r}); from gdq.cli import main; main()"
    command = [sys.executable, "-c", program, *SMALL, *more]
    return subprocess.run(command, env=place.env, capture_output=True, text=True, check=False, timeout=SECONDS)


def rows_of_table(said: str) -> dict[str, str]:
    """The lines of the table at the end, by their step."""
    table = said.partition("\nstep ")[2].partition("\n\n")[0].splitlines()[2:]
    return {line.partition("  ")[0]: line for line in table}


def test_without_spark(place: Place) -> None:
    """Events one by one, a view equal to its query in each round, and a table; plain lines, for nobody watches."""
    done = run_demo(place, "--no-spark", without="pyspark pyarrow adbc_driver_postgresql deltalake")
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout
    assert len(re.findall(r"(?m)^  (insert|update|delete) .* [\d.]+ m?s after", said)) == EVENTS
    assert said.count("equals its query") == 3
    assert "left out (--no-spark)" in said
    rows = rows_of_table(said)
    assert rows["changes as events"].endswith(f"yes, {EVENTS} of {EVENTS}")
    assert re.search(r"\d s +REFRESH, .* s +[\d.]+ x.* yes, 3 of 3$", rows["view in PostgreSQL"])
    assert said.partition("\nNext, ")[2].count("\n  gdq ") == 3
    assert "\x1b" not in said
    assert place.left == []


@pytest.mark.long
@pytest.mark.spark
def test_with_spark(place: Place) -> None:
    """Spark refreshes and recomputes the Delta table; each result equals the query."""
    jars("delta")
    done = run_demo(place)
    assert (done.returncode, done.stderr) == (0, "")
    rows = rows_of_table(done.stdout)
    assert len(rows) == 3
    assert re.search(r"recompute, .* s +[\d.]+ x.* yes, 4 of 4$", rows["view by Spark into Delta"])
    assert place.left == []


@pytest.mark.parametrize(
    ("without", "options", "message", "hint"),
    [
        ("sqlglot", ["--no-spark"], "package sqlglot", "pip install 'gdq[demo]'"),
        ("pyspark deltalake", [], "packages pyspark, deltalake", "gdq[demo,spark,lake]', or leave Spark out: gdq demo"),
    ],
)
def test_a_missing_extra(place: Place, without: str, options: list[str], message: str, hint: str) -> None:
    """One line says what is missing and one how to get it, before anything is started."""
    done = run_demo(place, *options, without=without)
    assert (done.returncode, done.stdout) == (1, "")
    first, second = done.stderr.splitlines()
    assert first == f"Error: the demo needs the Python {message}"
    assert second.startswith("Hint: ")
    assert hint in second


@pytest.mark.long
def test_a_result_that_differs_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "compare_with_query", lambda work, _: VerifyResult(work.view.view_name, 7, 1, 2))
    result = CliRunner().invoke(main, [*SMALL, "--no-spark"])
    assert result.exit_code == 3
    assert "DIFFERS from its query: 1 rows missing, 2 unexpected" in result.output
    assert rows_of_table(result.output)["view in PostgreSQL"].endswith("NO, 0 of 3")
    assert result.output.endswith("Error: not as it must be: view in PostgreSQL\n")


def test_a_loss_is_told() -> None:
    """The table shows a ratio below 1, and says what it means."""
    lines = list(table_lines([Step("one", "2.00 s", "other, 1.00 s", 0.5, 3, 3), Step("two", "1 ms")]))
    assert "0.5 x, gdq is slower" in lines[2]
    assert lines[3].endswith("NO, 0 of 0")


INTERRUPTS = [
    pytest.param("Setting up", ["--no-spark"], id="set-up", marks=[pytest.mark.long]),
    pytest.param("1. ", ["--no-spark"], id="events"),
    pytest.param("2. ", ["--no-spark"], id="postgres", marks=[pytest.mark.long]),
    pytest.param("Setting up", [], id="set-up-spark", marks=[pytest.mark.long, pytest.mark.spark]),
    pytest.param("  first load", [], id="spark", marks=[pytest.mark.long, pytest.mark.spark]),
]


@pytest.mark.long
@pytest.mark.parametrize(("line", "options"), INTERRUPTS)
def test_interrupted(place: Place, line: str, options: list[str]) -> None:
    """Ctrl-C, which a terminal sends to the whole group, leaves no process, no server and no file."""
    if not options:
        jars("delta")
    command = [sys.executable, "-m", "gdq", *SMALL, *options]
    process = subprocess.Popen(
        command, env=place.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    # of two first loads the second is Spark's
    for _ in range(2 if line == "  first load" else 1):
        assert any(said.startswith(line) for said in iter(process.stdout.readline, ""))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (130, "Error: interrupted\n")
    # what has ended is of the group until the machine's first process has taken note
    until(lambda: not _in_group(process.pid), "the end of the group")
    assert place.left == []


def _in_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
