"""Measurements of the server: write-ahead log written and retained, size of the queue's logs, CPU of processes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.compare.attach import COMPARE_QUEUE
from gdq.consumers.slot.slot import slot_name
from gdq.qualified_sql import qualified

_PROC = Path("/proc")
_CLOCK_TRIES = 20

# Relations and the write-ahead log grow by pages.
PAGE_BYTES = 8192

# The time of a process is counted in ticks, and no finer.
CPU_TICK = 1 / os.sysconf("SC_CLK_TCK")


class MeasuredServer:
    """Measures a server over one connection in autocommit mode."""

    def __init__(self, connection: Connection[Any], consumer: str) -> None:
        self._connection = connection
        self._slot = slot_name(COMPARE_QUEUE, consumer)

    def wal(self) -> int:
        """Bytes of write-ahead log that the server has ever written."""
        return int(
            scalar(self._connection, qualified("select (pg_catalog.pg_current_wal_insert_lsn() - '0/0')::bigint"))
        )

    def queue_bytes(self) -> int:
        """Bytes of the queue's logs, with their indexes and large values; 0 while there is no queue."""
        query = qualified("select coalesce(sum(log_bytes), 0)::bigint from gdq.table_info() where queue_name = %s")
        return int(scalar(self._connection, query, COMPARE_QUEUE))

    def slot_bytes(self) -> int:
        """Bytes of write-ahead log that the slot retains."""
        query = qualified("""select (pg_catalog.pg_current_wal_lsn() - restart_lsn)::bigint
                     from pg_catalog.pg_replication_slots where slot_name = %s""")
        return int(scalar(self._connection, query, self._slot) or 0)

    def walsender(self) -> int | None:
        """The process id of the slot's walsender; None if there is none."""
        query = qualified("select active_pid from pg_catalog.pg_replication_slots where slot_name = %s")
        pid = scalar(self._connection, query, self._slot)
        return None if pid is None else int(pid)

    def clock(self) -> tuple[float, float]:
        """Seconds by which the server's clock is ahead of ours, by the fastest of several answers; and the error."""
        answers = []
        query = qualified("select extract(epoch from clock_timestamp())::float8")
        for _ in range(_CLOCK_TRIES):
            before = time.time()
            theirs = float(scalar(self._connection, query))
            after = time.time()
            answers.append((after - before, theirs - (before + after) / 2))
        took, ahead = min(answers)
        return ahead, took / 2

    def flush(self) -> int:
        """Flush the log up to the last commit: a slot sends only flushed commits, and commits may be asynchronous.

        Returns the LSN of a message that the slot sends after all these commits.
        """
        with self._connection.transaction():
            self._connection.execute("set local synchronous_commit = on")
            place = self.wal()
            self._connection.execute("select pg_catalog.pg_logical_emit_message(true, 'gdq compare', '')")
        return place

    def cpu(self, pids: Mapping[str, int | None]) -> dict[str, float | None]:
        """CPU seconds used by processes of the server; None for processes that this machine does not see."""
        return {
            name: None if pid is None else _cpu_seconds(pid, self._connection.info.dbname) for name, pid in pids.items()
        }


def _cpu_seconds(pid: int, database: str) -> float | None:
    """CPU seconds of a process whose title names PostgreSQL and the database, else None: the server may be elsewhere.

    Before PostgreSQL 16 a walsender's title names no database.
    """
    try:
        title = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if "postgres" not in title or not (database in title or "walsender" in title):
        return None
    return (int(fields[11]) + int(fields[12])) * CPU_TICK
