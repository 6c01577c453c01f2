"""Views from a slot whose targets are lake tables or in another PostgreSQL: no transaction has target and slot."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.view.view import view_history
from tests.support.endings import Deaths, Killed
from tests.support.slot import VIEWS, Scene, writing

pytestmark = pytest.mark.server

# Rows that come and go by sign, and by key.
NAMES = ("bag", "outer_joined", "grouped")
LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("delta", "iceberg", "elsewhere")]


@pytest.fixture(params=["parquet", *LONG])
def targets(scene: Scene, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Views with targets of one kind, loaded."""
    parameters = conninfo_to_dict(scene.db.su_dsn)
    passwords = tmp_path / "passwords"
    passwords.touch(mode=0o600)
    passwords.write_text(f"{parameters['host']}:*:*:*:{parameters.pop('password')}\n")
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    far = make_conninfo("", **parameters)
    for name in NAMES:
        if request.param == "elsewhere":
            scene.make_alone(name, VIEWS[name], f"public.far_{name}", target_dsn=far)
        else:
            place = f"{tmp_path}/w/ns.{name}" if request.param == "iceberg" else f"{tmp_path}/{name}"
            scene.make_alone(name, VIEWS[name], f"{request.param}:{place}")
        assert verify_with(scene.refresher, name, slot=True).equal
    return scene


def actions(scene: Scene, name: str) -> list[str | None]:
    """Of all refreshes that were not verified, newest first."""
    return [run.action for run in view_history(scene.su, name, 100)]


@pytest.mark.long
def test_random_work_at_the_same_time(targets: Scene) -> None:
    with writing(targets.db):
        for _ in range(2):
            for name in NAMES:
                assert verify_with(targets.refresher, name, slot=True).equal
    for name in NAMES:
        assert verify_with(targets.refresher, name, slot=True).equal
        assert targets.refresher.refresh(name, slot=True).action == "none"
    done = Counter(action for name in NAMES for action in actions(targets, name))
    assert done["full"] == len(NAMES)
    assert done["delta"] > len(NAMES)


@pytest.mark.long
def test_killed_and_run_again(targets: Scene) -> None:
    """Also after the target's commit, when the slot's place is not stored yet."""
    points: tuple[RefreshPoint, ...] = ("exported", "ticked", "committed")
    for point in points:
        targets.write(
            "insert into fact (k, qty, label) values (1, 1, 'a'), (2, 2, null)", "delete from fact where k = 3"
        )
        before = targets.confirmed("grouped")

        with Refresher(targets.db.su_dsn, at=Deaths([point])) as other, pytest.raises(Killed):
            other.refresh("grouped", slot=True)
        assert targets.confirmed("grouped") == before
        assert verify_with(targets.refresher, "grouped", slot=True).equal
        assert actions(targets, "grouped")[0] == ("none" if point == "committed" else "delta")
        assert targets.confirmed("grouped") > before
    targets.write("insert into fact (k, qty) values (1, 1)")
    assert verify_with(targets.refresher, "grouped", slot=True).equal
    assert actions(targets, "grouped")[0] == "delta"


@pytest.mark.long
def test_lake_that_was_put_back(scene: Scene, tmp_path: Path) -> None:
    """The slot does not have any more what came after: loaded in full, and said."""
    folder = tmp_path / "grouped"
    scene.make_alone("grouped", VIEWS["grouped"], f"parquet:{folder}")
    scene.refresher.refresh("grouped", slot=True)
    shutil.copytree(folder, tmp_path / "kept", symlinks=True)
    scene.write("insert into fact (k, qty) values (1, 1)")
    assert scene.refresher.refresh("grouped", slot=True).action == "delta"
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "kept", folder, symlinks=True)
    scene.write("insert into fact (k, qty) values (2, 1)")
    assert verify_with(scene.refresher, "grouped", slot=True).equal
    assert view_history(scene.su, "grouped", 1)[0].reason == "slot gdq_q_grouped is ahead of the target"
    scene.write("insert into fact (k, qty) values (2, 1)")
    assert scene.refresher.refresh("grouped", slot=True).action == "delta"
