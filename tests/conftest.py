"""Options and plugins of the test suite."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from gdq.embedded.files import MAJORS

# What a test that is marked long or spark takes beside one that is not, roughly.
_SLOW_SECONDS = 10
_SPARK = "tests/spark/"

pytest.register_assert_rewrite("tests.support.guarded")
pytest_plugins = [
    "tests.support.server",
    "tests.support.spark",
    "tests.support.views",
    "tests.support.events",
    "tests.support.retry_shop",
    "tests.support.row_filter",
    "tests.support.unguarded",
    "tests.support.managed",
    "tests.support.guarded_shop",
    "tests.support.stage",
    "tests.support.lake",
    "tests.support.quick",
    "tests.support.slot",
    "tests.support.object_store",
]


def pytest_configure() -> None:
    """A shell has what it runs in the background ignore Ctrl-C, and so would every program that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy machine makes slow is no reason for a full load, but where the choice itself is tested."""
    if "/".join(request.path.parts[-2:]) != "views/test_cost.py":
        monkeypatch.setattr("gdq.view.cost._SECONDS_MIN", 3600.0)
        monkeypatch.setattr("gdq.view.cost._SECONDS_MIN_SPARK", 3600.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pg",
        type=int,
        choices=MAJORS,
        default=max(MAJORS),
        metavar="MAJOR",
        help=f"PostgreSQL to test with: {MAJORS[0]} to {MAJORS[-1]} (default %(default)s);"
        " GDQ_TEST_BIN=FOLDER names the programs of another one",
    )
    parser.addoption(
        "--one-spark",
        action="store_true",
        help="keep the tests of Spark on one worker: a session takes half a minute of processor before its first rows",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return _SparkTogether(config, log) if config.getoption("--one-spark") else None


class _SparkTogether(LoadFileScheduling):  # type: ignore[misc]
    """Files one by one to the workers, but those of Spark to one."""

    def _split_scope(self, nodeid: str) -> str:
        return _SPARK if nodeid.startswith(_SPARK) else super()._split_scope(nodeid)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: a worker that began with one last would end long after the others."""
    seconds: Counter[Path] = Counter()
    for item in items:
        slow = item.get_closest_marker("long") or item.get_closest_marker("spark")
        seconds[item.path] += _SLOW_SECONDS if slow else 1
    items.sort(key=lambda item: -seconds[item.path])
