"""Schedules that rotation, truncation and quiet logs may break on; importing this adds them to SCHEDULES."""

from __future__ import annotations

import psycopg

from tests.support.concurrency import next_batch, read_events
from tests.support.schedules import GATE, SCHEDULES, Call, Stage
from tests.support.waiting import until


def snapshot_before_rotation(stage: Stage, isolation: str) -> None:
    """A transaction takes its snapshot; rotations, ticks, truncations; it writes for the first time, and commits."""
    late = stage.session()
    for first_write_after in range(4):
        stage.insert()
        late.execute(f"begin isolation level {isolation}; select count(*) from acct where id < 0".encode())
        emptied = rotations = 0
        for _ in range(first_write_after):
            before = stage.slot()
            stage.insert()
            stage.tick()
            stage.consume()
            emptied += stage.maintain()
            rotations += stage.slot() != before
        assert rotations == first_write_after
        assert emptied >= first_write_after - 1
        stage.insert(late)
        stage.maintain()
        stage.tick()
        stage.consume()
        stage.maintain()
        late.execute("commit")
        stage.maintain()
        stage.tick()
        stage.maintain()
        stage.consume()
    stage.finish()


def late_writer(stage: Stage) -> None:
    """A writer stands inside the capture function of a segment while the log rotates twice, and writes there then."""
    stage.insert()
    late = stage.session()
    stage.insert(late)
    keeper = stage.session()
    home, log = stage.slot(), stage.insert_log()
    rows = stage.value(f"select count(*) from {log}")
    keeper.execute(f"begin; lock table {log} in share mode".encode())
    writing = Call(late, "insert into acct values (1000, nextval('label'))")
    stage.settled(writing)
    assert not writing.done
    for step in (1, 2):
        stage.maintain()
        assert stage.slot() == (home + step) % 3
        stage.insert()
        stage.tick()
        stage.consume()
    keeper.execute("commit")
    writing.join()
    assert stage.insert_log() != log
    assert stage.value(f"select count(*) from {log}") == rows + 1
    stage.finish()
    stage.maintain()
    assert stage.value(f"select count(*) from {log}") == 0


def old_snapshot_maintains(stage: Stage) -> None:
    """Maintenance is called in a transaction whose snapshot is older than a rotation and a row."""
    stage.insert()
    maintainer = stage.session()
    maintainer.execute("begin isolation level repeatable read; select 1")
    before = stage.slot()
    stage.maintain()
    assert stage.slot() != before
    stage.insert()
    try:
        maintainer.execute("select gdq.maintain()")
        maintainer.execute("commit")
    except psycopg.Error as error:
        if error.sqlstate != "GDQ04":
            raise
        maintainer.execute("rollback")
    stage.finish()


def commit_before_truncation(stage: Stage) -> None:
    """A late writer commits between the look at a segment and the lock on it."""
    stage.insert()
    stage.tick()
    stage.consume()
    late = stage.session()
    late.execute("begin")
    stage.insert(late)
    home = stage.slot()
    stage.owner.execute("begin")
    stage.value("select gdq.rotate_logs()")
    stage.owner.execute("commit")
    assert stage.slot() != home
    body = f"""if class = 'position' then {GATE} end if; return (x'676471'::bigint << 40)
      | (array_position(array['tick', 'position', 'capture', 'control'], class)::bigint << 32) | id::bigint;"""
    open_gate = stage.gate("gdq.lock_key(class text, id oid) returns bigint", body)
    slow = Call(stage.session("slow"), "select gdq.maintain()")
    stage.settled(slow)
    assert not slow.done
    late.execute("commit")
    open_gate()
    slow.join()
    stage.finish()


def finish_before_control_rotation(stage: Stage) -> None:
    """A consumer finishes and has not committed when the slot that its position went to is to be emptied."""
    stage.owner.execute("alter function gdq.clear_control set lock_timeout = '10 min'")
    stage.insert()
    stage.tick()
    worker = stage.session()
    worker.execute("begin")
    batch = next_batch(worker, "c")
    assert batch
    stage.stream.applied.append(batch[2]._replace(changes=read_events(worker, batch[0], batch[1])))
    worker.execute("select gdq.finish_batch(%s, %s)", batch[:2])
    assert stage.value("select gdq.rotate_control(true, 1)") == 0
    emptying = Call(stage.session(), "select gdq.clear_control('position', 0, true)")
    stage.settled(emptying)
    assert not emptying.done
    worker.execute("commit")
    emptying.join()
    stage.finish()


def empty_log(stage: Stage) -> None:
    """Consume and empty the log of `acct`, then have it cool down."""
    stage.insert()
    until(lambda: stage.consumed_log() == 0)
    assert stage.value("select gdq.set_activity(1, 'cooling')")


def late_writer_of_a_quiet_log(stage: Stage) -> None:
    """A writer stands inside a capture function that does not announce its change while the log is to become quiet."""
    stage.insert()
    until(lambda: stage.consumed_log() == 0)
    keeper = stage.session()
    keeper.execute(f"begin; lock table {stage.insert_log()} in share mode".encode())
    writing = Call(stage.session(), "insert into acct values (1000, nextval('label'))")
    stage.settled(writing)
    assert stage.value("select gdq.set_activity(1, 'cooling')")
    stage.value("select gdq.update_activity()")
    keeper.execute("commit")
    writing.join()
    stage.finish()


def writers_of_a_quiet_log(stage: Stage) -> None:
    """Writers of every kind to a log that nobody looks at unless it is announced, while it becomes busy again."""
    empty_log(stage)
    old, prepared, rolled_back = stage.session(), stage.session(), stage.session()
    old.execute("begin isolation level repeatable read; select 1")
    until(lambda: stage.value("select gdq.update_activity()") is not None and stage.activity() == "quiet")
    prepared.execute("begin")
    stage.insert(prepared)
    prepared.execute("prepare transaction 'quiet'")
    rolled_back.execute("begin; savepoint s")
    stage.insert(rolled_back)
    rolled_back.execute("rollback to s")
    stage.insert(rolled_back)
    rolled_back.execute("commit")
    stage.tick()
    stage.consume()
    stage.insert(old)
    old.execute("commit")
    stage.owner.execute("update acct set label = nextval('label'); delete from acct where id = 1")
    stage.tick()
    stage.consume()
    until(lambda: stage.value("select gdq.update_activity()") is not None and stage.activity() == "busy")
    stage.insert()
    stage.owner.execute("commit prepared 'quiet'")
    stage.finish()


SCHEDULES["repeatable_read_before_rotation"] = lambda stage: snapshot_before_rotation(stage, "repeatable read")
SCHEDULES["serializable_before_rotation"] = lambda stage: snapshot_before_rotation(stage, "serializable")
SCHEDULES |= {
    schedule.__name__: schedule
    for schedule in (
        late_writer,
        old_snapshot_maintains,
        commit_before_truncation,
        finish_before_control_rotation,
        late_writer_of_a_quiet_log,
        writers_of_a_quiet_log,
    )
}
