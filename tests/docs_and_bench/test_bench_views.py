"""Results of bench.views are kept, and told with their losses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("bench.views_data", reason="an sdist has no benchmarks")

from bench.views import not_measured
from bench.views_data import Key, OtherSettings, Results, Sample, expected
from bench.views_report import lines, page, reasons

WANTED = list(dict.fromkeys(expected(["q1", "q6"], ["postgres", "spark"], ["q6"], [0.1, 0.001], 2)))


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Of q1 and q6 at 0.1 %: one far faster than REFRESH, one not; Spark has refused it."""
    kept = Results(tmp_path / "kept" / "views.json", 0.5, {"date": "today"})
    for number in (1, 2):
        for view, mine in (("q1", 0.01 * number), ("q6", 0.5)):
            key = Key(number, 0.001, view, "postgres")
            kept.add(key, Sample("delta", mine, kind="incremental", delta_rows=9, rows_read=1, equal=True))
            kept.add(key._replace(method="refresh"), Sample("done", 1.0, rows_read=100))
    kept.add(Key(1, 0.001, "q6", "spark"), Sample("refused", why="Spark takes no such thing [spark-window]"))
    kept.add(Key(1, 0.1, "q6", "spark"), Sample("failed", why="out of memory"))
    return kept


def test_a_run_goes_on_where_it_was(results: Results) -> None:
    again = Results.read(results.path, 0.5)
    assert (again.samples, again.about) == (results.samples, results.about)
    again.add(Key(1, 0.001, "q1", "postgres"), Sample("full", 9.0))
    again.forget_failures()
    missing = [key for key in WANTED if key not in again.samples]
    assert len(missing) == len(WANTED) - 9
    assert "round 1, concurrently at 0.10%: q1 q6" in not_measured(missing)
    assert "round 2, spark-full: q6" in not_measured(missing)
    assert again.of("q1", "postgres", 0.001)[0].seconds == 0.01
    with pytest.raises(OtherSettings):
        Results.read(results.path, 0.1)


def test_goals_come_first_and_full_recomputes_once_a_round() -> None:
    assert [key.churn for key in WANTED if key.round == 1 and key.method == "postgres"] == [0.001, 0.001, 0.1, 0.1]
    assert [key.round for key in WANTED if key.method == "spark-full"] == [1, 2]


def test_losses_are_told_with_their_reasons(results: Results) -> None:
    won, lost = lines(results, 0.001)
    assert won.postgres.ratio == pytest.approx(66.7, 0.01)
    assert (won.postgres.low, won.postgres.high) == (50, 100)
    assert reasons(won, (0.01, None)) == ""
    assert reasons(lost, (0.01, None)) == "postgres: computing 9 changes; Spark: refused, `spark-window`"
    assert reasons(lost, (0.4, None)).startswith("postgres: the rival takes 1.00 s, no refresh less than 0.40 s")
    text = page(results, ["round 1, spark: q1"])
    assert "2 of 2 views from changes" in text
    assert "1 at least 20 times, 0 slower" in text
    assert "| q1 | delta | 0.015 | 1.0 | 66.7 (50.0-100.0) |" in text
    assert "The run ended before: round 1, spark: q1." in text
    assert "| q6 | Spark: out of memory |" in text
