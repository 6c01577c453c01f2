"""Copies in chunks by several workers: ranges of a table that each go on where they were, and do not meet."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gdq.consumers.copy.chunk import ChunkedCopier
from gdq.consumers.copy.chunk_table import describe_table
from gdq.consumers.copy.chunk_work import TableProgress
from gdq.consumers.views.snapshot_holder import hold_snapshot
from gdq.errors import RefreshConflict
from tests.support.events import Tap
from tests.support.server import Database

pytestmark = pytest.mark.server

_RANGES = """select range_no, row_count, upto, until from gdq_target.chunked_copy
              where table_name = 'shop.r' order by range_no"""
_ROWS = "select id, u, x from shop.r order by id"


class Copied:
    """A table of 100 rows in ranges of the key; a target that has another unique index than the key's."""

    def __init__(self, tap: Tap, target: Database) -> None:
        self.tap, self.target = tap, target

    def run(self, **options: Any) -> None:
        options = {"chunk_rows": 5, "workers": 4, **options}
        with ChunkedCopier(self.tap.db.dsn, "q", ["shop.r"], self.target.su_dsn, "one", **options) as copier:
            copier.run()

    def there(self, query: str) -> list[tuple[Any, ...]]:
        with self.target.connect("su") as su:
            return su.execute(query.encode()).fetchall()

    def check(self) -> None:
        with self.tap.db.connect("su") as su:
            assert self.there(_ROWS) == su.execute(_ROWS.encode()).fetchall()


@pytest.fixture
def copied(tap: Tap, empty_db: Database) -> Iterator[Copied]:
    made = "create table shop.r (id int primary key, u int unique, x text)"
    with tap.db.connect("su") as su:
        su.execute("alter default privileges for role app grant select on tables to gdq_owner")
    with empty_db.connect("su") as su:
        su.execute("create schema shop")
        su.execute(made.encode())
    tap.write(made, "insert into shop.r select i, i, 'x' from generate_series(1, 100) i")
    tap.add("shop.r")
    yield Copied(tap, empty_db)
    assert not [thread for thread in threading.enumerate() if thread.name == "gdq copy"]


def test_every_range_goes_on_where_it_was(copied: Copied) -> None:
    """A worker that fails ends all; the next run, with another number of workers, has the ranges of the first."""
    kept: list[list[tuple[Any, ...]]] = []
    for workers in (4, 1, 2):

        def fail(done: TableProgress, _: str, seen: int = sum(row[1] for row in kept[-1]) if kept else 0) -> None:
            if done.rows >= seen + 10:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            copied.run(workers=workers, tell=fail)
        kept.append(copied.there(_RANGES))
        copied.tap.write("update shop.r set x = x || 'y' where id % 3 = 0", "delete from shop.r where id = 50")
    for before, after in itertools.pairwise(kept):
        assert [(number, until) for number, _, _, until in before] == [(number, until) for number, _, _, until in after]
        assert all(then <= now for (_, then, *_), (_, now, *_) in zip(before, after, strict=True))
        assert sum(row[1] for row in before) < sum(row[1] for row in after)
    assert [number for number, *_ in kept[0]] == [1, 2, 3, 4]
    copied.run()
    assert [(number, until) for number, _, _, until in copied.there(_RANGES)] == [(1, None)]
    copied.check()


def test_ranges_of_another_unique_key(copied: Copied) -> None:
    """Two rows of different ranges swap a value, so that either range alone would have it twice in the target."""
    swapped: list[bool] = []

    def swap(*_: object) -> None:
        if not swapped and len(copied.there("select from shop.r where id in (1, 100 - 24)")) == 2:
            swapped.append(True)
            copied.tap.write(
                "begin; update shop.r set u = -1 where id = 1; update shop.r set u = 1 where id = 76; "
                "update shop.r set u = 76 where id = 1; commit"
            )

    copied.run(tell=swap)
    assert swapped
    copied.check()


def test_whole_ranges_follow_the_changes_meanwhile(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range that has been copied is moved on while others are copied, so that the end has no hours to catch up."""
    monkeypatch.setattr("gdq.consumers.copy.chunk_work._FOLLOW_SECONDS", 0)
    seen: dict[int, set[str]] = {}

    def look(*_: object) -> None:
        copied.tap.write("update shop.r set x = left(x || 'y', 9)")
        ranges = copied.there("select range_no, whole, snapshot from gdq_target.chunked_copy")
        if not all(whole for _, whole, _ in ranges):
            for number, whole, snapshot in ranges:
                if whole:
                    seen.setdefault(number, set()).add(snapshot)

    with pytest.raises(ZeroDivisionError):
        copied.run(tell=lambda *_: 1 // 0)
    copied.run(tell=look, workers=1)
    assert max(len(snapshots) for snapshots in seen.values()) > 2
    copied.check()


def test_a_range_that_another_program_has_moved(copied: Copied) -> None:
    def meddle(done: TableProgress, _: str) -> None:
        if done.rows >= 20:
            copied.there("update gdq_target.chunked_copy set row_count = row_count + 1 returning 1")

    with pytest.raises(RefreshConflict, match=r'another session has moved copy "one" of table shop\.r'):
        copied.run(tell=meddle)


@pytest.mark.parametrize(
    "made", ["(a text, b int, primary key (b, a))", "(a text, b int, primary key (a, b)) partition by list (a)"]
)
def test_bounds_divide_a_table_without_statistics(tap: Tap, made: str) -> None:
    tap.write(f"create table shop.many {made}")
    if "partition" in made:
        tap.write("create table shop.many_x partition of shop.many for values in ('x')")
        tap.write("create table shop.many_rest partition of shop.many default")
    tap.write("insert into shop.many select 'x', i from generate_series(1, 3000) i")
    tap.add("shop.many")
    with tap.db.connect("su") as su, hold_snapshot(tap.db.su_dsn, "q", ["shop.many"]) as holder:
        table = describe_table(holder.connection, "q", "shop.many")
        for ranges, size, expected in ((3, 10, 3), (3, 1500, 2), (3, 1501, 1), (1, 10, 1)):
            bounds = table.dividing_bounds(holder.connection, ranges, size)
            assert len(bounds) == expected - 1
            edges = [None, *bounds, None]
            counts = [
                su.execute(f"select from ({table.rows(after, upto)}) r".encode()).rowcount
                for after, upto in itertools.pairwise(edges)
            ]
            assert sum(counts) == 3000
            assert max(counts) == min(counts)


def test_a_table_without_rows_has_one_range(tap: Tap) -> None:
    tap.write("create table shop.none (id int primary key)")
    tap.add("shop.none")
    with hold_snapshot(tap.db.su_dsn, "q", ["shop.none"]) as holder:
        assert describe_table(holder.connection, "q", "shop.none").dividing_bounds(holder.connection, 4, 10) == []
