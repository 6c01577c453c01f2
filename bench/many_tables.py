"""What a tick, a batch and capturing a table cost in a queue of many tables of which three change, beside one of three.

    python -m bench.many_tables [TABLES]

Both queues live in one database, and their cycles (three rows written, tick, next_batch, get_batch, finish_batch)
take turns; of fewer than three tables, some get more of the rows. The figures are ratios of medians: many over few.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg

from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.installer import install

CHANGING = 3
ROUNDS = 60
STEPS = ("tick", "batch", "check whether a tick is due")


def main(tables: int) -> None:
    with EmbeddedServer(binaries=find_binaries(18), settings={"max_locks_per_transaction": 256}) as server:
        install.install(server.conninfo())
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            connection.execute("select gdq.create_event_triggers()")
            _create(connection, "first", 1)  # what a session reads of the catalogs once is nobody's
            connection.execute("select gdq.drop_queue('first', true)")
            counts = {"few": CHANGING, "many": tables}
            took = {queue: _create(connection, queue, count) for queue, count in counts.items()}
            _settle(connection, counts)
            few: list[list[float]] = []
            many: list[list[float]] = []
            for _ in range(ROUNDS):
                few.append(_cycle(connection, "few", CHANGING))
                many.append(_cycle(connection, "many", tables))
            for step, mine, peer in zip(STEPS, zip(*many, strict=True), zip(*few, strict=True), strict=True):
                ratio = statistics.median(mine) / statistics.median(peer)
                changing = min(CHANGING, tables)
                print(f"{step}: {_tables(tables)} of which {changing} change cost {ratio:.2f} x {_tables(CHANGING)}")
            each = statistics.median(took["many"])
            ratio = each / statistics.median(took["few"])
            print(
                f"install: add_table for one of {_tables(tables)} costs {ratio:.2f} x that of {_tables(CHANGING)};"
                f" {each * 1000:.0f} ms, all together {sum(took['many']):.1f} s"
            )


def _tables(count: int) -> str:
    return f"{count} table" if count == 1 else f"{count} tables"


def _create(connection: psycopg.Connection[Any], queue: str, tables: int) -> list[float]:
    """Make a queue with its tables and a consumer; the seconds of each add_table."""
    took = []
    connection.execute("select gdq.create_queue(%s)", [queue])
    for number in range(tables):
        name = f"{queue}_{number}"
        connection.execute(f"create table {name} (id bigint generated always as identity primary key, v text)".encode())
        took.append(_seconds(partial(connection.execute, "select gdq.add_table(%s, %s)", [queue, name])))
    connection.execute("select gdq.register_consumer(%s, 'c')", [queue])
    return took


def _settle(connection: psycopg.Connection[Any], counts: dict[str, int]) -> None:
    """Make the logs quiet that hold no rows, as maintain() does after a rotation period."""
    for queue, count in counts.items():
        _write(connection, queue, count)
    connection.execute("update gdq.log_ring set switched_at = switched_at - interval '1 day'")
    busy = "select count(*) > %s from gdq.log_ring where activity <> 'quiet'"
    while connection.execute(busy, [sum(min(CHANGING, count) for count in counts.values())]).fetchone() == (True,):
        connection.execute("select gdq.update_activity()")
    for queue in counts:
        connection.execute("select gdq.force_tick(%s)", [queue])
        _consume(connection, queue)
    connection.execute("vacuum analyze")


def _write(connection: psycopg.Connection[Any], queue: str, tables: int) -> None:
    for number in range(CHANGING):
        connection.execute(f"insert into {queue}_{number % tables} (v) values ('x')".encode())


def _cycle(connection: psycopg.Connection[Any], queue: str, tables: int) -> list[float]:
    _write(connection, queue, tables)
    check = "select gdq.ticker(%s)"
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
