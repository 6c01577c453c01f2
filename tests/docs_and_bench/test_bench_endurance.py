"""Endurance and scale in the benchmark: what is measured, what is told of it, and what is left out."""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest

pytest.importorskip("bench.results", reason="an sdist has no benchmarks")

from bench import endurance, long_parts, many_tables
from bench.endurance_report import losses, section
from bench.long_parts import Program
from bench.packages import BenchError
from bench.report import page
from bench.results import Results
from bench.steady import Child, Work
from tests.support.server import chosen_binaries

MB = 2**20
ENDS = {"server_us": 50.0, "session_us": 20.0, "client_us": 30.0, "p50": 40.0, "p99": 90.0}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """A run of whose parts the queue wins some and loses some."""
    kept = Results(tmp_path / "bench.jsonl", "long")
    common = {"seconds": 600, "rate": 499.6}
    for number in (1, 2, 3):
        for path, seconds in (("queue", 10.0), ("slot", 20.0)):
            values = {"catch_up": seconds + number, "events_a_second": 1e6 / seconds, "client_us": 20.0}
            kept.add("endurance", "stopped", path, number, values | {"server_us": 60 / seconds})
    kept.add("endurance", "stopped", "queue", 0, common | {"held": 150 * MB, "left": 0})
    slot = {"held": 300 * MB, "left": MB, "own": 100 * MB, "pg_wal": 320 * MB, "pg_wal_left": 64 * MB}
    kept.add("endurance", "stopped", "slot", 0, common | slot)
    first = {f"{name}_first": value for name, value in ENDS.items()}
    for path, slower, dead in (("queue", 1.25, 50), ("slot", 2.5, 9000)):
        last = {f"{name}_last": value for name, value in ENDS.items()}
        last |= {"session_us_last": 20 * slower * 2, "server_us_last": 30 + 20 * slower * 2}
        last |= {"p50_last": 40.0 if path == "queue" else 20.0}
        disk = {"most": 8 * MB, "held": 5 * MB, "left": 0, "dead": dead}
        kept.add("endurance", "snapshot", path, 0, common | first | last | disk)
    return kept


def test_endurance_is_told_beside_the_slot(results: Results) -> None:
    text = "\n".join(section(results))
    assert "| held, MB | 150.0 | 300.0 | 0.50 |" in text
    assert "| held, MB, beside the WAL of the slot's own table | 150.0 | 100.0 | 1.50 |" in text
    assert "| seconds to catch up | 12.0 | 22.0 | 0.55 (0.53 to 0.56) |" in text
    assert "500 transactions per second of 2 rows" in text
    assert "stopped for 10 minutes" in text
    # 50 us became 80 us beside 130 us
    assert "| last over first, server | 0.62 | 0.38 | 1.62 |" in text
    assert "| last over first, beside the slot's sender | 0.62 | 1.00 | 0.62 |" in text
    assert text in page(results)


def test_losses_of_endurance_are_told(results: Results) -> None:
    found = {(loss.what, loss.its) for loss in losses(results)}
    assert found == {
        ("consumer stopped: held, MB, beside the WAL of the slot's own table", "slot's own table"),
        ("consumer stopped: server's CPU, us an event", "slot"),
        ("snapshot held: last over first, beside the slot's sender", "slot's sender"),
        ("snapshot held: latency p50, ms, last fifth", "slot"),
    }
    assert "The queue loses: held, MB, beside the WAL of the slot's own table (1.50 x); server" in page(results)


def test_nothing_is_told_of_what_was_not_measured(tmp_path: Path) -> None:
    assert section(Results(tmp_path / "none.jsonl", "quick")) == []


@pytest.mark.long
@pytest.mark.server
def test_a_tiny_run_of_endurance(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Both cases on servers of their own; what was measured is not measured again."""
    results = Results(tmp_path / "bench.jsonl", "tiny")
    said: list[str] = []
    binaries = chosen_binaries(request.config.getoption("--pg"))
    endurance.run(binaries, Work(seconds=2, rate=100, rounds=2), results, said.append)
    for path in ("queue", "slot"):
        stopped = results.samples["endurance", "stopped", path, 0]
        assert stopped["events"] >= 2 * 100 * 2
        assert stopped["held"] > 100_000
        assert set(results.rounds("endurance", "stopped", path, "events_a_second")) == {1, 2}
        snapshot = results.samples["endurance", "snapshot", path, 0]
        assert snapshot["most"] >= snapshot["held"] > 0
        assert min(snapshot[f"server_us_{end}"] for end in ("first", "last")) > 0
        # the ticker or the slot's sender works too
        assert snapshot["server_us_first"] > snapshot["session_us_first"] > 0
        assert 0 < snapshot["p50_first"] < 2000
    slot = results.samples["endurance", "stopped", "slot", 0]
    assert slot["held"] > 1.5 * slot["own"]  # it retains what the queue's table wrote too
    assert results.samples["endurance", "stopped", "queue", 0]["left"] == 0
    # rotation and TRUNCATE do not wait for the snapshot
    assert results.samples["endurance", "snapshot", "queue", 0]["left"] == 0
    before = results.path.read_text()
    again = Results.read(results.path, None)
    endurance.run(binaries, Work(seconds=2, rate=100, rounds=2), again, said.append)
    assert results.path.read_text() == before
    assert "### A snapshot that was held" in page(again)


def fail(told: Pipe) -> None:
    told.close()


def test_a_process_that_fails_ends_the_benchmark() -> None:
    with Child(fail) as child, pytest.raises(BenchError, match="the process that is to fail has failed"):
        child.hear()


def test_what_the_disk_is_too_small_for_is_left_out(tmp_path: Path) -> None:
    results = Results(tmp_path / "bench.jsonl", "long")
    # a module of the library that prints a line
    large = Program("10^20 events", "platform", (), needs_gb=10**9)
    long_parts.run((large,), results, print)
    assert not results.samples
    assert "- 10^20 events: 1000000000 GB are needed on the disk of the servers' data" in page(results)
    long_parts.run((Program("10^20 events", "platform", ()),), results, print)
    assert "10^20 events (`python -m platform`)" in page(results)
    assert "are needed" not in page(results)


@pytest.mark.long
@pytest.mark.parametrize("tables", [1, 5])
def test_scale_tells_of_ticks_batches_and_install(tables: int, capsys: pytest.CaptureFixture[str]) -> None:
    many_tables.main(tables)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*many_tables.STEPS, "install"]
    assert f"add_table for one of {tables} table" in lines[-1]
