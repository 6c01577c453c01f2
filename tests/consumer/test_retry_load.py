"""Workers that put events aside, die and are taken over, at once with rotation: every event is handled once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import psycopg
import pytest

from gdq import register_member
from tests.support.server import Database
from tests.support.waiting import SECONDS

EVENTS = 300

READ = """select ev_id, op, 0 from gdq.get_batch(%(id)s, %(token)s)
          union all select ev_id, op, retries from gdq.get_retries(%(id)s, %(token)s)"""


class Workers:
    """Members of one consumer. What they handle they note in `handled`, in the transaction that finishes the batch."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self.stop = threading.Event()

    def run(self) -> None:
        bodies = [*(lambda c, m=m: self.work(c, m) for m in "abc"), self.write, self.maintain]
        threads = [threading.Thread(target=self._guarded, args=[body]) for body in bodies]
        for thread in threads:
            thread.start()
        self.stop.wait(SECONDS)
        self.stop.set()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _guarded(self, body: Any) -> None:
        try:
            with self.db.connect() as connection:
                body(connection)
        except BaseException as error:  # the main thread raises it
            self.errors.append(error)
            self.stop.set()

    def write(self, connection: psycopg.Connection[Any]) -> None:
        for first in range(0, EVENTS, 5):
            connection.execute("insert into orders select generate_series(%s::int, %s)", [first, first + 4])
            connection.execute("select gdq.force_tick('q')")

    def maintain(self, connection: psycopg.Connection[Any]) -> None:
        while not self.stop.wait(0.01):
            connection.execute("select gdq.maintain()")
            row = connection.execute("select gdq.rotate_control(true, 1)").fetchone()
            self.counts["rotated"] += row[0] if row else 0

    def work(self, connection: psycopg.Connection[Any], member: str) -> None:
        rng = random.Random(member)
        query = "select batch_id, token from gdq.next_batch('q', 'c', 20, %s, '50 ms')"
        while not self.stop.is_set():
            batch = connection.execute(query, [member]).fetchone()
            if batch is None:
                row = connection.execute("select count(*) from handled").fetchone()
                if row and row[0] >= EVENTS and self.counts["stale"] and self.counts["rotated"]:
                    self.stop.set()
                self.stop.wait(0.01)
                continue
            try:
                self.handle(connection, rng, *batch)
            except psycopg.Error as error:
                if error.sqlstate != "GDQ01":
                    raise
                self.counts["stale"] += 1

    def handle(self, connection: psycopg.Connection[Any], rng: random.Random, batch_id: int, token: Any) -> None:
        batch = {"id": batch_id, "token": token}
        if rng.random() < 0.2:  # put aside in a transaction of its own; it counts only if this worker finishes
            events = connection.execute(READ, batch).fetchall()
            if events:
                self.put(connection, batch, events[0])
        if rng.random() < 0.2:
            time.sleep(0.06)  # long enough to be taken for dead
        with connection.transaction(force_rollback=rng.random() < 0.1):
            aside = connection.execute(
                "select ev_id, op from gdq.retry_event where batch_id = %(id)s and token = %(token)s", batch
            ).fetchall()
            for event in connection.execute(READ, batch).fetchall():
                if event[:2] in aside:
                    continue
                if event[2] < 3 and rng.random() < 0.2:
                    self.put(connection, batch, event)
                else:
                    connection.execute("insert into handled values (%s)", event[:1])
            connection.execute("select gdq.finish_batch(%(id)s, %(token)s)", batch)

    def put(self, connection: psycopg.Connection[Any], batch: dict[str, Any], event: tuple[Any, ...]) -> None:
        connection.execute(
            "select gdq.retry_event(%(id)s, %(token)s, %(ev_id)s, '5 ms', op => %(op)s)",
            {**batch, "ev_id": event[0], "op": event[1]},
        )
        self.counts["aside"] += 1


@pytest.mark.long
def test_every_event_is_handled_once(db: Database) -> None:
    with db.connect() as owner:
        owner.execute("create table orders (id int primary key); create table handled (ev_id bigint)")
        owner.execute("select gdq.create_queue('q', rotation_period => '1 microsecond')")
        owner.execute("select gdq.add_table('q', 'orders')")
        owner.execute("select gdq.register_consumer('q', 'c')")
        owner.execute("select gdq.set_retry_limit('q', 'c', 1000)")
        for member in "abc":
            register_member(owner, "q", "c", member)
        workers = Workers(db)
        workers.run()
        rows = owner.execute("select count(*), count(distinct ev_id) from handled").fetchone()
        assert rows == (EVENTS, EVENTS), workers.counts
        assert owner.execute("select count(*) from gdq.dead_letters('q')").fetchone() == (0,)
    assert min(workers.counts[name] for name in ("aside", "stale", "rotated")) > 0, workers.counts
