"""Writers, tickers, workers and maintenance at once, until enough has happened to mean something."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import errors

from tests.support.concurrency import Scene, Stream, maintain, next_batch, read_events, read_typed
from tests.support.waiting import SECONDS

# What a run must have seen; below that it would pass for want of anything to go wrong.
NEEDED = {
    "commits": 5000,
    "rotations": 50,
    "truncations": 20,
    "emptied slots of control tables": 20,
    "repeatable read over a rotation": 10,
    "serializable over a rotation": 10,
    "prepared": 20,
    "savepoint rollbacks": 100,
    "stale tokens": 3,
    "second readings": 20,
}

WRITERS = ("read committed", "read committed", "read committed", "repeatable read", "serializable")
HOT_ROWS = 15
TRIED = (errors.SerializationFailure, errors.DeadlockDetected, errors.LockNotAvailable, errors.UniqueViolation)

Body = Callable[[psycopg.Connection[Any], random.Random], None]


class Workload:
    """The threads of one run and what they count."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene = scene
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._rotated = threading.Condition()
        self._stop_writers = threading.Event()
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._prepared: deque[tuple[str, int]] = deque()
        self._threads: list[threading.Thread] = []
        self._reads = {"a": read_events, "b": read_typed, "late": read_events}

    def run(self) -> None:
        """Work until NEEDED is reached, then end every open transaction and let all consumers catch up."""
        with self.scene.db.connect() as owner:
            for consumer in ("a", "b"):
                self.scene.register(owner, consumer)
            try:
                writers = [self._start(self._writer(name, n)) for n, name in enumerate(WRITERS)]
                workers = (self._one_transaction("a"), self._separate_transactions("a"), self._one_transaction("b"))
                for body in (self._resolver, self._ticker, self._ticker, self._maintainer, *workers):
                    self._start(body)
                self._watch(owner)
                self._stop_writers.set()
                for thread in writers:
                    thread.join()
            finally:
                self._stop_writers.set()
                self._stop.set()
                for thread in self._threads:
                    thread.join()
                for gid, _ in self._prepared:
                    owner.execute(f"commit prepared '{gid}'".encode())
            if self._errors:
                raise self._errors[0]
            owner.execute("select gdq.force_tick('q')")
            for consumer, stream in self.scene.streams.items():
                while self._step(owner, consumer, stream, random.Random(0)):
                    pass

    def _watch(self, owner: psycopg.Connection[Any]) -> None:
        """Look at the tables now and then, and add a consumer half-way, until enough has happened."""
        deadline = time.monotonic() + SECONDS
        while not self._errors and self._missing() and time.monotonic() < deadline:
            self._stop_writers.wait(0.2)
            self.scene.probe(owner)
            if "late" not in self.scene.streams and self.counts["commits"] > NEEDED["commits"] // 2:
                self.scene.register(owner, "late")
                self._start(self._one_transaction("late"))

    def vacuous(self) -> str:
        """What is missing for the run to mean something."""
        return ", ".join(f"{self.counts[name]} of {NEEDED[name]} {name}" for name in self._missing())

    def _missing(self) -> list[str]:
        return [name for name, least in NEEDED.items() if self.counts[name] < least]

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.counts[what] += number

    def _start(self, body: Body) -> threading.Thread:
        seeded = random.Random(self.seed * 100 + len(self._threads))

        def work() -> None:
            try:
                with self.scene.db.connect() as connection:
                    body(connection, seeded)
            except BaseException as error:  # the main thread raises it
                self._errors.append(error)
                self._stop_writers.set()
                self._stop.set()

        thread = threading.Thread(target=work)
        self._threads.append(thread)
        thread.start()
        return thread

    # Writers

    def _writer(self, isolation: str, number: int) -> Body:
        """Transactions of one isolation level. The keys from `number` million on are its own, the hot rows common."""

        def work(connection: psycopg.Connection[Any], rng: random.Random) -> None:
            connection.execute("set lock_timeout = '50ms'")
            own = number * 1_000_000
            fresh = own + 1000
            while not self._stop_writers.is_set():
                fresh += 10
                script = [f"begin isolation level {isolation}"]
                spans = False
                try:
                    if isolation != "read committed" and rng.random() < 0.2:
                        connection.execute(f"{script.pop()}; select count(*) from acct where id < 0".encode())
                        spans = self._rotation_passes()
                    shared = isolation == "read committed" or rng.random() < 0.3
                    script += _changes(rng, fresh, own, shared=shared)
                    if self._end(connection, rng, script, f"w{number}_{fresh}") and spans:
                        self._count(f"{isolation} over a rotation")
                except TRIED as error:
                    self._count(type(error).__name__)
                    connection.execute("rollback")

        return work

    def _end(self, connection: psycopg.Connection[Any], rng: random.Random, script: list[str], gid: str) -> bool:
        """Send the statements of a transaction with its end in one go; whether it has committed."""
        dice = rng.random()
        end = "rollback" if dice < 0.06 else f"prepare transaction '{gid}'" if dice < 0.07 else "commit"
        connection.execute("; ".join([*script, end]).encode())
        if end.startswith("prepare"):
            self._count("prepared")
            self._prepared.append((gid, self.counts["rotations"]))
        elif end == "commit":
            self._count("commits")
            self._count("savepoint rollbacks", script.count("rollback to s"))
        return end == "commit"

    def _rotation_passes(self) -> bool:
        """Wait until there has been a rotation; False when there was none for a while."""
        with self._rotated:
            before = self.counts["rotations"]
            return self._rotated.wait_for(lambda: self.counts["rotations"] > before, 1)

    def _resolver(self, connection: psycopg.Connection[Any], rng: random.Random) -> None:
        """Ends prepared transactions from another session, mostly after another rotation; their rows hold up others."""
        while not self._stop.wait(0.005):
            if self._prepared and (self._prepared[0][1] < self.counts["rotations"] or rng.random() < 0.05):
                gid, _ = self._prepared.popleft()
                connection.execute(f"{rng.choice(['commit', 'commit', 'rollback'])} prepared '{gid}'".encode())

    # Housekeeping

    def _ticker(self, connection: psycopg.Connection[Any], rng: random.Random) -> None:
        while not self._stop.wait(rng.random() * 0.02):
            connection.execute("select gdq.force_tick('q')" if rng.random() < 0.3 else "select gdq.ticker('q')")

    def _maintainer(self, connection: psycopg.Connection[Any], rng: random.Random) -> None:
        rings = "select table_id, switched_at from gdq.log_ring join gdq.table_version using (version_id)"
        before = set(connection.execute(rings).fetchall())
        while not self._stop.wait(0.01):
            emptied = maintain(connection)[1]
            self._count("truncations", emptied)
            if rng.random() < 0.2:
                connection.execute("select gdq.set_activity(%s, 'cooling')", [rng.randint(1, 3)])
            if rng.random() < 0.1:
                found = connection.execute("select gdq.rotate_control(true, 1)").fetchone()
                assert found
                self._count("emptied slots of control tables", found[0])
            after = set(connection.execute(rings).fetchall())
            with self._rotated:
                self._count("rotations", len(after - before))
                self._rotated.notify_all()
            before = after

    # Consumers

    def _one_transaction(self, consumer: str) -> Body:
        """A worker that reads, applies and finishes a batch in one transaction, and sometimes fails before the end."""
        stream = self.scene.streams[consumer]

        def work(connection: psycopg.Connection[Any], rng: random.Random) -> None:
            while not self._stop.is_set():
                if not self._step(connection, consumer, stream, rng):
                    self._stop.wait(0.005)

        return work

    def _step(self, connection: psycopg.Connection[Any], consumer: str, stream: Stream, rng: random.Random) -> bool:
        read = self._reads[consumer]
        gives_up = rng.random() < 0.1
        with connection.transaction(force_rollback=gives_up):
            connection.execute("set local enable_seqscan = off")
            batch = next_batch(connection, consumer, 2000)
            if batch is None:
                return False
            batch_id, token, applied = batch
            stream.note_read(batch_id, read(connection, batch_id, token))
            if rng.random() < 0.1:
                stream.note_read(batch_id, read(connection, batch_id, token))
                self._count("second readings")
            connection.execute("select gdq.finish_batch(%s, %s)", [batch_id, token])
        if not gives_up:
            stream.applied.append(applied._replace(changes=stream.read[batch_id]))
        return True

    def _separate_transactions(self, consumer: str) -> Body:
        """A worker that reads in one transaction and finishes in another: in between the other worker may take over."""
        stream = self.scene.streams[consumer]

        def work(connection: psycopg.Connection[Any], rng: random.Random) -> None:
            while not self._stop.wait(rng.random() * 0.01):
                batch = next_batch(connection, consumer, 2000)
                if batch is None:
                    continue
                batch_id, token, applied = batch
                try:
                    changes = read_events(connection, batch_id, token)
                    stream.note_read(batch_id, changes)
                    self._stop.wait(rng.random() * 0.01)
                    connection.execute("select gdq.finish_batch(%s, %s)", [batch_id, token])
                except psycopg.Error as error:
                    if error.sqlstate != "GDQ01":
                        raise
                    self._count("stale tokens")
                else:
                    stream.applied.append(applied._replace(changes=changes))

        return work


