"""The net changes of tables, read from the source in their order: the next ones while the target applies the last.

COPY for tables that come next is sent, in sessions of their own, before their rows are wanted. The source adds up their
images, which is most of its work, and waits with the rows. A SELECT that was begun is known by its text, which names
the two snapshots that it reads between: so its rows are those that it would give at any later moment, too.
"""

from __future__ import annotations

import select
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import psycopg
from psycopg import Connection, pq

from gdq.conninfo import connect, conninfo_of
from gdq.consumers.views.row_copy import BLOCK_BYTES, copy_rows
from gdq.sql_text import raw
from gdq.typed.pgtypes import READ_SETTINGS

# How a batch's rows are read. The planner overestimates what lies in a BRIN range. Images are sorted in memory: 200,000
# changes of rows of 150 bytes take 81 MB, and a sixth more processor time on the disk.
_READING = {"enable_seqscan": "off", "max_parallel_workers_per_gather": "0", "work_mem": "128MB"}

# A consumer that moves back, as its server crashes, does no harm: the target's position decides.
_MOVING = {"synchronous_commit": "off"}

# Who waits for a lock that the batch's session holds would wait for ever: that session waits for this program.
_LOCK_TIMEOUT = "1s"

# SELECTs that the source is at side by side.
SIDE_BY_SIDE = 2


class ChangeReader:
    """Copies the rows of SELECTs from the source into tables of the target, in binary form.

    `source`: the session that holds the batch. `then`: the SELECTs that are wanted next, in their order; the source
    begins with them in other sessions, while copy_into() reads rows, or the caller applies them. `copied`: the rows of
    the batch so far.
    """

    def __init__(self, source: Connection[Any]) -> None:
        self.source = source
        self.then: Sequence[str] = ()
        self.copied = 0
        self._ahead: list[_Ahead] = []

    def prepare(self) -> None:
        """Make the open transaction of the source one that reads a batch's rows, and moves the consumer."""
        self.copied = 0
        settings = _READING | _MOVING
        self.source.execute("; ".join(f"set local {name} = '{value}'" for name, value in settings.items()))

    def copy_into(self, query: str, target: Connection[Any], into: str) -> int:
        """Copy a SELECT's rows into a table, or its columns, of the target; returns their number."""
        begun = next((one for one in self._ahead if one.query == query), None)
        # at once: the source has more than one processor
        self.begin(*([query] if begun else []), *self.then, beside=0 if begun else 1)
        copied = None if begun is None else begun.copy_into(target, into)
        if copied is None:
            copied = copy_rows(self.source, f"({query})", target, into, form="binary").rows
        self.copied += copied
        return copied

    def begin(self, *queries: str, beside: int = 0) -> None:
        """Have the source begin with the first of these SELECTs, and no longer be at others.

        `beside`: the number of those that are read in the batch's session meanwhile.
        """
        wanted = queries[: SIDE_BY_SIDE - beside]
        for one in self._ahead:
            if one.query is not None and one.query not in queries:
                one.close()
        self._ahead = [one for one in self._ahead if not one.closed]
        for query in wanted:
            if all(one.query != query for one in self._ahead):
                idle = next((one for one in self._ahead if one.query is None), None)
                if idle is None:
                    idle = _Ahead(self.source)
                    self._ahead.append(idle)
                idle.begin(query)

    def close(self) -> None:
        """End the sessions that read ahead, whatever they are at."""
        for one in self._ahead:
            one.close()
        self._ahead.clear()


class _Ahead:
    """A session in the source that computes a SELECT's rows before they are wanted. `query`: the SELECT, if any."""

    def __init__(self, source: Connection[Any]) -> None:
        name = source.info.parameter_status("application_name")
        self._connection = connect(conninfo_of(source), application_name=f"{name}/ahead", autocommit=True)
        for setting, value in (READ_SETTINGS | _READING | {"lock_timeout": _LOCK_TIMEOUT}).items():
            self._connection.execute("select pg_catalog.set_config(%s, %s, false)", [setting, value])
        self.query: str | None = None

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def close(self) -> None:
        self._connection.close()

    def begin(self, query: str) -> None:
        wire = self._connection.pgconn
        wire.send_query(f"copy ({query}) to stdout (format binary)".encode(self._connection.info.encoding))
        while wire.flush():
            select.select([], [wire.socket], [])
        self.query = query

    def copy_into(self, target: Connection[Any], into: str) -> int | None:
        """Copy the rows of the SELECT that was begun; None if somebody holds its table."""
        self.query = None
        try:
            with closing(_sent_blocks(self._connection)) as blocks, target.cursor() as writer:
                try:
                    block: bytes | None = next(blocks)
                except psycopg.errors.LockNotAvailable:
                    return None
                with writer.copy(raw(f"copy {into} from stdin (format binary)")) as copy:
                    while block is not None:
                        copy.write(block)
                        block = next(blocks, None)
                return writer.rowcount
        except BaseException:
            self.close()  # it may be anywhere in the rows
            raise


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
        if parts and (length <= 0 or size >= BLOCK_BYTES):
            yield b"".join(parts)
            parts, size = [], 0
        if length == 0:
            _receive(wire)


def _receive(wire: pq.abc.PGconn) -> None:
    select.select([wire.socket], [], [])
    wire.consume_input()
