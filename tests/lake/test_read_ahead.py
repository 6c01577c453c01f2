"""Reading ahead gives the same items, the same errors, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import closing

import psycopg
import pytest

from gdq.consumers.lake.read_ahead import read_ahead
from gdq.consumers.lake.types import lake_columns, read_lake_rows
from gdq.owner_sql import OwnerSql
from tests.support.server import Database
from tests.support.waiting import SECONDS, until

MANY = "select g::bigint, repeat('x', 100) from generate_series(1, 300000) g"


def test_items_in_their_order_and_not_too_many() -> None:
    taken: list[int] = []

    def items() -> Generator[int, None, None]:
        for number in range(10):
            taken.append(number)
            yield number

    with closing(read_ahead(items(), 2, lambda: None)) as found:
        assert next(found) == 0
        until(lambda: len(taken) == 3)  # two are ahead of the one that was given
        assert list(found) == list(range(1, 10))
    assert len(taken) == 10


def test_an_error_and_an_early_end() -> None:
    closed = threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            yield 1
            raise ValueError("two")
        finally:
            closed.set()

    found = read_ahead(items(), 2, lambda: None)
    assert next(found) == 1
    with pytest.raises(ValueError, match="two"):
        next(found)
    assert closed.is_set()
    closed.clear()
    found = read_ahead(items(), 1, lambda: None)
    assert next(found) == 1
    found.close()
    assert closed.is_set()


def test_what_is_waited_for_is_cancelled() -> None:
    cancelled = threading.Event()

    def items() -> Generator[int, None, None]:
        yield 1
        assert cancelled.wait(SECONDS)
        raise TimeoutError("cancelled")

    found = read_ahead(items(), 2, cancelled.set)
    assert next(found) == 1
    found.close()
    assert cancelled.is_set()


_LEFT_OPEN = """
import itertools, sys
from gdq.consumers.lake.read_ahead import read_ahead

def write():
    found = read_ahead((number for number in itertools.count()), 2, lambda: None)
    for _ in found:
        raise OSError("no space left")

try:
    write()
except OSError as error:
    kept = error  # and so write()'s frame with the iterator
    sys.exit(3)
"""


def test_a_program_ends_that_has_left_it_open() -> None:
    done = subprocess.run([sys.executable, "-c", _LEFT_OPEN], check=False, capture_output=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (3, b"")


@pytest.mark.server
def test_rows_of_a_large_table(db: Database) -> None:
    """More than one block; after an early end the session is idle, or in the caller's transaction."""
    columns = lake_columns([("n", 20, "bigint"), ("x", 25, "text")], "parquet")
    with db.connect() as connection:
        owned = OwnerSql(connection, None)
        numbers = [n for rows in read_lake_rows(owned, MANY, columns) for n in rows.column("n").to_pylist()]
        assert numbers == list(range(1, 300001))
        with closing(read_lake_rows(owned, MANY, columns)) as found:
            next(found)
        assert connection.execute("select 1").fetchone() == (1,)
        wrong = f"{MANY} union all select 1 / (g - g), 'y' from generate_series(1, 1) g"
        with pytest.raises(psycopg.errors.DivisionByZero):
            list(read_lake_rows(owned, wrong, columns))
        assert connection.execute("select 1").fetchone() == (1,)
