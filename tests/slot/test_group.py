"""Groups of views from slots, one each: all at one snapshot, whatever is killed."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from click.testing import CliRunner

from gdq.cli import main
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.view.group import create_group
from tests.support.endings import Deaths, Killed
from tests.support.slot import VIEWS, Scene, writing

pytestmark = pytest.mark.server

NAMES = ("grouped", "outer_joined", "counted")


def refresh(scene: Scene) -> dict[str, str]:
    """Refresh the views, each of which is its query at the one snapshot; what was done."""
    check = dict.fromkeys(NAMES, scene.check)
    results = scene.refresher.refresh_together(NAMES, check=check, slot=True)
    return {one.view_name: one.action for one in results}


@pytest.fixture
def together(scene: Scene) -> Scene:
    """Views that have been loaded."""
    for name in NAMES:
        scene.make_alone(name, VIEWS[name], f"public.out_{name}")
    assert set(refresh(scene).values()) == {"full"}
    return scene


@pytest.mark.long
def test_random_work_at_the_same_time(together: Scene) -> None:
    done = Counter[str]()
    with writing(together.db):
        for _ in range(4):
            done.update(refresh(together).values())
    done.update(refresh(together).values())
    assert together.compared >= 6 * len(NAMES)
    assert done["delta"] > 4, done
    assert set(refresh(together).values()) == {"none"}


@pytest.mark.long
def test_one_in_full_and_the_others_from_changes(together: Scene) -> None:
    together.write("truncate few", "insert into fact (k, qty) values (1, 1)")
    assert refresh(together) == {"grouped": "delta", "outer_joined": "none", "counted": "full"}


@pytest.mark.long
def test_killed_and_run_again(together: Scene) -> None:
    points: tuple[RefreshPoint, ...] = ("exported", "applied", "committed")
    for point in points:
        together.write("insert into fact (k, qty) values (1, 1)", "update few set v = v", "update item set k = k + 1")
        before = [together.confirmed(name) for name in NAMES]

        with Refresher(together.db.su_dsn, at=Deaths([point])) as other, pytest.raises(Killed):
            other.refresh_together(NAMES, slot=True)
        assert [together.confirmed(name) for name in NAMES] == before
        done = refresh(together)
        assert done["grouped"] == ("none" if point == "committed" else "delta")
        assert all(together.confirmed(name) > place for name, place in zip(NAMES, before, strict=True))


@pytest.mark.long
def test_commands(together: Scene) -> None:
    run = partial(CliRunner().invoke, main)
    arguments = ["refresh", "--source", "slot", "--dsn", together.db.su_dsn]
    together.write("insert into fact (k, qty) values (1, 1)")
    done = run([*arguments, "--together", *NAMES])
    assert done.exit_code == 0, done.stderr
    assert "delta" in done.stdout
    create_group(together.su, "g", NAMES)
    together.write("insert into fact (k, qty) values (1, 1)")
    for chosen in (["--group", "g"], ["grouped"]):
        done = run([*arguments, *chosen])
        assert done.exit_code == 0, done.stderr
        assert all(name in done.stdout for name in NAMES)
    assert run(arguments).exit_code == 2
