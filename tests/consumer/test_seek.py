"""Seek: to ticks and times, forward and back, and what refuses it."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from psycopg import errors

from gdq import StaleBatch
from gdq.errors import TruncatedPosition, mapped_errors
from tests.support.concurrency import next_batch, read_events
from tests.support.programs import gdq
from tests.support.schedules import Stage


def keys(stage: Stage) -> list[str | None]:
    """The keys of all that the consumer gets now, which it finishes."""
    stage.tick()
    found = []
    while batch := next_batch(stage.owner, "c"):
        found += [change.new_key for change in read_events(stage.owner, *batch[:2])]
        stage.owner.execute("select gdq.finish_batch(%s, %s)", batch[:2])
    return found


def seek(stage: Stage, **place: Any) -> Any:
    ((name, value),) = place.items()
    with mapped_errors():
        return stage.value(f"select gdq.seek('q', 'c', {name} => %s)", value)


def test_forward_and_back(stage: Stage) -> None:
    ticks = [stage.value("select gdq.force_tick('q')")]
    for _ in range(3):
        stage.insert()
        ticks.append(stage.value("select gdq.force_tick('q')"))
    assert keys(stage) == ["1", "2", "3"]
    assert seek(stage, at_tick=ticks[1]) == ticks[1]
    assert keys(stage) == ["2", "3"]
    seek(stage, at_tick=ticks[0])
    assert keys(stage) == ["1", "2", "3"]
    seek(stage, at_tick=ticks[0])
    seek(stage, at_tick=ticks[2])
    assert keys(stage) == ["3"]
    stage.insert()
    assert seek(stage, to_now=True) > ticks[3]
    stage.insert()
    assert keys(stage) == ["5"]


def test_open_batch_and_its_tokens_become_stale(stage: Stage) -> None:
    start = stage.value("select gdq.force_tick('q')")
    stage.insert()
    stage.tick()
    batch = next_batch(stage.owner, "c")
    assert batch
    seek(stage, at_tick=start)
    for call in ("select gdq.finish_batch(%s, %s)", "select * from gdq.get_batch(%s, %s)"):
        with pytest.raises(StaleBatch), mapped_errors():
            stage.owner.execute(call.encode(), batch[:2])
    assert keys(stage) == ["1"]


def test_back_by_time_within_retention(stage: Stage) -> None:
    assert gdq("set-queue", "q", "retention=1 hour", dsn=stage.db.dsn).returncode == 0
    stage.insert()
    stage.tick()
    moment = stage.value("select clock_timestamp()")
    stage.insert()
    assert keys(stage) == ["1", "2"]
    stage.maintain()
    for time in (moment, "2020-01-01"):
        done = gdq("seek", "q", "c", "--time", str(time), dsn=stage.db.dsn)
        assert done.returncode == (time != moment), done.stderr
    assert done.stderr.startswith('Error: queue "q" has no tick as old as 2020-01-01')
    assert keys(stage) == ["2"]
    with pytest.raises(errors.InvalidParameterValue, match="future"):
        seek(stage, at_time="2100-01-01")


def test_retention_ends(stage: Stage) -> None:
    stage.owner.execute("select gdq.set_queue('q', retention => '1 hour')")
    start = stage.value("select gdq.force_tick('q')")
    stage.insert()
    assert keys(stage) == ["1"]
    assert stage.maintain() == 0
    assert stage.owner.execute("select gdq.set_queue('q', retention => '0')").fetchone() == (True,)
    assert stage.maintain() == 1
    with pytest.raises(TruncatedPosition):
        seek(stage, at_tick=start)


def test_places_that_are_refused(stage: Stage) -> None:
    start = stage.value("select gdq.force_tick('q')")
    stage.insert()
    assert keys(stage) == ["1"]
    assert stage.maintain() == 1
    done = gdq("seek", "q", "c", "--tick", str(start), dsn=stage.db.dsn)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 2)
    assert "no longer all there" in done.stderr
    with pytest.raises(errors.UndefinedObject, match="no tick 99999"):
        seek(stage, at_tick=99999)
    with pytest.raises(errors.InvalidParameterValue, match="one of"):
        stage.owner.execute("select gdq.seek('q', 'c')")
    assert gdq("seek", "q", "c", "--now", "--tick", "1", dsn=stage.db.dsn).returncode == 2
    stage.owner.execute("select gdq.create_view('v', 'q', 'select', 's.v', array['acct'::regclass])")
    for call in ("seek('q', 'view:v', to_now => true)", "set_tables('q', 'view:v', null)", "pause('q', 'view:v')"):
        with pytest.raises(errors.ObjectInUse, match='refreshes the view "v"'):
            stage.owner.execute(f"select gdq.{call}".encode())
    assert keys(stage) == []


def test_a_worker_at_work_is_not_disturbed(stage: Stage) -> None:
    stage.insert()
    stage.tick()
    worker = stage.session()
    worker.execute("begin")
    batch = next_batch(worker, "c")
    assert batch
    with pytest.raises(errors.LockNotAvailable, match="is at work"):
        seek(stage, to_now=True)
    worker.execute("select gdq.finish_batch(%s, %s)", batch[:2])
    worker.execute("commit")
    seek(stage, to_now=True)


@pytest.mark.long
def test_settings_are_checked(stage: Stage) -> None:
    stage.owner.execute("select gdq.set_queue('q', max_bytes => 1000000, ticker_max_count => 5)")
    [queue] = json.loads(gdq("queues", "--json", dsn=stage.db.dsn).stdout)
    assert (queue["max_bytes"], queue["ticker_max_count"], queue["paused"]) == (1000000, 5, False)
    for pair, says in (
        ("rotation_bytes=0", "setting rotation_bytes"),
        ("retention=-1 s", "setting retention"),
        ("max_bytes=-1", "setting max_bytes"),
        ("ticker_max_lag=soon", "invalid input syntax"),
    ):
        done = gdq("set-queue", "q", "ticker_idle_period=2 s", pair, dsn=stage.db.dsn)
        assert done.returncode == 1
        assert says in done.stderr.splitlines()[0]
    assert gdq("set-queue", "q", "speed=9", dsn=stage.db.dsn).returncode == 2
    assert gdq("set-queue", "q", "max_bytes=0", dsn=stage.db.dsn).stderr == "changed queue q\n"
    assert gdq("set-queue", "q", "max_bytes=0", dsn=stage.db.dsn).stderr == "already so: queue q\n"
    [queue] = json.loads(gdq("queues", "--json", dsn=stage.db.dsn).stdout)
    assert (queue["max_bytes"], queue["ticker_idle_period_seconds"]) == (None, 60.0)
    with pytest.raises(psycopg.errors.UndefinedObject):
        stage.owner.execute("select gdq.set_queue('none', max_bytes => 1)")


def test_back_over_events_that_wait_to_be_retried(stage: Stage) -> None:
    """What comes again in its place is not retried too; what lies before that, or belonged to a removed table, is."""
    owner = stage.owner
    owner.execute("create table gone (id int primary key); select gdq.add_table('q', 'gone')")
    owner.execute("insert into acct values (7, 0)")
    start = stage.value("select gdq.force_tick('q')")
    owner.execute("insert into acct values (8, 0); insert into gone values (9); select gdq.insert_event('q', 'm', '1')")
    stage.tick()
    batch = next_batch(owner, "c")
    assert batch
    put = """select count(gdq.retry_event(%s, %s, ev_id, '1 hour')) from gdq.get_batch(%s, %s)"""
    assert stage.value(put, *batch[:2], *batch[:2]) == 4
    owner.execute("select gdq.finish_batch(%s, %s)", batch[:2])
    stage.insert()
    assert keys(stage) == ["1"]
    owner.execute("select gdq.remove_table('q', 'gone')")
    waiting = "select op, key->>'id' from gdq.retry_info('q') order by ev_id"
    assert len(owner.execute(waiting).fetchall()) == 4

    seek(stage, at_tick=start)
    assert owner.execute(waiting).fetchall() == [("insert", "7"), ("insert", "9")]
    stage.tick()
    batch = next_batch(owner, "c")
    assert batch
    rows = owner.execute("select op, key->>'id' from gdq.get_batch(%s, %s)", batch[:2]).fetchall()
    assert rows == [("insert", "8"), ("message", None), ("insert", "1"), ("ddl", None)]
    ev_id = stage.value("select min(ev_id) from gdq.get_batch(%s, %s)", *batch[:2])
    owner.execute("select gdq.retry_event(%s, %s, %s, '1 hour')", [*batch[:2], ev_id])
    owner.execute("select gdq.finish_batch(%s, %s)", batch[:2])
    for _ in range(6):
        owner.execute("select gdq.rotate_control(true, 1)")
    assert owner.execute(waiting).fetchall() == [("insert", "7"), ("insert", "8"), ("insert", "9")]
    assert stage.value("select count(*) from gdq.retry_event") == 3


def test_batches_of_members_are_left_behind(stage: Stage) -> None:
    start = stage.value("select gdq.force_tick('q')")
    tokens = []
    for member in ("a", "b"):
        stage.owner.execute("select gdq.register_member('q', 'c', %s)", [member])
        stage.insert()
        stage.tick()
        query = "select batch_id, token from gdq.next_batch('q', 'c', member => %s)"
        tokens.append(stage.owner.execute(query.encode(), [member]).fetchone())
    assert stage.value("select gdq.finish_batch(%s, %s)", *(tokens[1] or ())) is True
    seek(stage, at_tick=start)
    with pytest.raises(StaleBatch), mapped_errors():
        stage.owner.execute("select gdq.finish_batch(%s, %s)", tokens[0])
    for member in ("a", "b"):
        stage.owner.execute("select gdq.unregister_member('q', 'c', %s)", [member])
    assert keys(stage) == ["1", "2"]
