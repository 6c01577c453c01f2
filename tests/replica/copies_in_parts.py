"""Copies of large tables in parts: how far one is, and a source that is written to meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import psycopg

from tests.replica.conftest import Pair, count


@contextmanager
def written(pair: Pair, statements: Callable[[int], Sequence[str]]) -> Iterator[None]:
    """Have statements run in the source all the time, those of 1, then those of 2, and so on."""
    done = threading.Event()

    def write() -> None:
        number = 0
        with pair.source.connect() as connection:
            while not done.is_set():
                number += 1
                for statement in statements(number):
                    with suppress(psycopg.errors.SerializationFailure):  # a row that moves to another partition
                        connection.execute(statement.encode())
                done.wait(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


def brought(pair: Pair) -> int:
    """How many rows the parts of a copy that is not whole have brought."""
    with pair.target.connect("su") as there:
        if count(there, "select to_regclass('gdq_target.chunked_copy') is null"):
            return 0
        rows = count(there, "select coalesce(sum(row_count), 0)::bigint from gdq_target.chunked_copy")
    assert isinstance(rows, int)
    return rows