def _changes(rng: random.Random, fresh: int, own: int, *, shared: bool) -> list[str]:
    """The statements of one transaction: an insert at least, then changes of the hot rows or of its own."""
    statements = [_insert(rng, fresh)]
    statements += [_change(rng, fresh, own, shared) for _ in range(rng.randint(0, 4))]
    if rng.random() < 0.25:
        within = [_change(rng, fresh, own, shared), _insert(rng, fresh + 1)]
        statements += [
            "savepoint s",
            *within,
            rng.choice(["rollback to s", "release s"]),
            _change(rng, fresh, own, shared),
        ]
    return statements


def _insert(rng: random.Random, key: int) -> str:
    table = rng.choice(["acct", "item", "part"])
    if table == "part":
        return f"insert into part values ({key}, {rng.randint(0, 2)}, nextval('label'))"
    return f"insert into {table} values ({key}, nextval('label'), 'row')"


def _change(rng: random.Random, fresh: int, own: int, shared: bool) -> str:
    first = rng.randint(1, HOT_ROWS) if shared else rng.randint(own + 1000, fresh)
    rows = f"id between {first} and {first + rng.choice([0, 0, 1, 12])}"
    match rng.randint(0, 7):
        case 0:
            return f"delete from acct where id between {first} and {first + 20}"
        case 1:
            return f"delete from {rng.choice(['item', 'part'])} where {rows}"
        case 2:
            return f"update item set label = nextval('label'), id = {fresh + rng.randint(2, 4)} where id = {first}"
        case 3:
            return f"update acct set label = nextval('label'), id = {fresh + rng.randint(2, 4)} where id = {first}"
        case 4:
            return f"update part set label = nextval('label'), region = (region + 1) % 3 where {rows}"
        case 5:
            key, table = rng.randint(1, HOT_ROWS), rng.choice(["acct", "item"])
            return (
                f"insert into {table} values ({key}, nextval('label')) "
                "on conflict (id) do update set label = excluded.label, pad = 'again'"
            )
        case _:
            return f"update {rng.choice(['acct', 'item', 'part'])} set label = nextval('label') where {rows}"
