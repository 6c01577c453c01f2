"""The campaign itself: it tells what is wrong, and a short one ends well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign.verdict import FOUND, TRUTH, UNORDERED
from tests.support.server import Database
from tests.support.waiting import SECONDS

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([(1, None), (2, 1), (None, 2)], (0, 0, 0)),
        ([(1, None), (None, 1), (2, None), (None, 2)], (0, 0, 0)),
        ([(1, None), (2, 1)], (1, 0, 0)),
        ([(1, None), (2, 1), (2, 1), (None, 2)], (0, 2, 0)),
        ([(1, None), (2, 1), (None, 2), (7, None)], (0, 0, 1)),
        ([], (4, 0, 0)),
    ],
)
def test_what_a_consumer_has(
    empty_db: Database, seen: list[tuple[int | None, int | None]], expected: tuple[int, int, int]
) -> None:
    with empty_db.connect("su") as su:
        su.execute("create schema app; create table app.audit (tbl text, born bigint, died bigint)")
        su.execute("insert into app.audit values ('t', 1, null), ('t', 2, 1), ('t', null, 2)")
        su.execute("create table seen (n bigint generated always as identity, born bigint, died bigint)")
        for one in seen:
            su.execute("insert into seen (born, died) values (%s, %s)", one)
        su.execute(TRUTH.encode())
        assert su.execute(FOUND.format("seen", "truth").encode()).fetchone() == expected


def test_versions_that_come_too_early(empty_db: Database) -> None:
    with empty_db.connect("su") as su:
        su.execute("create table seen (n bigint generated always as identity, born bigint, died bigint)")
        su.execute("insert into seen (born, died) values (1, null), (3, 2), (2, 1)")
        assert su.execute(UNORDERED.format("seen").encode()).fetchone() == (1,)


def test_a_short_campaign_against_a_replica(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.campaign.replicas", "--kills", "3", "--seed", "1"]
    command += ["--pg", str(pytestconfig.getoption("--pg")), "--folder", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills, 3 comparisons" in done.stdout.splitlines()[-1]


@pytest.mark.long
def test_a_short_campaign_of_all_parts(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.campaign.replicas", "--whole", "--kills", "4", "--copy-kills", "4"]
    command += ["--copy-rows", "600000", "--seed", "2"]
    command += ["--pg", str(pytestconfig.getoption("--pg")), "--folder", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False, timeout=SECONDS * 4
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [*_, table] = done.stdout.split("all parts\n")
    [row] = [line.split() for line in table.splitlines() if line.startswith("all ")]
    assert row[-1] == "8"


@pytest.mark.long
def test_a_short_campaign(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.campaign", "--seconds", "30", "--seed", "3", "--rate", "300"]
    command += ["--pg", str(pytestconfig.getoption("--pg")), "--only", "kill -9", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["changes"] > 1000
    assert len(report["beats"]) > 4
    assert report["manual"] == []
