"""The net change of one table after the other, read from the source: the next one's while the target applies the last.

COPY for the next table is sent, in a session of its own, before its rows are wanted. The source adds up its images,
which is most of its work, and waits with the rows.
"""

from __future__ import annotations

import select
from collections.abc import Generator
from contextlib import closing
from typing import Any

import psycopg
from psycopg import Connection, pq

from gdq.conninfo import connect, conninfo_of
from gdq.consumers.views.row_copy import copy_rows
from gdq.sql_text import raw
from gdq.typed.pgtypes import READ_SETTINGS

# How a batch's rows are read. The planner overestimates what lies in a BRIN range.
_READING = {"enable_seqscan": "off", "max_parallel_workers_per_gather": "0", "work_mem": "64MB"}

# Who waits for a lock that the batch's session holds would wait for ever: that session waits for this program.
_LOCK_TIMEOUT = "1s"

_BLOCK_BYTES = 256 * 1024


class ChangeReader:
    """Copies the rows of SELECTs from the source into tables of the target, in binary form.

    `source`: the session that holds the batch. `then`: the SELECT that the source begins with in another session, while
    copy_into() reads its rows there, or the caller applies them.
    """

    def __init__(self, source: Connection[Any]) -> None:
        self.source = source
        self.then: str | None = None
        self._ahead: Connection[Any] | None = None
        self._begun: str | None = None

    def prepare(self) -> None:
        """Make the open transaction of the source one that reads a batch's rows."""
        self.source.execute("; ".join(f"set local {name} = '{value}'" for name, value in _READING.items()))

    def copy_into(self, query: str, target: Connection[Any], into: str) -> int:
        """Copy a SELECT's rows into a table, or its columns, of the target; returns their number."""
        copied = self._copy_begun(target, into) if query == self._begun else None
        # at once: the source has more than one processor
        if self.then is not None and self.then not in (query, self._begun):
            self._begin(self.then)
        if copied is None:
            copied = copy_rows(self.source, f"({query})", target, into, form="binary").rows
        return copied

    def close(self) -> None:
        """End the session that reads ahead, whatever it is at."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._begun = None

    def _begin(self, query: str) -> None:
        if self._begun is not None:
            self.close()
        if self._ahead is None:
            name = self.source.info.parameter_status("application_name")
            self._ahead = connect(conninfo_of(self.source), application_name=f"{name}/ahead", autocommit=True)
            for setting, value in (READ_SETTINGS | _READING | {"lock_timeout": _LOCK_TIMEOUT}).items():
                self._ahead.execute("select pg_catalog.set_config(%s, %s, false)", [setting, value])
        wire = self._ahead.pgconn
        wire.send_query(f"copy ({query}) to stdout (format binary)".encode(self._ahead.info.encoding))
        while wire.flush():
            select.select([], [wire.socket], [])
        self._begun = query

    def _copy_begun(self, target: Connection[Any], into: str) -> int | None:
        """Copy the rows of the SELECT that was begun; None if somebody holds its table."""
        assert self._ahead is not None
        with closing(_sent_blocks(self._ahead)) as blocks, target.cursor() as writer:
            self._begun = None
            try:
                block: bytes | None = next(blocks)
            except psycopg.errors.LockNotAvailable:
                return None
            with writer.copy(raw(f"copy {into} from stdin (format binary)")) as copy:
                while block is not None:
                    copy.write(block)
                    block = next(blocks, None)
            return writer.rowcount


def _sent_blocks(connection: Connection[Any]) -> Generator[bytes, None, None]:
    """The data of a COPY that was sent to a session, in blocks of whole rows; raises the error that ended it."""
    wire = connection.pgconn
    failed = None
    while (result := _next_result(wire)) is not None:
        if result.status == pq.ExecStatus.COPY_OUT:
            yield from _data(wire)
        elif result.status != pq.ExecStatus.COMMAND_OK:
            failed = failed or result
    if failed is not None:
        raise psycopg.errors.error_from_result(failed)


def _next_result(wire: pq.abc.PGconn) -> pq.abc.PGresult | None:
    while wire.is_busy():
        _receive(wire)
    return wire.get_result()


def _data(wire: pq.abc.PGconn) -> Generator[bytes, None, None]:
    parts: list[bytes] = []
    size = length = 0
    while length >= 0:
        length, part = wire.get_copy_data(1)
        if length > 0:
            parts.append(bytes(part))
            size += length
        if parts and (length <= 0 or size >= _BLOCK_BYTES):
            yield b"".join(parts)
            parts, size = [], 0
        if length == 0:
            _receive(wire)


def _receive(wire: pq.abc.PGconn) -> None:
    select.select([wire.socket], [], [])
    wire.consume_input()
