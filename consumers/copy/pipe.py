"""A pipe between two sessions: the rows of one COPY TO go, in large blocks, into another session's COPY FROM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection, pq

from gdq.sql_text import raw

# Bytes that are handed over at once.
_BLOCK_BYTES = 256 * 1024


class CopyStopped(Exception):  # noqa: N818 (it says what happened)
    """Another part of the copy has failed, or the user has stopped it."""


@dataclass(frozen=True, slots=True)
class CopyRoute:
    """What stands between COPY and TO, and between COPY and FROM, and the form of the rows: binary or text."""

    copied: str
    into: str
    form: str


def pipe_rows(
    source: Connection[Any], sink: Connection[Any], route: CopyRoute, moved: Callable[[int, int], None]
) -> tuple[int, int]:
    """Copy rows from one session to another; returns the rows and bytes.

    `moved` gets the rows and bytes since it was called last; what it raises ends the copy.
    """
    total = 0
    out = raw(f"copy {route.copied} to stdout (format {route.form})")
    with sink.cursor() as writer:
        with (
            source.cursor().copy(out) as rows,
            writer.copy(raw(f"copy {route.into} from stdin (format {route.form})")) as copy,
        ):
            wire = source.pgconn
            ended = False
            while not ended and (first := rows.read()):
                blocks, size = [first], len(first)
                # What libpq has received already is taken without a step of psycopg's for every row.
                while size < _BLOCK_BYTES:
                    length, block = wire.get_copy_data(1)
                    if length <= 0:
                        ended = length < 0
                        break
                    blocks.append(block)
                    size += length
                copy.write(b"".join(blocks))
                total += size
                moved(len(blocks), size)
            if ended:
                _finish(wire)
        return writer.rowcount, total


def _finish(wire: pq.abc.PGconn) -> None:
    """Take the result of a COPY whose last row was read; raises the error that ended it."""
    failed = None
    while (result := wire.get_result()) is not None:
        if result.status != pq.ExecStatus.COMMAND_OK:
            failed = failed or result
    if failed is not None:
        raise psycopg.errors.error_from_result(failed)
