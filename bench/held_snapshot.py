"""A snapshot that a session holds while both consumers are at work: what slows down, and what stays on the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from statistics import quantiles
from typing import Any

import psycopg

from bench.catch_up import NO_ROUND, PART, give_back
from bench.latency import PATHS, Path
from bench.packages import BenchError
from bench.results import Results
from bench.slot_reader import cpu_seconds, wait_for
from bench.steady import (
    TABLES,
    TICKER,
    Child,
    Kept,
    SteadyReader,
    Work,
    Written,
    flush,
    one,
    prepare,
    reader,
    ticker,
    watch,
    write,
)

CASE = "snapshot"
_FIFTHS = 5
_CONSUMER = "c1"
_END_ROW = 0
# Seconds of processor time: of all the server processes of a consumer, of its session among them, of the consumer.
_Used = tuple[float, float, float]
_DEAD = """
  select coalesce(sum(n_dead_tup), 0)::bigint from pg_stat_user_tables where schemaname = any (%s::text[])
"""
# The tables that each path has of its own.
_SCHEMAS: dict[Path, list[str]] = {"queue": ["gdq", "gdq_log"], "slot": ["gdq_target"]}


@dataclass(slots=True)
class Fifth:
    """What a consumer did in a fifth of the time: events, processor time in seconds, and seconds from row to handler.

    `session` is the share of its own session, `server` that of the slot's sender too, or of the queue's ticker.
    """

    events: int = 0
    server: float = 0.0
    session: float = 0.0
    client: float = 0.0
    delays: list[float] = field(default_factory=list)


def run(conninfo: str, work: Work, results: Results, progress: Callable[[str], None]) -> None:
    """Write and read while a snapshot is held, and look what is given back under it."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        prepare(connection, work, [_CONSUMER])
        with psycopg.connect(conninfo) as holder:
            holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            holder.execute(f"select count(*) from {TABLES['queue']}".encode())
            most, last, written, fifths = _at_work(connection, conninfo, work)
            connection.execute("select pg_stat_force_next_flush()")
            dead = {path: int(one(connection, _DEAD, _SCHEMAS[path])[0]) for path in PATHS}
            left = give_back(connection, conninfo, [_CONSUMER])
    progress(f"endurance: a snapshot was held for {work.seconds:.0f} s")
    disk = {"queue": (most.queue, last.queue, left.queue), "slot": (most.slot, last.slot, left.slot)}
    for path in PATHS:
        sizes = dict(zip(("most", "held", "left"), disk[path], strict=True))
        told = {"seconds": work.seconds, "rate": written.rate, "events": written.rows[path], "dead": dead[path]}
        results.add(PART, CASE, path, NO_ROUND, told | sizes | _ends(fifths[path]))


def _at_work(
    connection: psycopg.Connection[Any], conninfo: str, work: Work
) -> tuple[Kept, Kept, Written, dict[Path, list[Fifth]]]:
    """Consumers and the writer at work: the most on the disk, and the last; what was written, and what was done."""
    most = last = Kept()
    with (
        ticker(conninfo),
        Child(follow, "queue", conninfo, work.seconds) as queue,
        Child(follow, "slot", conninfo, work.seconds) as slot,
    ):
        followers: dict[Path, Child] = {"queue": queue, "slot": slot}
        for follower in followers.values():
            follower.hear()  # that it is at work
        with Child(write, conninfo, work) as writer:
            for last in watch(connection, writer, work):
                most = most.most(last)
                if queue.said(0) or slot.said(0):
                    raise BenchError("a consumer has ended before the writer")
            written: Written = writer.hear(1)
        for table in TABLES.values():
            connection.execute(f"insert into {table} (id, at) values (%s, 0)".encode(), [_END_ROW])
        flush(connection)
        fifths = {path: follower.hear(work.seconds + 120) for path, follower in followers.items()}
    for path, found in fifths.items():
        if (count := sum(fifth.events for fifth in found)) != written.rows[path]:
            raise BenchError(f"under the snapshot the {path} read {count} of {written.rows[path]} events")
    return most, last, written, fifths


def follow(told: Pipe, path: Path, conninfo: str, seconds: float) -> None:
    """Read until the row that ends; say first that one is at work, and then what was done in each fifth of the time."""
    fifths = [Fifth() for _ in range(_FIFTHS)]
    with reader(path, conninfo, _CONSUMER) as opened:
        if path == "queue":
            query = "select pid from pg_stat_activity where application_name = %s"
            with psycopg.connect(conninfo, autocommit=True) as connection:
                ticking = int(wait_for("the ticker", query, connection, TICKER))
            opened.pids = [*opened.pids, ticking]
        told.send(path)
        started, current, before = 0.0, 0, _used(opened)
        for batch in opened.source.batches():
            rows = [event.new or {} for event in batch.events()]
            now = time.monotonic()
            started = started or now
            number = min(int((now - started) / seconds * _FIFTHS), _FIFTHS - 1)
            if number != current:
                before = _add(fifths[current], before, _used(opened))
                current = number
            # the end row holds no moment
            delays = [now - float(row["at"]) for row in rows if int(row["id"]) != _END_ROW]
            fifths[current].events += len(delays)
            fifths[current].delays += delays
            if len(delays) < len(rows):
                batch.commit()
                break
        _add(fifths[current], before, _used(opened))
    told.send(fifths)


def _used(opened: SteadyReader) -> _Used:
    return opened.server_cpu(), cpu_seconds(opened.pids[0]), time.process_time()


def _add(fifth: Fifth, before: _Used, now: _Used) -> _Used:
    """Put what was used since `before` down to a fifth; `now`."""
    fifth.server += now[0] - before[0]
    fifth.session += now[1] - before[1]
    fifth.client += now[2] - before[2]
    return now


def _ends(fifths: Sequence[Fifth]) -> dict[str, float]:
    """Processor time of an event, and the delay in ms, in the first fifth and in the last."""
    read = [fifth for fifth in fifths if fifth.events > 1]
    values: dict[str, float] = {}
    for name, fifth in (("first", read[0]), ("last", read[-1])):
        values |= {
            f"server_us_{name}": fifth.server * 1e6 / fifth.events,
            f"session_us_{name}": fifth.session * 1e6 / fifth.events,
            f"client_us_{name}": fifth.client * 1e6 / fifth.events,
        }
        cuts = quantiles(fifth.delays, n=100)
        values |= {f"p50_{name}": cuts[49] * 1000, f"p99_{name}": cuts[98] * 1000}
    return values
