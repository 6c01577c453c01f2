"""Replicas beside built-in replication: what is measured is kept, and told with goals that are missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("bench.results", reason="an sdist has no benchmarks")

from bench.replica_report import COPY, GDQ_TICKER, LAG, PART, WORK, goals, page
from bench.replica_sides import BINARY, BUILT_IN, EACH
from bench.results import Results

SEVERAL = "50-row transactions"


def test_goals_and_processes_are_told(tmp_path: Path) -> None:
    results = Results(tmp_path / "replica.jsonl", "tiny")
    for number in (1, 2, 3):
        for who, seconds in (("gdq", 2.0), (BUILT_IN, 5.0), (BINARY, 2.5)):
            sizes = {"program": 400.0 if who == "gdq" and number == 2 else 40.0}
            values = {"seconds": seconds, "rate": 1000 / seconds, "cpu": 1.5, "megabytes": sizes}
            results.add(PART, SEVERAL, who, number, values)
        results.add(PART, LAG, "gdq", number, {"made": 999, "p50": 60.0, "p99": 120.0, "megabytes": {}})
    found = {goal.what: goal.verdict for goal in goals(results)}
    assert found == {f"{SEVERAL}: beside {BUILT_IN}": "met", f"{SEVERAL}: beside {BINARY}": "MISSED"}
    text = page(results)
    assert "| gdq | 2.0 | 500 | 2.50 (2.50 to 2.50) | 1.5 |" in text
    assert "| gdq: program | **400** |" in text
    assert "| gdq | 999 | 60.0 | 120.0 |" in text
    assert "## First copy" not in text


@pytest.mark.long
def test_a_tiny_run(tmp_path: Path) -> None:
    """All measurements on servers of their own; the second run finds them all, and only writes the page."""
    kept, written = tmp_path / "kept.jsonl", tmp_path / "page.md"
    command = [sys.executable, "-m", "bench.replica", "--changes", "1000", "--rows", "1000", "--seconds", "1"]
    command += ["--rounds", "1", "--json", str(kept)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = Results.read(kept, None)
    assert all(results.has(PART, case, who, 1) for case in WORK for who in ("gdq", BUILT_IN, BINARY, EACH))
    assert all(results.has(PART, COPY, who, 1) for who in ("gdq", BUILT_IN, BINARY, "pg_dump | psql"))
    assert all(results.has(PART, LAG, who, 1) for who in ("gdq", GDQ_TICKER, BUILT_IN, BINARY))
    again = subprocess.run(
        [*command, "--only-write", "--write", str(written)], check=False, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert written.read_text() == done.stdout.rstrip("\n") + "\n"
