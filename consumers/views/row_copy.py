"""Rows from one session to another: COPY TO of the one goes, in large blocks, into COPY FROM of the other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import psycopg
from psycopg import Connection, pq

from gdq.sql_text import raw

# Bytes that are handed over at once, unless one row has more: less than the buffers of a socket hold, so that both
# servers are at work while the program is at the other one.
BLOCK_BYTES = 64 * 1024

CopyForm = Literal["binary", "text"]

# A copy in binary form begins with so many bytes, and ends with a number of columns that no row has.
# https://www.postgresql.org/docs/current/sql-copy.html
_HEADER_BYTES = 19
_TRAILER = b"\xff\xff"

# Text is in one encoding whatever the two sessions have; values in binary form follow the sessions, which are gdq's.
_OPTIONS: dict[CopyForm, str] = {"binary": "format binary", "text": "format text, encoding 'UTF8'"}


@dataclass(frozen=True, slots=True)
class RowsCopied:
    """What copy_rows() has moved: the rows that the sink's server counted, and the bytes that were sent for them."""

    rows: int
    bytes: int


def copy_rows(
    source: Connection[Any],
    copied: str,
    sink: Connection[Any],
    into: str,
    *,
    form: CopyForm = "text",
    moved: Callable[[int], None] = lambda _: None,
) -> RowsCopied:
    """Copy rows from one session to another.

    `copied` stands between COPY and TO: a table, table (columns), or a SELECT in parentheses; `into` between COPY and
    FROM. `moved` gets the number of rows since it was called last; what it raises ends the copy.
    """
    options, size = _OPTIONS[form], 0
    with sink.cursor() as writer:
        with (
            closing(copy_blocks(source, f"copy {copied} to stdout ({options})")) as blocks,
            writer.copy(raw(f"copy {into} from stdin ({options})")) as copy,
        ):
            for block, rows in blocks:
                copy.write(block)
                size += len(block)
                moved(rows)
        return RowsCopied(writer.rowcount, size)


def copy_in_parts(
    source: Connection[Any],
    copied: str,
    sink: Connection[Any],
    parts: Iterable[tuple[str, int]],
    *,
    moved: Callable[[int], None] = lambda _: None,
) -> Generator[RowsCopied, None, None]:
    """Copy rows in binary form, the first ones into the first of some tables, and so on; what was moved into each.

    `parts`: what stands between COPY and FROM, and about how many bytes go there; it is asked for another part when
    there are rows left, and must have one. `copied`, `moved`: as for copy_rows().
    """
    with closing(copy_blocks(source, f"copy {copied} to stdout ({_OPTIONS['binary']})")) as blocks:
        ended: tuple[bytes, int] = (b"", 0)
        block, rows = next(blocks, ended)
        header, is_first = block[:_HEADER_BYTES], True
        for into, limit in parts:
            with sink.cursor() as writer:
                with writer.copy(raw(f"copy {into} from stdin ({_OPTIONS['binary']})")) as copy:
                    size = 0 if is_first else len(header)
                    copy.write(header[:size])
                    while block and size < limit:
                        copy.write(block)
                        size += len(block)
                        moved(rows)
                        block, rows = next(blocks, ended)
                    copy.write(_TRAILER if block else b"")
                yield RowsCopied(writer.rowcount, size)
            is_first = False
            if block in (b"", _TRAILER):
                return


def copy_blocks(
    source: Connection[Any], statement: str, block_bytes: int = BLOCK_BYTES
) -> Generator[tuple[bytes, int], None, None]:
    """The data of a COPY TO STDOUT as blocks of whole rows of about `block_bytes`, each with its number of rows.

    Close the iterator when you leave it before its end: the session is in COPY until then.
    """
    with source.cursor().copy(raw(statement)) as rows:
        wire = source.pgconn
        ended = False
        while not ended and (first := rows.read()):
            # one buffer: a list of rows would take many times their bytes where they are small
            block, count = bytearray(first), 1
            # what libpq has received already is taken without a step of psycopg's for every row
            while len(block) < block_bytes:
                length, row = wire.get_copy_data(1)
                if length < 0:
                    ended = True
                    break
                more = row if length else rows.read()
                if not more:
                    break
                block += more
                count += 1
            if ended:
                _finish(wire)  # before the block: whoever stops at it leaves the session idle
            yield bytes(block), count


def _finish(wire: pq.abc.PGconn) -> None:
    """Take the result of a COPY whose last row was read; raises the error that ended it."""
    failed = None
    while (result := wire.get_result()) is not None:
        if result.status != pq.ExecStatus.COMMAND_OK:
            failed = failed or result
    if failed is not None:
        raise psycopg.errors.error_from_result(failed)
