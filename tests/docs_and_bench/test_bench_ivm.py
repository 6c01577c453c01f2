"""The page of bench.ivm tells what missed its goal; without pg_ivm there is no page."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("bench.results", reason="an sdist has no benchmarks")

from bench.ivm import page

WHAT = ("none writer", "gdq writer", "gdq refresh", "pg_ivm writer")


def test_what_is_missed_is_told() -> None:
    text = page({10: dict(zip(WHAT, (1.0, 1.2, 2.0, 2.0), strict=True))}, {"date": "today"}, 3)
    assert "| date | today |" in text
    assert "| 10 | 1.00 | 1.20 | 2.00 | 2.00 |" in text
    assert "| writer of 10 beside capture alone | 1.1 | 1.20 | MISSED |" in text
    assert "| writer of 10 and refresh, beside pg_ivm's writer | 2 | 1.60 |  |" in text


@pytest.mark.server
def test_a_server_without_pg_ivm() -> None:
    """The embedded PostgreSQL 18 comes without it."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.ivm", "--pg", "18", "--rounds", "1"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.splitlines()[-1][:35]) == (1, "Error: this server has no pg_ivm: e")
