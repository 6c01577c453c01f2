"""Slots that nobody reads are told of: when their view is dropped, and by the doctor (gdq.doctor)."""

from __future__ import annotations

from functools import partial

import pytest
from click.testing import CliRunner

from gdq.cli import main
from gdq.consumers.slot.slot import create_slot, drop_slot
from gdq.consumers.slot.source import SlotSource
from gdq.monitor.doctor import doctor
from tests.support.slot import VIEWS, Scene

pytestmark = pytest.mark.server


def unread(scene: Scene) -> list[tuple[str, str]]:
    """The object and the cure of each finding of a slot."""
    return [(one.object, one.cure) for one in doctor(scene.su) if one.code == "slot_unread"]


@pytest.mark.long
def test_view_is_dropped_and_its_slot_is_there(scene: Scene) -> None:
    for name in ("grouped", "counted"):
        scene.make(name, VIEWS[name])
        scene.both(name)
    run = partial(CliRunner().invoke, main)
    assert unread(scene) == []
    done = run(["drop-view", "--dsn", scene.db.su_dsn, "grouped"])
    assert done.exit_code == 0
    told = "slot gdq_q_grouped is still there and keeps the write-ahead log: drop it with gdq drop-slot q grouped"
    assert done.stderr.splitlines() == ["dropped view grouped", told]
    assert unread(scene) == [("gdq_q_grouped", "gdq drop-slot q grouped")]
    assert run(["drop-slot", "--dsn", scene.db.su_dsn, "q", "grouped"]).exit_code == 0
    assert unread(scene) == []
    done = run(["drop-view", "--dsn", scene.db.su_dsn, "grouped_queued"])
    assert done.stderr.splitlines() == ["dropped view grouped_queued"]


@pytest.mark.long
def test_slot_of_a_consumer_counts_once_it_was_read(scene: Scene) -> None:
    create_slot(scene.su, "q", "mirror", ["public.fact"])
    create_slot(scene.su, "other", "mirror", ["public.fact"])
    try:
        assert unread(scene) == [
            ("gdq_other_mirror", "select pg_drop_replication_slot('gdq_other_mirror')"),
            ("gdq_q_mirror", "gdq drop-slot q mirror"),
        ]
        with SlotSource(scene.db.su_dsn, "q", "mirror") as source:
            scene.write("insert into fact (k) values (1)")
            assert list(source.batches(once=True))
            assert [name for name, _ in unread(scene)] == ["gdq_other_mirror"]
        # what the owner of gdq may not see is no warning
        assert {one.severity for one in doctor(scene.su) if one.code == "slot_unread"} == {"note"}
        scene.write("grant usage on schema gdq_target to public", "grant select on gdq_target.slot_position to public")
        assert [name for name, _ in unread(scene)] == ["gdq_other_mirror"]
        assert {one.severity for one in doctor(scene.su) if one.code == "slot_unread"} == {"warning"}
    finally:
        for queue in ("q", "other"):
            drop_slot(scene.su, queue, "mirror")


def test_gdq_is_uninstalled_and_a_slot_is_there(scene: Scene) -> None:
    create_slot(scene.su, "q", "mirror", ["public.fact"])
    run = partial(CliRunner().invoke, main)
    done = run(["uninstall", "--yes", "--dsn", scene.db.dsn])
    told = "slots are still there and keep the write-ahead log: drop them with gdq drop-slot: gdq_q_mirror"
    assert (done.exit_code, done.stderr.splitlines()[-2:]) == (0, ["uninstalled", told])
    for said in ("dropped slot gdq_q_mirror", "already gone: slot gdq_q_mirror"):
        assert run(["drop-slot", "--dsn", scene.db.su_dsn, "q", "mirror"]).stderr.splitlines() == [said]
    assert run(["uninstall", "--yes", "--dsn", scene.db.dsn]).stderr.splitlines() == [
        "already gone: gdq is not installed here"
    ]
