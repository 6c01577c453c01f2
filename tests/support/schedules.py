"""Schedules that a queue may break on, step by step. Each ends with the check of everything that was delivered."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import psycopg

from tests.support.concurrency import Scene, Violation, maintain, next_batch, read_events
from tests.support.server import Database
from tests.support.waiting import SECONDS, until

# Runs in the session named "slow" in front of what a function does, in all others never.
GATE = "if current_setting('application_name') = 'slow' then perform pg_advisory_xact_lock(7); end if;"


class Call:
    """A statement under way in a session of its own."""

    def __init__(self, connection: psycopg.Connection[Any], statement: str) -> None:
        self.connection = connection
        self.pid = connection.info.backend_pid
        self.error: psycopg.Error | None = None
        self._thread = threading.Thread(target=self._run, args=[statement])
        self._thread.start()

    def _run(self, statement: str) -> None:
        try:
            self.connection.execute(statement.encode())
        except psycopg.Error as error:
            self.error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(SECONDS)
        assert self.done
        if self.error:
            raise self.error


class Stage:
    """A scene with the consumer `c`, whose segments rotate as soon as they hold rows; settings for one schedule."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.scene = Scene(db)
        self._stack = ExitStack()
        self._key = 0

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.push(self)
            self.owner = self.session()
            self.owner.execute("update gdq.queue set rotation_period = '1 microsecond'")
            self.stream = self.scene.register(self.owner, "c")
            opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def session(self, name: str = "quick") -> psycopg.Connection[Any]:
        session = self._stack.enter_context(self.db.connect(application_name=name))
        # a call may still be waiting when a schedule has failed; each session is closed whatever becomes of the others
        self._stack.callback(session.cancel_safe)
        return session

    def settled(self, call: Call) -> None:
        """Wait until a call is done or waits for a lock."""
        until(lambda: call.done or self.value("select cardinality(pg_blocking_pids(%s)) > 0", call.pid))

    def value(self, query: str, *values: Any) -> Any:
        row = self.owner.execute(query.encode(), values or None).fetchone()
        return row[0] if row else None

    def insert(self, connection: psycopg.Connection[Any] | None = None) -> int:
        """One new row in `acct`."""
        self._key += 1
        (connection or self.owner).execute("insert into acct values (%s, nextval('label'))", [self._key])
        return self._key

    def tick(self) -> None:
        self.owner.execute("select gdq.force_tick('q')")

    def slot(self) -> int:
        """Which segment of `acct` is written."""
        return int(
            self.value(
                "select current_slot from gdq.log_ring join gdq.table_version using (version_id) where table_id = 1"
            )
        )

    def insert_log(self) -> str:
        """The log table that an INSERT into `acct` writes to now."""
        source = self.value(
            "select prosrc from pg_proc where oid = format('gdq_log.t%s_q1_i', 'acct'::regclass::oid)::regproc"
        )
        found = re.search(r"insert into (\S+)", source)
        assert found
        return found[1]

    def maintain(self) -> int:
        """All maintenance that is due; how many segments were emptied."""
        emptied = 0
        more = True
        while more:
            more, cleared = maintain(self.owner)
            emptied += cleared
        return emptied

    def activity(self) -> str:
        return str(
            self.value("select activity from gdq.log_ring join gdq.table_version using (version_id) where table_id = 1")
        )

    def consumed_log(self) -> int:
        """Consume and maintain; how many bytes the log of `acct` has."""
        self.tick()
        self.consume()
        self.maintain()
        return int(self.value("select gdq.log_bytes(1)"))

    def consume(self) -> None:
        """Apply all batches that there are."""
        while batch := next_batch(self.owner, "c"):
            batch_id, token, applied = batch
            changes = read_events(self.owner, batch_id, token)
            self.owner.execute("select gdq.finish_batch(%s, %s)", [batch_id, token])
            self.stream.applied.append(applied._replace(changes=changes))

    def finish(self) -> None:
        """Let the consumer catch up and check what it got."""
        self.tick()
        self.consume()
        self.scene.check(self.owner)

    def gate(self, function: str, body: str) -> Callable[[], object]:
        """Give `function` a body that stops the session named "slow" until the result is called."""
        definition = f"create or replace function {function} language plpgsql volatile as $$ begin {body} end $$"
        self.owner.execute(definition.encode())
        keeper = self.session()
        keeper.execute("select pg_advisory_lock(7)")
        return lambda: keeper.execute("select pg_advisory_unlock(7)")


