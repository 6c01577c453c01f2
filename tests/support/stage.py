"""A queue for step-by-step schedules, as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.schedules import Stage
from tests.support.server import Database


@pytest.fixture
def stage(db: Database) -> Iterator[Stage]:
    """Captured tables with their history, and the consumer `c`; segments rotate as soon as they hold rows."""
    with Stage(db) as opened:
        yield opened
