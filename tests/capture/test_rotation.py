"""Rotation and truncation: what they wait for (nothing), what they keep, and how much one call does."""

from __future__ import annotations

import psycopg
import pytest

from tests.support.concurrency import maintain, next_batch, read_events
from tests.support.schedules import Call, Stage


def consumed_segments(stage: Stage) -> list[str]:
    """Rows in two of the three segments, all of them consumed; the logs of idle segments."""
    logs = []
    for _ in range(2):
        stage.insert()
        logs.append(stage.insert_log())
        assert stage.value("select gdq.rotate_logs()") == 1
    stage.tick()
    stage.consume()
    return logs


def rows(stage: Stage, log: str) -> int:
    return int(stage.value(f"select count(*) from {log}"))


def test_logs_without_rows_do_not_rotate(stage: Stage) -> None:
    slot = stage.slot()
    assert stage.value("select gdq.rotate_logs()") == 0
    assert stage.slot() == slot
    stage.insert()
    assert stage.value("select gdq.rotate_logs()") == 1
    assert stage.value("select gdq.rotate_logs()") == 0


def test_rotation_by_period_and_by_size(stage: Stage) -> None:
    stage.insert()
    stage.owner.execute("update gdq.queue set rotation_period = '1 hour'")
    assert stage.value("select gdq.rotate_logs()") == 0
    stage.owner.execute("update gdq.queue set rotation_bytes = 1")
    assert stage.value("select gdq.rotate_logs()") == 1


def test_ring_stops_before_a_segment_with_rows(stage: Stage) -> None:
    """Nothing is consumed, so the third segment grows, and everything is there in the end."""
    for _ in range(5):
        stage.insert()
        assert stage.maintain() == 0
    assert stage.slot() == 2
    stage.finish()
    assert stage.maintain() == 3


@pytest.mark.server
def test_one_truncation_a_call(stage: Stage) -> None:
    logs = consumed_segments(stage)
    assert [rows(stage, log) for log in logs] == [1, 1]
    calls = [maintain(stage.owner)]
    while calls[-1][0]:
        calls.append(maintain(stage.owner))
    assert max(emptied for _, emptied in calls) == 1
    assert sum(emptied for _, emptied in calls) == 2
    assert [rows(stage, log) for log in logs] == [0, 0]


@pytest.mark.server
def test_truncation_gives_way_at_once(stage: Stage) -> None:
    """A reader, such as pg_dump, or a writer in one segment delays only that one; nobody waits."""
    logs = consumed_segments(stage)
    reader = stage.session()
    reader.execute(f"begin; select count(*) from {logs[0]}".encode())
    stage.owner.execute("set lock_timeout = '1ms'")
    assert stage.maintain() == 1
    assert [rows(stage, log) for log in logs] == [1, 0]
    writer = Call(stage.session(), f"insert into {logs[0]} (ev_id, ev_txid) select 0, 3")
    writer.join()
    reader.execute("commit")
    assert stage.maintain() == 1


@pytest.mark.server
def test_prepared_writer_keeps_its_segment(stage: Stage) -> None:
    late = stage.session()
    late.execute("begin")
    stage.insert(late)
    late.execute("prepare transaction 'late'")
    stage.insert()
    stage.tick()
    stage.consume()
    assert stage.maintain() == 0
    stage.owner.execute("commit prepared 'late'")
    assert stage.maintain() == 0
    stage.finish()
    assert stage.maintain() == 1


def test_rows_after_the_last_tick_are_kept(stage: Stage) -> None:
    """Nobody is registered; somebody who registers at the last tick gets what came after it."""
    stage.owner.execute("select gdq.unregister_consumer('q', 'c')")
    last = stage.value("select gdq.force_tick('q')")
    stage.insert()
    assert stage.maintain() == 0
    stage.owner.execute("select gdq.register_consumer('q', 'c', at_tick => %s)", [last])
    stage.tick()
    batch = next_batch(stage.owner, "c")
    assert batch
    assert len(read_events(stage.owner, *batch[:2])) == 1


def test_retention_keeps_consumed_rows(stage: Stage) -> None:
    stage.owner.execute("update gdq.queue set retention = '1 hour'")
    first = stage.value("select gdq.force_tick('q')")
    stage.insert()
    stage.tick()
    stage.consume()
    assert stage.maintain() == 0
    stage.owner.execute("select gdq.register_consumer('q', 'again', at_tick => %s)", [first])
    batch = next_batch(stage.owner, "again")
    assert batch
    assert len(read_events(stage.owner, *batch[:2])) == 1
    stage.owner.execute("select gdq.unregister_consumer('q', 'again')")
    stage.owner.execute("update gdq.tick set created_at = created_at - interval '2 hours'")
    assert stage.maintain() == 1


