"""Schedules that members and retries may break on; importing this adds them to SCHEDULES."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.support.concurrency import Applied, Snapshot, Violation, read_events
from tests.support.schedules import SCHEDULES, Call, Stage

NEXT = """select batch_id, token::text, tick_from, tick_to, snapshot_from::text, snapshot_to::text
            from gdq.next_batch('q', 'c', %s, member => %s, dead_after => %s)"""
FINISH = "select gdq.finish_batch(%s, %s)"

Taken = tuple[int, str, Applied]


def next_of(
    connection: psycopg.Connection[Any], member: str | None, dead_after: str = "1 hour", max_events: int = 1
) -> Taken | None:
    """The next batch of a member of the consumer `c`."""
    row = connection.execute(NEXT, [max_events, member, dead_after]).fetchone()
    if row is None:
        return None
    applied = Applied(row[2], row[3], Snapshot.parse(row[4]), Snapshot.parse(row[5]), [])
    return row[0], row[1], applied


def finish(stage: Stage, connection: psycopg.Connection[Any], taken: Taken) -> None:
    changes = read_events(connection, taken[0], taken[1])
    connection.execute(FINISH, taken[:2])
    stage.stream.applied.append(taken[2]._replace(changes=changes))


def ask_at_once(stage: Stage, a: psycopg.Connection[Any], b: psycopg.Connection[Any]) -> tuple[Taken, Taken]:
    """Member b asks for a batch while a has one opened and not committed; the batch of each."""
    a.execute("begin")
    older = next_of(a, "a")
    assert older
    asking = Call(b, "select * from gdq.next_batch('q', 'c', 1, member => 'b')")
    stage.settled(asking)
    if asking.done:
        raise Violation("two members opened batches at once")
    a.execute("commit")
    asking.join()
    younger = next_of(b, "b")
    assert younger
    if younger[0] == older[0]:
        raise Violation("two members have one batch")
    return older, younger


def finished(connection: psycopg.Connection[Any], call: Call) -> bool:
    """Whether a worker could finish, and has committed."""
    try:
        call.join()
    except psycopg.Error as error:
        if error.sqlstate != "GDQ01":
            raise
        connection.execute("rollback")
        return False
    connection.execute("commit")
    return True


def member_taken_over(stage: Stage) -> None:
    """Two members ask at once; the younger batch ends first; the older is taken over while its holder finishes."""
    for member in ("a", "b"):
        stage.owner.execute("select gdq.register_member('q', 'c', %s)", [member])
    for _ in range(2):
        stage.insert()
        stage.tick()
    a, b = stage.session(), stage.session()
    older, younger = ask_at_once(stage, a, b)
    changes = read_events(a, older[0], older[1])
    finish(stage, b, younger)
    for _ in range(3):
        stage.maintain()
        stage.owner.execute("select gdq.rotate_control(true, 1)")
    a.execute("begin")
    b.execute("begin")
    again = next_of(b, "b", dead_after="0")
    if again is None:
        raise Violation("the older batch is lost")
    assert again[0] == older[0]
    zombie = Call(a, f"select gdq.finish_batch({older[0]}, '{older[1]}')")
    stage.settled(zombie)
    b.execute("commit")
    if finished(a, zombie):
        stage.stream.applied.append(older[2]._replace(changes=changes))
    try:
        finish(stage, b, again)
    except psycopg.Error as error:
        raise Violation("a member lost the batch that it had taken over") from error
    for member in ("a", "b"):
        stage.owner.execute("select gdq.unregister_member('q', 'c', %s)", [member])
    stage.finish()


def retry_against_finish(stage: Stage) -> None:
    """An event is put aside in one session of a worker, and not committed, when another finishes the batch."""
    stage.insert()
    stage.tick()
    taken = next_of(stage.owner, None)
    assert taken
    stage.stream.applied.append(taken[2]._replace(changes=read_events(stage.owner, *taken[:2])))
    putting, finishing = stage.session(), stage.session()
    putting.execute("begin")
    ev_id = stage.value("select ev_id from gdq.get_batch(%s, %s)", *taken[:2])
    again = putting.execute("select gdq.retry_event(%s, %s, %s, '0')", [*taken[:2], ev_id]).fetchone()
    assert again == (True,)
    ending = Call(finishing, f"select gdq.finish_batch({taken[0]}, '{taken[1]}')")
    stage.settled(ending)
    putting.execute("commit")
    ending.join()
    stage.owner.execute("select gdq.rotate_control(true, 1)")
    brought = next_of(stage.owner, None)
    if brought is None or stage.value("select count(*) from gdq.get_retries(%s, %s)", *brought[:2]) != 1:
        raise Violation("an event that was put aside never came again")
    stage.owner.execute(FINISH, brought[:2])
    stage.finish()


SCHEDULES |= {schedule.__name__: schedule for schedule in (member_taken_over, retry_against_finish)}
