"""Pause and resume of queues and consumers."""

from __future__ import annotations

import json

import pytest
from psycopg import errors

from tests.support.concurrency import next_batch
from tests.support.programs import gdq
from tests.support.schedules import Stage


def test_paused_queue_takes_no_ticks_and_gives_no_batches(stage: Stage) -> None:
    stage.owner.execute("select gdq.set_queue('q', ticker_max_count => 1, ticker_max_lag => '0')")
    stage.insert()
    stage.tick()
    for says in ("paused queue q\n", "already paused: queue q\n"):
        assert gdq("pause", "q", dsn=stage.db.dsn).stderr == says
    [queue] = json.loads(gdq("queues", "--json", dsn=stage.db.dsn).stdout)
    assert queue["paused"] is True
    stage.insert()
    assert stage.value("select gdq.ticker()") == 0
    assert stage.value("select gdq.ticker('q')") == 0
    assert next_batch(stage.owner, "c") is None
    stage.owner.execute("select gdq.create_view('v', 'q', 'select', 's.v', array['acct'::regclass])")
    for call in ("force_tick('q')", "begin_refresh('q', 'view:v')"):
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="is paused"):
            stage.owner.execute(f"select gdq.{call}".encode())
    stage.owner.execute("select gdq.drop_view('v')")
    stage.insert()
    stage.maintain()
    for says in ("resumed queue q\n", "not paused: queue q\n"):
        assert gdq("resume", "q", dsn=stage.db.dsn).stderr == says
    assert stage.value("select gdq.ticker()") == 1
    stage.finish()


@pytest.mark.long
def test_paused_consumer_gets_nothing_and_loses_nothing(stage: Stage) -> None:
    stage.owner.execute("select gdq.register_consumer('q', 'other')")
    stage.insert()
    stage.tick()
    held = next_batch(stage.owner, "c")
    assert held
    for says in ("paused consumer c on q\n", "already paused: consumer c on q\n"):
        assert gdq("pause", "q", "c", dsn=stage.db.dsn).stderr == says
    assert next_batch(stage.owner, "c") is None
    assert next_batch(stage.owner, "other") is not None
    listed = json.loads(gdq("consumers", "q", "--json", dsn=stage.db.dsn).stdout)
    assert {info["consumer_name"]: info["paused"] for info in listed} == {"c": True, "other": False}
    stage.owner.execute("select gdq.unregister_consumer('q', 'other')")
    stage.insert()
    stage.tick()
    assert stage.maintain() == 0
    assert gdq("resume", "q", "c", dsn=stage.db.dsn).stderr == "resumed consumer c on q\n"
    stage.finish()
    assert stage.maintain() == 1


def test_batch_handed_out_before_may_be_finished(stage: Stage) -> None:
    stage.insert()
    stage.tick()
    held = next_batch(stage.owner, "c")
    assert held
    stage.owner.execute("select gdq.pause('q', 'c'), gdq.pause('q')")
    assert stage.value("select gdq.finish_batch(%s, %s)", *held[:2]) is True
    assert next_batch(stage.owner, "c") is None


def test_what_is_paused_gets_nothing_and_is_held(stage: Stage) -> None:
    stage.owner.execute("select gdq.set_queue('q', ticker_max_count => 1, ticker_max_lag => '0')")
    for paused, ticks in (("'q', 'c'", 1), ("'q'", 0)):
        stage.insert()
        stage.maintain()
        stage.tick()
        stage.insert()
        stage.owner.execute(f"select gdq.pause({paused})".encode())
        assert stage.value("select gdq.ticker()") == ticks
        assert next_batch(stage.owner, "c") is None
        stage.maintain()
        stage.owner.execute(f"select gdq.resume({paused})".encode())
        stage.tick()
        stage.consume()
    stage.finish()
