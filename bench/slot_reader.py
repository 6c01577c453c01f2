"""pg_recvlogical on a slot, and what it costs the server."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict

from bench.packages import BenchError, Place

_LOOK_SECONDS = 0.01
_GIVE_UP_SECONDS = 60


def cpu_seconds(pid: int) -> float:
    """Processor time of a server process so far; it has one thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[0]) / 1e9


def libpq_environment(conninfo: str) -> dict[str, str]:
    """The environment of a program of PostgreSQL that connects to `conninfo`."""
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE", "password": "PGPASSWORD"}
    given = conninfo_to_dict(conninfo).items()
    return os.environ | {names[key]: str(value) for key, value in given if key in names}


def recvlogical(place: Place, slot: str, options: dict[str, str], *more: str) -> list[str]:
    """The command that reads a slot into /dev/null."""
    given = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    # it does not look at PGDATABASE
    database = f"--dbname={conninfo_to_dict(place.conninfo).get('dbname')}"
    program = str(place.binaries.program("pg_recvlogical"))
    return [program, database, f"--slot={slot}", "--start", "--file=/dev/null", "--fsync-interval=0", *given, *more]


def pgoutput_options(publication: str) -> dict[str, str]:
    """Options of pgoutput, binary as a reader that cares for speed asks for it."""
    return {"proto_version": "1", "publication_names": publication, "binary": "true"}


def wait_for(
    what: str, query: str, connection: psycopg.Connection[Any], *values: object, seconds: float = _GIVE_UP_SECONDS
) -> Any:
    """The first value that the query gives which is not NULL. BenchError after so many seconds without one."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        row = connection.execute(query.encode(), values).fetchone()
        if row is not None and row[0] is not None:
            return row[0]
        time.sleep(_LOOK_SECONDS)
    raise BenchError(f"waited {seconds:.0f} s for {what}")


def drop_slots(connection: psycopg.Connection[Any], pattern: str) -> None:
    """Drop the slots whose names are LIKE `pattern`, once their readers are gone."""
    wait_for(
        f"the readers of {pattern}",
        "select case when not exists (select from pg_replication_slots where slot_name like %s and active) then 1 end",
        connection,
        pattern,
    )
    connection.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name like %s", [pattern]
    )


class SlotReader:
    """pg_recvlogical at work on a slot, from when the server has its walsender."""

    def __init__(self, connection: psycopg.Connection[Any], place: Place, slot: str, publication: str) -> None:
        self._connection = connection
        self._slot = slot
        command = recvlogical(place, slot, pgoutput_options(publication), "--status-interval=1", "--no-loop")
        self._program = subprocess.Popen(command, env=libpq_environment(place.conninfo))

    def __enter__(self) -> Self:
        try:
            self._pid = int(
                wait_for(
                    "pg_recvlogical",
                    "select active_pid from pg_replication_slots where slot_name = %s",
                    self._connection,
                    self._slot,
                )
            )
        except BaseException:
            self._end()
            raise
        self._before = cpu_seconds(self._pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def until_read(self) -> float:
        """Wait until all that was written up to now was sent; the processor time of the walsender since it began."""
        wait_for(
            "pg_recvlogical to catch up",
            "select 1 from pg_stat_replication where pid = %s and sent_lsn >= pg_current_wal_lsn()",
            self._connection,
            self._pid,
        )
        return cpu_seconds(self._pid) - self._before

    def _end(self) -> None:
        self._program.terminate()
        self._program.wait()
