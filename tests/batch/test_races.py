"""Every interleaving of the steps of sessions that race each other; whatever the order, consumers get everything once.

A race names its sessions and their steps. A step that waits for another session is left waiting while the others go
on, as in PostgreSQL's isolation tester; what it waited for is over when all have come to their end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import permutations
from queue import SimpleQueue
from typing import Any

import psycopg
import pytest

from tests.support.concurrency import next_batch, read_events
from tests.support.schedules import Stage
from tests.support.server import Database
from tests.support.waiting import until

Step = str | Callable[["Runner"], None]

# What a session may be told without harm to anybody: the statement was refused, and the rest of its steps are void.
REFUSALS = ("GDQ01", "GDQ02", "40001", "55P03")


@dataclass
class Runner:
    """A session whose steps run one after the other in a thread of its own."""

    stage: Stage
    connection: psycopg.Connection[Any]
    steps: SimpleQueue[tuple[Step, threading.Event] | None] = field(default_factory=SimpleQueue)
    errors: list[BaseException] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while item := self.steps.get():
            step, done = item
            try:
                if not self.errors:
                    step(self) if callable(step) else self.connection.execute(step.encode())
            except (psycopg.Error, AssertionError) as error:
                self.errors.append(error)
            finally:
                done.set()

    def start(self, step: Step) -> None:
        """Run a step, and wait until it is done or waits for another session."""
        done = threading.Event()
        self.steps.put((step, done))
        pid = self.connection.info.backend_pid
        until(lambda: done.is_set() or self.stage.value("select cardinality(pg_blocking_pids(%s)) > 0", pid))

    def end(self) -> None:
        self.steps.put(None)
        self._thread.join(20)
        assert not self._thread.is_alive(), "a session waits for ever"
        if self.connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self.connection.rollback()


def maintain(runner: Runner) -> None:
    while runner.connection.execute("select gdq.maintain()").fetchone() == (True,):
        pass


def consume(runner: Runner) -> None:
    """Apply all batches that there are, one transaction each."""
    while True:
        with runner.connection.transaction():
            batch = next_batch(runner.connection, "c")
            if batch is None:
                return
            changes = read_events(runner.connection, batch[0], batch[1])
            runner.connection.execute("select gdq.finish_batch(%s, %s)", batch[:2])
        runner.stage.stream.applied.append(batch[2]._replace(changes=changes))


def read(runner: Runner) -> None:
    """Open a batch and read it, in transactions of their own."""
    batch = next_batch(runner.connection, "c")
    if batch is not None:
        runner.memory["batch"] = batch, read_events(runner.connection, batch[0], batch[1])


def finish(runner: Runner) -> None:
    if "batch" in runner.memory:
        batch, changes = runner.memory["batch"]
        if runner.connection.execute("select gdq.finish_batch(%s, %s)", batch[:2]).fetchone() == (True,):
            runner.stage.stream.applied.append(batch[2]._replace(changes=changes))


INSERT = "insert into acct select coalesce(max(id), 0) + 1, nextval('label') from acct"
WRITE = "insert into part values (nextval('label'), 0, nextval('label'))"
TICK = "select gdq.force_tick('q')"
AT_FIRST_TICK = "select gdq.register_consumer('q', 'new', (select min(tick_id) from gdq.tick))"

RACES: dict[str, list[list[Step]]] = {
    "rotate x repeatable read writer": [
        ["begin isolation level repeatable read; select 1", WRITE, "commit"],
        [maintain, TICK, consume, maintain],
    ],
    "rotate x stalled writer": [["begin", WRITE, WRITE, "commit"], [maintain, maintain]],
    "ddl x writer": [
        ["begin; alter table part add column if not exists x int; alter table part drop column x", "commit"],
        ["begin", WRITE, WRITE, "commit"],
    ],
    "ddl x rotate": [
        ["begin; alter table part add column if not exists x int; alter table part drop column x", "commit"],
        [maintain, TICK, maintain],
    ],
    "attach x writer": [
        [
            "create table leaf (like part)",
            "alter table part attach partition leaf for values in (7)",
            "alter table part detach partition leaf; drop table leaf",
        ],
        ["begin", WRITE, "commit"],
    ],
    "register x truncate": [["begin; " + AT_FIRST_TICK, "commit"], [TICK, consume, maintain]],
    "seek x truncate": [
        ["begin; select gdq.seek('q', 'other', (select min(tick_id) from gdq.tick))", "commit"],
        [TICK, consume, maintain],
    ],
    "two tickers": [["begin; " + TICK, "commit"], ["begin; " + TICK, "commit"], [WRITE]],
    "two consumers": [[TICK, consume], [TICK, consume], [WRITE]],
    "takeover x zombie": [[read, finish], [read, finish], [maintain]],
    "two-phase commit x rotate": [
        ["begin; " + WRITE + "; prepare transaction 'race'", "commit prepared 'race'"],
        [maintain, TICK, consume, maintain],
    ],
}


def interleavings(lengths: list[int]) -> Iterator[tuple[int, ...]]:
    """Every order in which sessions with so many steps can take turns."""
    yield from sorted(set(permutations([n for n, length in enumerate(lengths) for _ in range(length)])))


@pytest.mark.parametrize("race", RACES)
def test_race(db: Database, race: str) -> None:
    sessions = RACES[race]
    with Stage(db) as stage:
        stage.owner.execute("update gdq.queue set retention = '1 hour'" if "seek" in race else "select 1")
        connections = [stage.session() for _ in sessions]
        for order in interleavings([len(steps) for steps in sessions]):
            stage.owner.execute(WRITE.encode())
            stage.owner.execute(TICK.encode())
            stage.owner.execute("select gdq.register_consumer('q', 'other')")
            runners = [Runner(stage, connection) for connection in connections]
            left = [iter(steps) for steps in sessions]
            try:
                for turn in order:
                    runners[turn].start(next(left[turn]))
            finally:
                for runner in runners:
                    runner.end()
            for runner in runners:
                for error in runner.errors:
                    assert isinstance(error, psycopg.Error), error
                    assert error.sqlstate in REFUSALS, f"{race}, order {order}: {error.sqlstate} {error}"
            _check_others(stage)
            stage.finish()
            stage.maintain()


def _check_others(stage: Stage) -> None:
    """A consumer that was registered or moved back has every row that its position says it has not seen."""
    for consumer in ("new", "other"):
        if not stage.value("select count(*) from gdq.consumer where consumer_name = %s", consumer):
            continue
        position = stage.value(
            """select (gdq.position_of(subscription_id)).snapshot::text
                 from gdq.subscription join gdq.consumer using (consumer_id) where consumer_name = %s""",
            consumer,
        )
        stage.tick()
        due = stage.value(
            "select count(*) from history where not pg_visible_in_snapshot(txid::text::xid8, %s::pg_snapshot)", position
        )
        got = 0
        while batch := next_batch(stage.owner, consumer):
            got += len(read_events(stage.owner, batch[0], batch[1]))
            stage.owner.execute("select gdq.finish_batch(%s, %s)", batch[:2])
        assert got == due, f"{consumer} got {got} of {due} changes"
        stage.owner.execute("select gdq.unregister_consumer('q', %s)", [consumer])


@pytest.mark.server
def test_more_savepoints_than_a_snapshot_holds(stage: Stage) -> None:
    """Past 64 of them a snapshot no longer lists them; a change is its transaction's, whichever savepoint wrote it."""
    session = stage.session()
    session.execute("begin")
    for number in range(150):
        session.execute("savepoint s")
        stage.insert(session)
        if number % 3 == 0:
            session.execute("rollback to s")
        if number % 50 == 49:
            stage.insert()
            stage.tick()
            stage.consume()
    session.execute("commit")
    stage.tick()
    batch = next_batch(stage.owner, "c")
    assert batch
    assert len(read_events(stage.owner, *batch[:2])) == 100
    stage.finish()
