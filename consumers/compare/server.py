"""Measurements of the server: log written and kept, sizes of the queue's logs, CPU seconds of its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.compare.attach import QUEUE
from gdq.consumers.slot.slot import slot_name

_PROC = Path("/proc")
_CLOCK_TRIES = 20


class Server:
    """Asks one connection, which must be in autocommit mode."""

    def __init__(self, connection: Connection[Any], consumer: str) -> None:
        self._connection = connection
        self._slot = slot_name(QUEUE, consumer)

    def wal(self) -> int:
        """Bytes of write-ahead log that the server has ever written."""
        return int(scalar(self._connection, "select (pg_catalog.pg_current_wal_insert_lsn() - '0/0')::bigint"))

    def queue_bytes(self) -> int:
        """Bytes of the queue's logs, with their indexes and large values; 0 while there is no queue."""
        query = "select coalesce(sum(log_bytes), 0)::bigint from gdq.table_info() where queue_name = %s"
        return int(scalar(self._connection, query, QUEUE))

    def slot_bytes(self) -> int:
        """Bytes of log that the slot keeps the server from removing."""
        query = """select (pg_catalog.pg_current_wal_lsn() - restart_lsn)::bigint
                     from pg_catalog.pg_replication_slots where slot_name = %s"""
        return int(scalar(self._connection, query, self._slot) or 0)

    def walsender(self) -> int | None:
        """The process that decodes for the slot."""
        query = "select active_pid from pg_catalog.pg_replication_slots where slot_name = %s"
        pid = scalar(self._connection, query, self._slot)
        return None if pid is None else int(pid)

    def clock(self) -> float:
        """Seconds by which the server's clock is ahead of ours, by the quickest of some answers."""
        answers = []
        for _ in range(_CLOCK_TRIES):
            before = time.time()
            theirs = float(scalar(self._connection, "select extract(epoch from pg_catalog.clock_timestamp())::float8"))
            after = time.time()
            answers.append((after - before, theirs - (before + after) / 2))
        return min(answers)[1]

    def flush(self) -> int:
        """Flush the log up to the last commit: a slot sends only flushed commits, and commits may be asynchronous.

        The place in the log of what comes by the slot after all that: a message.
        """
        with self._connection.transaction():
            self._connection.execute("set local synchronous_commit = on")
            place = self.wal()
            self._connection.execute("select pg_catalog.pg_logical_emit_message(true, 'gdq compare', '')")
        return place

    def cpu(self, pids: Mapping[str, int | None]) -> dict[str, float | None]:
        """Seconds of CPU that processes of the server have used; None for those that are not seen from here."""
        return {
            name: None if pid is None else _cpu_seconds(pid, self._connection.info.dbname) for name, pid in pids.items()
        }


def _cpu_seconds(pid: int, database: str) -> float | None:
    """Of a process that says it works for PostgreSQL in that database: on another machine the number is another's.

    A walsender says no database before PostgreSQL 16.
    """
    try:
        title = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if "postgres" not in title or not (database in title or "walsender" in title):
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