def tick_overtaken(stage: Stage) -> None:
    """A ticker takes a snapshot and is held up before it stores it; another one takes a tick meanwhile."""
    body = f"""{GATE} return pg_snapshot_xmax(a) <= pg_snapshot_xmax(b)
              and not exists (select from pg_snapshot_xip(b) x where pg_visible_in_snapshot(x, a));"""
    open_gate = stage.gate("gdq.snapshot_le(a pg_snapshot, b pg_snapshot) returns boolean", body)
    slow = Call(stage.session("slow"), "select gdq.force_tick('q')")
    stage.settled(slow)
    assert not slow.done
    stage.insert()
    quick = Call(stage.session(), "select gdq.force_tick('q')")
    stage.settled(quick)
    stage.consume()
    open_gate()
    slow.join()
    quick.join()
    stage.consume()
    stage.insert()
    stage.finish()


def sequence_beside_tick(stage: Stage) -> None:
    """A ticker is held up before its snapshot; a writer takes a value of a sequence meanwhile and commits."""
    stage.owner.execute("create sequence s; select gdq.add_sequence('q', 's')")
    number = "coalesce(pg_sequence_last_value('gdq_log.q1_ev'), 0)"
    open_gate = stage.gate("gdq.last_event(queue_id integer) returns bigint", f"{GATE} return {number};")
    slow = Call(stage.session("slow"), "select gdq.force_tick('q')")
    stage.settled(slow)
    assert not slow.done
    stage.owner.execute("begin; select nextval('s')")
    stage.insert()
    stage.owner.execute("commit")
    open_gate()
    slow.join()
    batch = next_batch(stage.owner, "c")
    assert batch
    if not stage.value("select is_called from gdq.batch_sequences(%s, %s)", *batch[:2]):
        raise Violation("the sequence is behind a transaction of the batch")
    stage.finish()


def worker_taken_over(stage: Stage) -> None:
    """A worker reads a batch and pauses; another takes it over and finishes; the first goes on."""
    stage.insert()
    stage.tick()
    first, second = stage.session(), stage.session()
    one = next_batch(first, "c")
    assert one
    changes = read_events(first, one[0], one[1])
    second.execute("begin")
    two = next_batch(second, "c")
    assert two
    assert two[0] == one[0]
    third = Call(stage.session(), "select * from gdq.next_batch('q', 'c')")
    stage.settled(third)
    held = not third.done
    try:
        second.execute("select gdq.finish_batch(%s, %s)", two[:2])
    except psycopg.Error as error:
        raise Violation("a worker lost the batch that it held") from error
    stage.stream.applied.append(two[2]._replace(changes=changes))
    second.execute("commit")
    third.join()
    try:
        first.execute("select gdq.finish_batch(%s, %s)", one[:2])
    except psycopg.Error as error:
        if error.sqlstate != "GDQ01":
            raise
    else:
        stage.stream.applied.append(one[2]._replace(changes=changes))
    stage.finish()
    if not held:
        raise Violation("two workers held the consumer at once")


def row_versions(stage: Stage) -> None:
    """Updates in both modes and moves between partitions, replayed by their images."""
    stage.owner.execute(
        "insert into item values (1, nextval('label')); insert into part values (1, 0, nextval('label'))"
    )
    key = stage.insert()
    for region in (1, 2, 0):
        stage.owner.execute("update acct set label = nextval('label') where id = %s", [key])
        stage.owner.execute("update item set label = nextval('label'), id = id + 1")
        stage.owner.execute("update item set label = nextval('label')")
        stage.owner.execute("update part set label = nextval('label'), region = %s", [region])
    stage.owner.execute("delete from acct; delete from item; delete from part")
    stage.finish()


def long_writer(stage: Stage) -> None:
    """A transaction is open over several ticks, beside others that come and go, one of them prepared."""
    long, other = stage.session(), stage.session()
    long.execute("begin")
    stage.insert(long)
    other.execute("begin")
    stage.insert(other)
    for _ in range(3):
        stage.insert()
        stage.insert(long)
        stage.tick()
        stage.consume()
        stage.maintain()
    other.execute("prepare transaction 'other'")
    stage.tick()
    stage.consume()
    new = stage.session()
    new.execute("begin")
    stage.insert(new)
    stage.insert()
    stage.tick()
    new.execute("commit")
    long.execute("commit")
    stage.consume()
    stage.insert()
    stage.tick()
    stage.consume()
    stage.maintain()
    stage.owner.execute("commit prepared 'other'")
    stage.finish()


SCHEDULES: dict[str, Callable[[Stage], None]] = {
    schedule.__name__: schedule
    for schedule in (tick_overtaken, sequence_beside_tick, worker_taken_over, row_versions, long_writer)
}


def play(db: Database, schedule: str) -> None:
    """Run one schedule on a database without queues; Violation when the queue got it wrong."""
    with Stage(db) as stage:
        SCHEDULES[schedule](stage)
