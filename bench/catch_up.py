"""A consumer that was stopped: what is kept for it, how long it takes to catch up, and what is given back then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from bench.latency import PATHS, Path
from bench.packages import BenchError
from bench.results import Results
from bench.steady import (
    QUEUE,
    TABLES,
    Child,
    Kept,
    Work,
    Written,
    flush,
    kept,
    one,
    prepare,
    reader,
    ticker,
    watch,
    write,
)
from gdq.consumers.slot.slot import slot_name
from gdq.ticker import maintain_all

PART = "endurance"
CASE = "stopped"
# What is kept and given back belongs to no round of catching up.
NO_ROUND = 0
_MOVES_MAX = 5


def run(conninfo: str, work: Work, results: Results, progress: Callable[[str], None]) -> None:
    """Write while nobody reads, let consumers of the queue and of slots catch up in turns, and look what stays.

    There is a consumer for each round: those that wait cost neither side anything, and what they keep they share.
    """
    consumers = [f"c{number}" for number in range(1, work.rounds + 1)]
    with psycopg.connect(conninfo, autocommit=True) as connection:
        prepare(connection, work, consumers)
        most, written = _stop(connection, conninfo, work)
        held = kept(connection)
        progress(f"endurance: consumers were stopped for {work.seconds:.0f} s")
        for number, consumer in enumerate(consumers, 1):
            for path in PATHS if number % 2 else PATHS[::-1]:
                results.add(PART, CASE, path, number, _read(conninfo, path, consumer, written.rows[path]))
            progress(f"endurance: caught up, round {number} of {work.rounds}")
        left = give_back(connection, conninfo, consumers)
        common = {"seconds": work.seconds, "rate": written.rate}
        results.add(
            PART,
            CASE,
            "queue",
            NO_ROUND,
            common | {"events": written.rows["queue"], "held": held.queue, "most": most.queue, "left": left.queue},
        )
        slot = {"events": written.rows["slot"], "held": held.slot, "most": most.slot, "left": left.slot}
        files = {"own": written.wal["slot"], "pg_wal": most.pg_wal, "pg_wal_left": left.pg_wal}
        results.add(PART, CASE, "slot", NO_ROUND, common | slot | files)


def _stop(connection: psycopg.Connection[Any], conninfo: str, work: Work) -> tuple[Kept, Written]:
    """Write while no consumer reads: the most that was on the disk, and what was written."""
    most = Kept()
    with ticker(conninfo), Child(write, conninfo, work) as writer:
        for now in watch(connection, writer, work):
            most = most.most(now)
        written: Written = writer.hear(1)
    flush(connection)
    return most.most(kept(connection)), written


def _read(conninfo: str, path: Path, consumer: str, wanted: int) -> dict[str, float]:
    """Read what is there from the moment of connecting: seconds, events/s, processor time of an event."""
    started, own = time.perf_counter(), time.process_time()
    with reader(path, conninfo, consumer) as opened:
        count = sum(1 for batch in opened.source.batches(once=True) for _ in batch.events())
        seconds, own = time.perf_counter() - started, time.process_time() - own
        server = opened.server_cpu()
    if count != wanted:
        raise BenchError(f"catching up by the {path} read {count} of {wanted} events")
    per_event = {"client_us": own * 1e6 / count, "server_us": server * 1e6 / count}
    return {"catch_up": seconds, "events_a_second": count / seconds} | per_event


def give_back(connection: psycopg.Connection[Any], conninfo: str, consumers: Sequence[str]) -> Kept:
    """What is left on the disk once all have read, the logs have rotated, and a checkpoint was made."""
    (end_lsn,) = one(connection, "select pg_current_wal_insert_lsn()::text")
    # the rows that were written last are in the segment at hand: it is let go after the next rotation
    connection.execute("select gdq.set_queue(%s, rotation_period => '1 microsecond')", [QUEUE])
    connection.execute("select gdq.force_tick(%s)", [QUEUE])
    for consumer in consumers:
        with reader("queue", conninfo, consumer) as opened:
            for batch in opened.source.batches(once=True):
                batch.commit()
    maintain_all(connection)
    _move_slots(connection, conninfo, consumers, end_lsn)
    connection.execute("checkpoint")  # which removes files
    return kept(connection)


def _move_slots(connection: psycopg.Connection[Any], conninfo: str, consumers: Sequence[str], end_lsn: str) -> None:
    """Let the slots' readers confirm until the server needs no log before `end_lsn`. BenchError when it still does.

    A slot moves on once its reader confirms what comes after a record of the running transactions, as a checkpoint
    makes it and the server by itself every 15 seconds; an older such record may have to be confirmed first.
    """
    table = TABLES["slot"]
    behind = "select count(*) from pg_replication_slots where slot_name = any (%s) and restart_lsn < %s::pg_lsn"
    names = [slot_name(QUEUE, consumer) for consumer in consumers]
    for _ in range(_MOVES_MAX):
        connection.execute("checkpoint")
        connection.execute(f"insert into {table} (id, at) select min(id) - 1, 0 from {table}".encode())
        for consumer in consumers:
            with reader("slot", conninfo, consumer) as opened:
                for batch in opened.source.batches(once=True):
                    batch.commit()
        if one(connection, behind, names, end_lsn) == (0,):
            return
    raise BenchError("slots retain log that their readers have confirmed")
