"""`gdq refresh --follow --source slot`: what wakes it, what does not, and what it leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import psycopg
import pytest

from gdq.consumers.refresh import follow
from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.consumers.slot.slot import create_slot, drop_slot
from tests.support.programs import start_gdq
from tests.support.slot import VIEWS, Scene, writing
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.server


def equal(scene: Scene, name: str) -> bool:
    """Whether the target is the query, as one statement sees both."""
    query = f"""with held as (select r::text from out_{name} r), wanted as (select r::text from ({VIEWS[name]}) r)
        select not exists (table held except all table wanted) and not exists (table wanted except all table held)"""
    return scene.su.execute(query.encode()).fetchone() == (True,)


def runs(scene: Scene, name: str) -> list[str | None]:
    query = "select action from gdq.view_history(%s) order by started_at"
    return [action for (action,) in scene.su.execute(query, [name])]


def reads(scene: Scene, name: str) -> bool:
    """Whether somebody reads the view's slot."""
    query = "select active from pg_replication_slots where slot_name = %s"
    return scene.su.execute(query, [f"gdq_q_{name}"]).fetchone() == (True,)


def waits(scene: Scene, *names: str) -> bool:
    """Whether the views were refreshed, and their slots are listened to: a refresh ends its own stream first."""
    done = [runs(scene, name) for name in names]
    return all(actions and None not in actions for actions in done) and all(reads(scene, name) for name in names)


@contextmanager
def following(scene: Scene, *names: str) -> Iterator[subprocess.Popen[str]]:
    command = ("refresh", "--follow", "--source", "slot", "--interval", "0.05", "--json", *names)
    with start_gdq(*command, dsn=scene.db.su_dsn) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ended(process: subprocess.Popen[str], number: signal.Signals) -> tuple[list[RefreshResult], str]:
    process.send_signal(number)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    return [RefreshResult(**json.loads(line)) for line in out.splitlines()], err


def test_changes_arrive_and_nothing_is_left(scene: Scene) -> None:
    """Others' changes, which the publication sends too, and rolled back ones wake no view; Ctrl-C leaves slots idle."""
    for name in ("grouped", "counted"):
        scene.make(name, VIEWS[name])
    with following(scene, "grouped", "counted") as process:
        until(lambda: waits(scene, "grouped", "counted"))
        for n in range(3):
            scene.write(f"insert into fact (k, qty) values ({n}, 1)", "update fact set qty = qty + 1 where k = 2")
            until(lambda: equal(scene, "grouped"))
        scene.write("begin", "insert into few values (77, 1)", "rollback", "insert into item (id) values (77)")
        assert runs(scene, "counted") == ["full"]
        scene.write("insert into few values (78, 1)")
        until(lambda: runs(scene, "counted") == ["full", "delta"])
        until(lambda: waits(scene, "grouped", "counted"))
        told, err = ended(process, signal.SIGINT)
    assert err == ""
    assert [one.action for one in told if one.view_name == "counted"] == ["full", "delta"]
    assert not reads(scene, "grouped")
    assert scene.su.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone() == (0,)
    assert scene.su.execute("select count(*) from gdq.view_run where finished_at is null").fetchone() == (0,)
    scene.write("insert into fact (k, qty) values (1, 1)")
    assert [scene.both(name).action for name in ("grouped", "counted")] == ["delta", "none"]


@pytest.mark.long
def test_killed_while_waiting_and_at_work(scene: Scene) -> None:
    scene.make("grouped", VIEWS["grouped"])
    for _ in range(2):
        with following(scene, "grouped") as process:
            until(lambda: waits(scene, "grouped"))
            scene.write("insert into fact (k, qty) values (1, 1)")
            process.kill()
        until(lambda: not reads(scene, "grouped"))
        scene.write("insert into fact (k, qty) values (2, 1)")
        assert scene.both("grouped").action == "delta"


