"""A queue driven through random sequences of steps; every consumer must get every change exactly once, in order."""

from __future__ import annotations

import os
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.concurrency import Applied, Change, Scene, Stream, maintain, next_batch, read_events, read_typed
from tests.support.server import Database

EXAMPLES = int(os.environ.get("GDQ_MACHINE_EXAMPLES", "100"))
MORE = pytest.param(500, marks=[pytest.mark.long])

WRITERS = st.integers(0, 2)
TABLES = st.sampled_from(["acct", "item", "part"])
LEVELS = st.sampled_from(["read committed", "repeatable read", "serializable"])


class Writer:
    """A session that writes to rows of its own only, so that it never waits for another."""

    def __init__(self, connection: psycopg.Connection[Any], number: int) -> None:
        self.connection = connection
        self.number = number
        self.keys = 0
        self.savepoints = 0
        self.open = False

    def run(self, statement: str) -> None:
        try:
            self.connection.execute(statement.encode())
        except psycopg.errors.SerializationFailure:
            self.end("rollback")

    def end(self, how: str) -> None:
        if self.open:
            self.open, self.savepoints = False, 0
            self.run(how)

    def write(self, table: str, op: str) -> None:
        own = f"id % 10 = {self.number}"
        if op == "insert":
            self.keys += 1
            region = ", region" if table == "part" else ""
            value = f", {self.keys % 3}" if region else ""
            key = self.keys * 10 + self.number
            self.run(f"insert into {table} (id{region}, label) values ({key}{value}, nextval('label'))")
        elif op == "move":
            moved = "region = (region + 1) % 3" if table == "part" else "id = -id"
            self.run(f"update {table} set label = nextval('label'), {moved} where abs(id) % 10 = {self.number}")
        elif op == "update":
            self.run(f"update {table} set label = nextval('label') where {own}")
        else:
            self.run(f"delete from {table} where {own} and id % 20 < 10")


