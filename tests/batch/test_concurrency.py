"""Every committed change exactly once for every consumer, whatever happens at the same time."""

from __future__ import annotations

import pytest

import tests.support.schedules_control
import tests.support.schedules_retry
import tests.support.schedules_rotation  # noqa: F401 (each adds its own)
from tests.support.concurrency import Scene
from tests.support.schedules import SCHEDULES, play
from tests.support.server import Database
from tests.support.workload import Workload

pytestmark = pytest.mark.server


def test_exactly_once_under_load(db: Database, request: pytest.FixtureRequest) -> None:
    scene = Scene(db)
    workload = Workload(scene, seed=request.session.config.getoption("--pg"))
    workload.run()
    with db.connect() as owner:
        scene.check(owner)
    assert not workload.vacuous(), workload.vacuous()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_exactly_once_in_a_schedule(db: Database, schedule: str) -> None:
    play(db, schedule)
