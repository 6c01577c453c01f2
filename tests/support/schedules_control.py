"""Schedules that seek and the copy of a table may break on; importing this adds them to tests.support.schedules."""

from __future__ import annotations

import psycopg

from tests.support.concurrency import Snapshot, State, Stream, Violation, next_batch, read_events, replay
from tests.support.schedules import GATE, SCHEDULES, Call, Stage


def seek_and_truncation(stage: Stage) -> None:
    """A seek back commits before the check of a truncation, is open during it, waits for one, and comes after it."""
    sought = stage.session()

    # the truncation has looked at the segment and waits; the seek commits; it looks again
    start = consumed_segment(stage)
    body = f"""if class = 'position' then {GATE} end if; return (x'676471'::bigint << 40) | (id::bigint << 3)
      | (case class when 'tick' then 1 when 'position' then 2 when 'capture' then 3 else 4 end);"""
    open_gate = stage.gate("gdq.lock_key(class text, id oid) returns bigint", body)
    slow = Call(stage.session("slow"), "select gdq.maintain()")
    stage.settled(slow)
    assert not slow.done
    seek(stage, sought, start)
    open_gate()
    slow.join()
    stage.finish()

    # the seek is not committed when the truncation comes
    start = consumed_segment(stage)
    sought.execute("begin")
    seek(stage, sought, start)
    stage.maintain()
    sought.execute("commit")
    stage.finish()

    # the truncation is not committed when the seek comes
    start = consumed_segment(stage)
    truncating = stage.session()
    truncating.execute("begin; select gdq.maintain()")
    assert stage.value("select count(*) from pg_locks where mode = 'AccessExclusiveLock' and granted") > 0
    waiting = Call(sought, f"select gdq.seek('q', 'c', at_tick => {start})")
    stage.settled(waiting)
    truncating.execute("commit")
    refused(stage, waiting, start)

    # the truncation has committed
    refused(stage, Call(sought, f"select gdq.seek('q', 'c', at_tick => {start})"), start)
    stage.finish()


def consumed_segment(stage: Stage) -> int:
    """A segment whose rows the consumer has read, and the tick before them."""
    stage.maintain()
    start = int(stage.value("select gdq.force_tick('q')"))
    stage.insert()
    assert stage.value("select gdq.rotate_logs()") == 1
    stage.tick()
    stage.consume()
    return start


def seek(stage: Stage, session: psycopg.Connection[object], tick: int) -> None:
    session.execute("select gdq.seek('q', 'c', at_tick => %s)", [tick])
    begin_at(stage, tick)


def begin_at(stage: Stage, tick: int) -> None:
    """What the consumer gets from now on is a stream of its own."""
    stage.stream = Stream(Snapshot.parse(stage.value("select snapshot::text from gdq.tick where tick_id = %s", tick)))
    stage.scene.streams["c"] = stage.stream


def refused(stage: Stage, call: Call, tick: int) -> None:
    """The seek is refused, or gives everything after the tick."""
    try:
        call.join()
    except psycopg.Error as error:
        if error.sqlstate != "GDQ02":
            raise
    else:
        begin_at(stage, tick)


def table_copied_under_writers(stage: Stage) -> None:
    """A table is copied at a snapshot that saw some writers and not others, of which one began long before it."""
    owner = stage.owner
    stage.insert()
    stage.tick()
    stage.consume()
    long = stage.session()
    long.execute("begin")
    stage.insert(long)
    with stage.db.connect("su") as su:
        su.execute("set session_replication_role = replica; insert into acct values (1000, 0)")
    stage.value("select gdq.note_resync(1, 'acct'::regclass, 'gap', 'a row without an event')")
    seen = stage.insert()
    owner.execute("insert into item values (1, nextval('label')); select gdq.insert_event('q', 'note', '{}')")
    with owner.transaction():
        owner.execute("set transaction isolation level repeatable read")
        snapshot = stage.value("select pg_current_snapshot()::text")
        copy = rows_of(stage, "acct")
    owner.execute("update acct set label = nextval('label') where id = %s", [seen])
    stage.insert()
    owner.execute("update item set label = nextval('label')")
    long.execute("commit")
    stage.insert()
    owner.execute("select gdq.resynced('q', 'c', 'acct', %s::pg_snapshot)", [snapshot])
    stage.tick()
    batch = next_batch(owner, "c")
    assert batch
    others = "select string_agg(op, ',') from gdq.get_batch(%s, %s) where op not in ('insert', 'update', 'delete')"
    state = replay(read_events(owner, *batch[:2]), copy)
    if stage.value(others, *batch[:2]) != "message" or state != {**rows_of(stage, "acct"), **rows_of(stage, "item")}:
        raise Violation("the copy and what came after it differ from the tables")


def rows_of(stage: Stage, table: str) -> State:
    return {key: label for key, label in stage.scene.contents(stage.owner).items() if key[0] == table}


for schedule in (seek_and_truncation, table_copied_under_writers):
    SCHEDULES[schedule.__name__] = schedule