class Machine(RuleBasedStateMachine):
    """Three writers, the consumer c with a worker that may be in the midst of a batch, and all housekeeping."""

    scene: Scene
    owner: psycopg.Connection[Any]
    worker: psycopg.Connection[Any]
    writers: list[Writer]

    @initialize()
    def start(self) -> None:
        self.owner.execute("truncate acct, item, part, history")
        self.scene.streams.clear()
        self.consumers = 0
        self.stream = self._register()
        self.pending: tuple[tuple[int, str, Applied], list[Change]] | None = None

    def _register(self) -> Stream:
        self.consumers += 1
        return self.scene.register(self.owner, f"c{self.consumers}")

    @rule(writer=WRITERS, level=LEVELS)
    def begin(self, writer: int, level: str) -> None:
        """A transaction that has its snapshot before it writes."""
        if not self.writers[writer].open:
            self.writers[writer].run(f"begin isolation level {level}; select count(*) from label")
            self.writers[writer].open = True

    @rule(writer=WRITERS, table=TABLES, op=st.sampled_from(["insert", "insert", "update", "move", "delete"]))
    def write(self, writer: int, table: str, op: str) -> None:
        self.writers[writer].write(table, op)

    @rule(writer=WRITERS, back=st.booleans())
    def savepoint(self, writer: int, back: bool) -> None:
        it = self.writers[writer]
        if it.open and back and it.savepoints:
            it.run("rollback to s")
        elif it.open:
            it.savepoints += 1
            it.run("savepoint s")

    @rule(writer=WRITERS, how=st.sampled_from(["commit", "commit", "rollback"]))
    def end(self, writer: int, how: str) -> None:
        self.writers[writer].end(how)

    @rule(writer=WRITERS, level=LEVELS)
    def prepare(self, writer: int, level: str) -> None:
        """A transaction that is prepared, passed by a whole cycle, and committed from another session."""
        it = self.writers[writer]
        it.end("commit")
        it.run(f"begin isolation level {level}")
        it.write("acct", "insert")
        it.run("prepare transaction 'machine'")
        self.cycle("item")
        self.owner.execute("commit prepared 'machine'")

    @rule()
    def tick(self) -> None:
        self.owner.execute("select gdq.force_tick('q')")

    @rule(calls=st.integers(1, 4))
    def housekeeping(self, calls: int) -> None:
        for _ in range(calls):
            maintain(self.owner)

    @rule()
    def rotate_control(self) -> None:
        self.owner.execute("select gdq.rotate_control(false, 1)")

    @rule(table=st.integers(1, 3))
    def cool(self, table: int) -> None:
        self.owner.execute("select gdq.set_activity(%s, 'cooling')", [table])
        self.owner.execute("select gdq.update_activity()")

    @precondition(lambda self: self.pending is None)
    @rule(typed=st.booleans())
    def open_batch(self, typed: bool) -> None:
        """The worker reads a batch in a transaction that stays open."""
        self.worker.execute("begin")
        batch = next_batch(self.worker, "c1", 20)
        if batch is None:
            self.worker.execute("commit")
            return
        self.worker.execute("set local enable_seqscan = off")
        changes = (read_typed if typed else read_events)(self.worker, batch[0], batch[1])
        self.stream.note_read(batch[0], changes)
        self.pending = batch, changes

    @precondition(lambda self: self.pending is not None)
    @rule(how=st.sampled_from(["commit", "commit", "rollback"]))
    def close_batch(self, how: str) -> None:
        assert self.pending
        (batch_id, token, applied), changes = self.pending
        self.pending = None
        self.worker.execute("select gdq.finish_batch(%s, %s)", [batch_id, token])
        self.worker.execute(how.encode())
        if how == "commit":
            self.stream.applied.append(applied._replace(changes=changes))

    @rule()
    def late_consumer(self) -> None:
        if self.consumers < 3:
            self._register()

    @rule(table=TABLES)
    def cycle(self, table: str) -> None:
        """A change, a tick, all batches of every consumer, and maintenance until nothing is due."""
        self.writers[0].write(table, "insert")
        self.tick()
        self.consume()
        for _ in range(6):
            if not maintain(self.owner)[0]:
                break

    def consume(self) -> None:
        if self.pending is not None:
            self.close_batch("commit")
        for consumer, stream in self.scene.streams.items():
            while batch := next_batch(self.owner, consumer):
                batch_id, token, applied = batch
                changes = read_events(self.owner, batch_id, token)
                self.owner.execute("select gdq.finish_batch(%s, %s)", [batch_id, token])
                stream.applied.append(applied._replace(changes=changes))

    def teardown(self) -> None:
        for writer in self.writers:
            writer.end("commit")
        self.tick()
        self.consume()
        history = self.scene.check(self.owner) if any(s.applied for s in self.scene.streams.values()) else []
        self.total += len(history)
        for consumer in self.scene.streams:
            self.owner.execute("select gdq.unregister_consumer('q', %s)", [consumer])

    total = 0


@pytest.mark.parametrize("examples", [EXAMPLES, MORE])
def test_any_sequence_of_steps_is_delivered(db: Database, examples: int) -> None:
    scene = Scene(db)
    with db.connect() as owner, db.connect() as worker, db.connect() as a, db.connect() as b, db.connect() as c:
        owner.execute("update gdq.queue set rotation_period = '1 microsecond'")
        changes = 0

        class Run(Machine):
            def __init__(self) -> None:
                super().__init__()
                self.scene, self.owner, self.worker = scene, owner, worker
                self.writers = [Writer(connection, number) for number, connection in enumerate((a, b, c))]

            def teardown(self) -> None:
                nonlocal changes
                super().teardown()
                changes += self.total

        run_state_machine_as_test(
            Run,
            settings=settings(
                max_examples=examples,
                stateful_step_count=12,
                deadline=None,
                database=None,
                derandomize="GDQ_MACHINE_EXAMPLES" not in os.environ,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert changes > examples, "vacuous: hardly anything was written"


pytestmark = pytest.mark.timeout(1800)