class Following:
    """A follower in a thread, which ends with the block; looks at everything often."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        monkeypatch.setattr("gdq.listener._LOOK_SECONDS", 0.2)
        self.told: list[RefreshResult] = []
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(scene, names))

    def _run(self, scene: Scene, names: tuple[str, ...]) -> None:
        with Refresher(scene.db.su_dsn) as refresher:
            follow.Follower(
                refresher,
                names,
                interval=0.02,
                slot=True,
                report=self.told.append,
                failed=lambda _, error: self.failed.append(str(error)),
            ).run(self._stop.is_set)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


@pytest.mark.long
def test_random_work_at_the_same_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the writers have ended, the views become what the queries are, and then nothing is refreshed any more."""
    names = ("outer_joined", "grouped", "picked")
    for name in names:
        scene.make(name, VIEWS[name])
    with Following(scene, monkeypatch, *names) as one:
        with writing(scene.db):
            until(lambda: len(one.told) > 12)
        # each view shows it, and slots keep the order: what came before and changed no row of a view is read by then
        scene.write("insert into item (id, note) values (99001, 'last')", "insert into fact (k, qty) values (99001, 1)")
        until(lambda: waits(scene, *names) and all(equal(scene, name) for name in names))
        told = len(one.told)
        scene.write("select pg_logical_emit_message(true, 'x', 'x')", "insert into few values (99, 1)")
    assert len(one.told) == told
    assert one.failed == []
    assert sum(result.action == "delta" for result in one.told) > 6
    assert {scene.both(name).action for name in names} == {"none"}


@pytest.mark.long
def test_what_no_row_tells_wakes_too(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRUNCATE comes by the slot; a rewrite, a lost stream and a slot that was made anew are seen at the next look."""
    scene.make("grouped", VIEWS["grouped"])
    with Following(scene, monkeypatch, "grouped") as one:
        until(lambda: waits(scene, "grouped"))
        scene.write("truncate fact")
        until(lambda: waits(scene, "grouped") and equal(scene, "grouped"))
        scene.write("insert into fact (k, qty) values (1, 1), (2, 2)")
        until(lambda: waits(scene, "grouped") and equal(scene, "grouped"))
        scene.write("alter table fact alter qty type int using qty + 1")
        until(lambda: waits(scene, "grouped") and equal(scene, "grouped"))
        told = len(one.told)
        scene.write("select pg_terminate_backend(active_pid) from pg_replication_slots where active")
        until(lambda: len(one.told) > told and waits(scene, "grouped"))
        assert one.failed == []
        with pytest.raises(psycopg.errors.ObjectInUse):
            drop_slot(scene.su, "q", "grouped")
        drop(scene, "grouped")
        scene.write("insert into fact (k, qty) values (3, 3)")
        until(lambda: one.failed != [])
        create_slot(scene.su, "q", "grouped", [f"public.{table}" for table in scene.published])
        until(lambda: waits(scene, "grouped") and equal(scene, "grouped"))
    assert "gdq_q_grouped" in one.failed[0]
    assert one.told[-1].reason == "slot gdq_q_grouped was not read for this view before"


def drop(scene: Scene, name: str) -> None:
    """Drop the slot though somebody reads it again and again."""

    def dropped() -> bool:
        scene.write("select pg_terminate_backend(active_pid) from pg_replication_slots where active")
        try:
            return drop_slot(scene.su, "q", name)
        except psycopg.errors.ObjectInUse:
            return False

    until(dropped)


@pytest.mark.long
def test_slot_with_a_prepared_transaction_waits(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a slot is not confirmed, and sends all again whenever it is listened to: what is applied wakes no more."""
    scene.make("grouped", VIEWS["grouped"], slot=False)
    create_slot(scene.su, "q", "grouped", ["public.fact"], two_phase=True)
    with Following(scene, monkeypatch, "grouped") as one:
        until(lambda: waits(scene, "grouped"))
        gid = f"follow_{scene.db.name}"
        scene.write("begin", "insert into fact (k, qty) values (7, 3)", f"prepare transaction '{gid}'")
        for n in range(2):
            scene.write(f"insert into fact (k, qty) values ({n}, 1)")
            until(lambda: waits(scene, "grouped") and equal(scene, "grouped"))
        told = len(one.told)
        scene.write("insert into item (id) values (78)")
        assert len(one.told) == told
        scene.write(f"commit prepared '{gid}'")
        until(lambda: waits(scene, "grouped") and equal(scene, "grouped"))
    assert {result.action for result in one.told[1:]} == {"delta"}
