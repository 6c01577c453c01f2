"""Fixtures of the tests of ticks and batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.schedules import Stage
from tests.support.server import Database

_LAG = "update gdq.queue set ticker_max_lag = '1 hour', ticker_idle_period = '1 hour', ticker_max_count = 500"


@pytest.fixture
def stage(db: Database) -> Iterator[Stage]:
    """A queue on which no tick is due for an hour."""
    with Stage(db) as opened:
        opened.owner.execute(_LAG)
        yield opened