def test_registration_excludes_truncation(stage: Stage) -> None:
    """One that is not committed yet may need the rows: truncation passes them by."""
    first = stage.value("select gdq.force_tick('q')")
    stage.insert()
    stage.tick()
    stage.consume()
    session = stage.session()
    session.execute(f"begin; select gdq.register_consumer('q', 'd', at_tick => {first})".encode())
    assert stage.maintain() == 0
    session.execute("commit")
    assert stage.maintain() == 0
    batch = next_batch(stage.owner, "d")
    assert batch
    assert len(read_events(stage.owner, *batch[:2])) == 1


def test_reading_without_a_pause_does_not_stop_truncation(stage: Stage) -> None:
    """A transaction that reads a batch holds only the segments with its rows."""
    logs = consumed_segments(stage)
    stage.insert()
    stage.tick()
    reader = stage.session()
    reader.execute("begin")
    batch = next_batch(reader, "c")
    assert batch
    assert len(read_events(reader, *batch[:2])) == 1
    assert stage.maintain() == 2
    assert [rows(stage, log) for log in logs] == [0, 0]
    reader.execute("rollback")
    stage.finish()


def test_event_log_rotates_too(stage: Stage) -> None:
    for _ in range(4):
        stage.insert()
        stage.owner.execute("truncate item")
        stage.tick()
        while batch := next_batch(stage.owner, "c"):
            stage.owner.execute("select gdq.finish_batch(%s, %s)", batch[:2])
        stage.maintain()
    assert stage.value("select current_slot from gdq.event_ring") == 1
    assert stage.value("select count(*) from gdq.event_segments(1) s where pg_relation_size(s) > 0") == 0


@pytest.mark.server
def test_ddl_in_an_old_snapshot_does_not_hold_maintenance_up(stage: Stage) -> None:
    """It has replaced the capture functions and is not committed; rotation leaves that table alone."""
    stage.insert()
    stage.owner.execute("insert into item values (1, 1)")
    ddl = stage.session()
    ddl.execute("begin isolation level repeatable read; alter table acct add column more integer")
    maintenance = Call(stage.session(), "select gdq.maintain()")
    maintenance.join()
    slots = dict(
        stage.owner.execute("select version_id, current_slot from gdq.log_ring where version_id <= 2").fetchall()
    )
    assert slots == {1: 0, 2: 1}
    ddl.execute("rollback")
    stage.maintain()
    assert stage.slot() == 1
    stage.insert()
    stage.finish()


def test_drop_of_a_queue_beside_its_housekeeping(stage: Stage) -> None:
    stage.owner.execute("select gdq.create_queue('r')")
    dropper = stage.session()
    dropper.execute("begin; select gdq.drop_queue('r')")
    housekeeping = Call(stage.session(), "select gdq.ticker(); select gdq.maintain()")
    stage.settled(housekeeping)
    dropper.execute("commit")
    housekeeping.join()


def test_name_of_a_consumer_is_kept_for_its_other_queue(stage: Stage) -> None:
    """It is registered on one queue and, before that commits, unregistered from another."""
    stage.owner.execute("select gdq.create_queue('r')")
    session = stage.session()
    session.execute("begin; select gdq.register_consumer('r', 'c')")
    leaving = Call(stage.session(), "select gdq.unregister_consumer('q', 'c')")
    stage.settled(leaving)
    session.execute("commit")
    leaving.join()
    assert stage.value("select array_agg(consumer_name) from gdq.consumer_info('r')") == ["c"]


def test_maintenance_beside_a_session_that_drops_logs(stage: Stage) -> None:
    """What one finds the other may be dropping."""
    stage.owner.execute("alter table acct add column more int")
    stage.consume()
    versions = "select count(*) from gdq.table_version"
    before = stage.value(versions)
    with stage.db.connect() as dropping:
        for _ in range(20):
            dropping.execute("begin")
            dropping.execute("select gdq.maintain()")
            if dropping.execute(versions).fetchone() != (before,):
                break
            dropping.execute("commit")
        assert stage.value(versions) == before
        with stage.db.connect() as other:
            assert other.execute("select gdq.maintain()").fetchone() == (False,)
            with pytest.raises(psycopg.errors.LockNotAvailable):
                other.execute("select gdq.remove_table('q', 'acct', true)")
        dropping.execute("commit")
    assert stage.value(versions) < before
