"""What status and doctor cost with many captured tables, beside the same in a queue of ten.

    python -m bench.monitoring [TABLES]

Every table has rows that three consumers at three positions have not read. The figures are the server's processor time
in a session that has looked before, as ratios of medians: many over ten.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.installer import install
from gdq.monitor.doctor import doctor
from gdq.monitor.status import status

FEW = 10
ROUNDS = 5
CONSUMERS = 3
TICKS_SECOND = os.sysconf("SC_CLK_TCK")


def main(tables: int) -> None:
    with EmbeddedServer(binaries=find_binaries(18), settings={"max_locks_per_transaction": 256}) as server:
        spent = {count: _measure(server, count) for count in (FEW, tables)}
    for look in ("status", "doctor"):
        few, many = spent[FEW][look], spent[tables][look]
        print(f"{look}: {tables} tables cost {many / few:.1f} x {FEW} tables ({many * 1000:.0f} ms of processor time)")


def _measure(server: EmbeddedServer, tables: int) -> dict[str, float]:
    database = f"of_{tables}"
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute(f"create database {database}".encode())
    install.install(server.conninfo(dbname=database))
    with psycopg.connect(server.conninfo(dbname=database), autocommit=True) as connection:
        connection.execute("select gdq.create_event_triggers()")
        fill(connection, tables)
    with psycopg.connect(server.conninfo(dbname=database), autocommit=True) as connection:
        looks: dict[str, Callable[[], object]] = {
            "status": lambda: status(connection),
            "doctor": lambda: doctor(connection, None, timedelta(hours=1)),
        }
        for look in looks.values():
            look()
        return {
            name: statistics.median(_spent(connection, look) for _ in range(ROUNDS)) for name, look in looks.items()
        }


def fill(connection: psycopg.Connection[Any], tables: int) -> None:
    """A queue of so many tables, with changes in each after every consumer's position."""
    connection.execute("select gdq.create_queue('q')")
    for number in range(tables):
        connection.execute(f"create table t{number} (id int primary key, a text, b text, c numeric, d date)".encode())
        connection.execute("select gdq.add_table('q', %s)", [f"t{number}"])
    for consumer in range(CONSUMERS):
        connection.execute("select gdq.register_consumer('q', %s)", [f"c{consumer}"])
        for number in range(tables):
            rows = f"generate_series({consumer * 10}, {consumer * 10 + 9}) g"
            connection.execute(f"insert into t{number} (id, a) select g, 'x' from {rows}".encode())
        connection.execute("select gdq.force_tick('q')")
    connection.execute("vacuum analyze")


def _spent(connection: psycopg.Connection[Any], work: Callable[[], object]) -> float:
    """Seconds of processor time in the session's process at the server; several times over, as the clock is coarse."""
    times = 1
    while True:
        before = _clock(connection)
        for _ in range(times):
            work()
        ticks = _clock(connection) - before
        if ticks >= 20:
            return ticks / TICKS_SECOND / times
        times *= 2


def _clock(connection: psycopg.Connection[Any]) -> int:
    fields = Path(f"/proc/{connection.info.backend_pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
