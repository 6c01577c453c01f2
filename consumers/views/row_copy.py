"""Rows of a SELECT in one session copied into a table of another, by COPY."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psycopg import Connection

from gdq.owner_sql import OwnerSql

# Rows copied between two reports of progress.
_REPORT_ROWS = 10_000


def copy_rows(
    source: OwnerSql,
    query: str,
    sink: Connection[Any],
    into: str,
    copied_so_far: Callable[[int], None] = lambda _: None,
) -> int:
    """Copy a SELECT's rows from one session into `into`, a table or table (columns), of another; returns their number.

    The rows travel as text in the encoding of `source`. `copied_so_far` gets the number of rows every 10,000 rows.
    """
    theirs = sink.info.parameter_status("client_encoding")
    own = source.connection.info.parameter_status("client_encoding")
    set_encoding = "select pg_catalog.set_config('client_encoding', %s, true)"
    if own != theirs:
        sink.execute(set_encoding, [own])
    with sink.cursor() as writer:
        with (
            source.connection.cursor().copy(f"copy ({source.select(query)}) to stdout") as rows,
            writer.copy(f"copy {into} from stdin") as copy,
        ):
            for number, block in enumerate(rows, 1):  # one row each
                copy.write(block)
                if number % _REPORT_ROWS == 0:
                    copied_so_far(number)
        copied = writer.rowcount
    if own != theirs:
        sink.execute(set_encoding, [theirs])
    return copied
