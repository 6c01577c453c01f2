"""What a tick and a batch cost in a queue of many captured tables of which three change, beside a queue of three.

    python -m bench.many_tables [TABLES]

Both queues live in one database, and their cycles (three rows written, tick, next_batch, get_batch, finish_batch)
take turns. The figures are ratios of medians: many over few.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import psycopg

from gdq import schema
from gdq.embedded import Server, find_binaries

CHANGING = 3
ROUNDS = 60
STEPS = ("tick", "batch", "check whether a tick is due")


def main(tables: int) -> None:
    with Server(binaries=find_binaries(18), settings={"max_locks_per_transaction": 256}) as server:
        schema.install(server.conninfo())
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            connection.execute("select gdq.create_event_triggers()")
            for queue, count in (("few", CHANGING), ("many", tables)):
                _create(connection, queue, count)
            _settle(connection)
            few: list[list[float]] = []
            many: list[list[float]] = []
            for _ in range(ROUNDS):
                few.append(_cycle(connection, "few"))
                many.append(_cycle(connection, "many"))
            for step, mine, peer in zip(STEPS, zip(*many, strict=True), zip(*few, strict=True), strict=True):
                ratio = statistics.median(mine) / statistics.median(peer)
                print(f"{step}: {tables} tables of which {CHANGING} change cost {ratio:.2f} x {CHANGING} tables")


def _create(connection: psycopg.Connection[Any], queue: str, tables: int) -> None:
    connection.execute("select gdq.create_queue(%s)", [queue])
    for number in range(tables):
        name = f"{queue}_{number}"
        connection.execute(f"create table {name} (id bigint generated always as identity primary key, v text)".encode())
        connection.execute("select gdq.add_table(%s, %s)", [queue, name])
    connection.execute("select gdq.register_consumer(%s, 'c')", [queue])


def _settle(connection: psycopg.Connection[Any]) -> None:
    """Make the logs quiet that hold no rows, as maintain() does after a rotation period."""
    for queue in ("few", "many"):
        _write(connection, queue)
    connection.execute("update gdq.log_ring set switched_at = switched_at - interval '1 day'")
    busy = "select count(*) > %s from gdq.log_ring where activity <> 'quiet'"
    while connection.execute(busy, [2 * CHANGING]).fetchone() == (True,):
        connection.execute("select gdq.settle_logs()")
    for queue in ("few", "many"):
        connection.execute("select gdq.force_tick(%s)", [queue])
        _consume(connection, queue)
    connection.execute("vacuum analyze")


def _write(connection: psycopg.Connection[Any], queue: str) -> None:
    for number in range(CHANGING):
        connection.execute(f"insert into {queue}_{number} (v) values ('x')".encode())


def _cycle(connection: psycopg.Connection[Any], queue: str) -> list[float]:
    _write(connection, queue)
    check = "select gdq.tick_due(queue_id) from gdq.queue where queue_name = %s"
    return [
        _seconds(lambda: connection.execute("select gdq.force_tick(%s)", [queue])),
        _seconds(lambda: _consume(connection, queue)),
        _seconds(lambda: connection.execute(check, [queue])),
    ]


def _consume(connection: psycopg.Connection[Any], queue: str) -> None:
    batch = connection.execute("select batch_id, token from gdq.next_batch(%s, 'c')", [queue]).fetchone()
    assert batch
    events = connection.execute("select * from gdq.get_batch(%s, %s)", batch).fetchall()
    assert len(events) == CHANGING
    connection.execute("select gdq.finish_batch(%s, %s)", batch)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
