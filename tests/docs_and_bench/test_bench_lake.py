"""Spools, mirrors and relays beside their peers: what is measured is kept, and told with goals that are missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("bench.results", reason="an sdist has no benchmarks")

from bench.lake_report import (
    CATCH_UP,
    CHURN,
    COPIED,
    DEBEZIUM,
    GATHERED,
    LIVE,
    LOAD,
    MIRROR,
    MIRROR_PART,
    PRODUCER,
    RELAY,
    RELAY_PART,
    SLOTS,
    SPARK,
    SPOOL,
    SPOOL_PART,
    STEADY,
    goals,
    page,
)
from bench.results import Results


def test_goals_of_spools_are_told(tmp_path: Path) -> None:
    results = Results(tmp_path / "lake.jsonl", "tiny")
    for number in (1, 2, 3):
        for case, mine in ((CATCH_UP, 1.0), (LIVE, 2.0)):
            for who, server in ((SPOOL, mine), (SLOTS, 10.0)):
                values = {"server_us": server, "ticker_us": 0.5, "client_us": 3.0, "seconds": 4.0}
                results.add(SPOOL_PART, case, who, number, values)
    assert [(goal.verdict, str(goal.ratio)) for goal in goals(results)] == [
        ("met", "0.10 (0.10 to 0.10)"),
        ("MISSED", "0.20 (0.20 to 0.20)"),
    ]
    text = page(results)
    assert f"| {LIVE}: {SPOOL} | 2.00 | 0.20 (0.20 to 0.20) | 0.50 | 3.00 | 4.0 |" in text


def test_goals_of_mirrors_are_told(tmp_path: Path) -> None:
    """More than one and a half, or three, times faster than Spark."""
    results = Results(tmp_path / "lake.jsonl", "tiny")
    churn = CHURN.format("spread", "Delta")
    for case, spark in ((LOAD.format("Delta"), 16.0), (churn, 29.0)):
        for who, seconds in ((MIRROR, 10.0), (SPARK, spark), (COPIED, 5.0)):
            results.add(MIRROR_PART, case, who, 1, {"seconds": seconds, "cpu": 7.0})
    assert [goal.verdict for goal in goals(results)] == ["met", "MISSED"]
    assert f"| {churn}: {MIRROR} | 10.0 | 2.90 (2.90 to 2.90) | 7.0 |" in page(results)


def test_relays_are_told(tmp_path: Path) -> None:
    results = Results(tmp_path / "lake.jsonl", "tiny")
    for who, rate in ((RELAY, 3000.0), (DEBEZIUM, 2000.0), (PRODUCER, 90000.0)):
        results.add(RELAY_PART, GATHERED, who, 1, {"rate": rate, "cpu_us": 100.0})
    for who, p50 in ((RELAY, 80.0), (DEBEZIUM, 20.0)):
        results.add(RELAY_PART, STEADY, who, 1, {"p50": p50, "p99": 2 * p50, "cpu_us": 90.0})
    text = page(results)
    assert f"| {RELAY} | 3,000 | 1.50 (1.50 to 1.50) | 100 |" in text
    assert f"| {DEBEZIUM} | 20 | 40 | 90 |" in text


def _bench(name: str, kept: Path, *options: str) -> str:
    """What a benchmark prints."""
    command = [sys.executable, "-m", f"bench.{name}", "--quick", "--json", str(kept), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_quick_run_of_spools(tmp_path: Path) -> None:
    """The page can be written again from what was kept, and the results of a part forgotten."""
    kept, written = tmp_path / "kept.jsonl", tmp_path / "page.md"
    text = _bench("spool", kept, "--readers", "3")
    results = Results.read(kept, None)
    assert all(results.has(SPOOL_PART, case, who, 1) for case in (CATCH_UP, LIVE) for who in (SPOOL, SLOTS))
    _bench("spool", kept, "--readers", "3", "--only-write", "--write", str(written))
    assert written.read_text() == text.rstrip("\n") + "\n"
    results.add("relay", "kept", "gdq", 1, {"rate": 1})
    _bench("spool", kept, "--only-write", "--fresh")
    assert list(Results.read(kept, None).samples) == [("relay", "kept", "gdq", 1)]


@pytest.mark.long
def test_a_quick_run_of_mirrors(tmp_path: Path) -> None:
    """Each lake table is compared with its source by the benchmark itself."""
    kept = tmp_path / "kept.jsonl"
    text = _bench("mirror", kept)
    results = Results.read(kept, None)
    cases = {LOAD.format("Delta"), CHURN.format("spread", "Iceberg"), CHURN.format("recent rows", "Delta")}
    assert cases <= set(results.names(MIRROR_PART, 1))
    assert all(results.has(MIRROR_PART, case, who, 1) for case in cases for who in (MIRROR, SPARK))
    assert "## Mirrors beside Spark" in text


@pytest.mark.long
def test_a_quick_run_of_relays(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    text = _bench("relay", kept)
    results = Results.read(kept, None)
    assert all(results.has(RELAY_PART, GATHERED, who, 1) for who in (RELAY, DEBEZIUM, PRODUCER))
    assert all(results.has(RELAY_PART, STEADY, who, 1) for who in (RELAY, DEBEZIUM))
    assert "## Relays to Kafka beside Debezium" in text
