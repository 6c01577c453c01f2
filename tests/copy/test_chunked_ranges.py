"""Copies in chunks by several workers: ranges of a table that each go on where they were, and do not meet."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from gdq.consumers.copy.chunk import ChunkedCopier
from gdq.consumers.copy.chunk_step import ChunkSteps
from gdq.consumers.copy.chunk_table import ChunkTable, describe_table
from gdq.consumers.copy.chunk_work import TableProgress
from gdq.consumers.views import snapshot_holder
from gdq.consumers.views.snapshot_holder import hold_snapshot, log_segments
from gdq.errors import RefreshConflict
from tests.support.events import Tap
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = pytest.mark.server

_RANGES = """select range_no, row_count, upto, until from gdq_target.chunked_copy
              where table_name = 'shop.r' order by range_no"""
_ROWS = "select id, u, x from shop.r order by id"


class Copied:
    """A table of 100 rows in ranges of the key; a target that has another unique index than the key's."""

    def __init__(self, tap: Tap, target: Database) -> None:
        self.tap, self.target = tap, target

    def run(self, **options: Any) -> None:
        options = {"chunk_rows": 5, "workers": 4, "tables": ["shop.r"], **options}
        tables = options.pop("tables")
        with ChunkedCopier(self.tap.db.dsn, "q", tables, self.target.su_dsn, "one", **options) as copier:
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


def test_ranges_follow_the_changes_meanwhile(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was copied is moved on while the rest is copied: so the end has no hours to catch up, and the log goes."""
    monkeypatch.setattr("gdq.consumers.copy.chunk_work._FOLLOW_SECONDS", 0)
    snapshots: dict[int, set[str]] = {}
    kept: list[int] = []

    def look(*_: object) -> None:
        copied.tap.write("update shop.r set x = left(x || 'y', 9)")
        copied.tap.owner.execute("select gdq.force_tick('q')")
        ranges = copied.there("select range_no, whole, snapshot from gdq_target.chunked_copy")
        if not all(whole for _, whole, _ in ranges):
            for number, whole, snapshot in ranges:
                if whole:
                    snapshots.setdefault(number, set()).add(snapshot)
        query = """select consumer_name, last_tick from gdq.consumer_info('q')
                    where consumer_name in ('copy one', 'mirror')"""
        [(name, tick)] = copied.tap.owner.execute(query).fetchall()
        assert name == "copy one"  # the consumer would keep the log of the whole copy
        kept.append(tick)

    with pytest.raises(ZeroDivisionError):
        copied.run(tell=lambda *_: 1 // 0)
    copied.run(tell=look, workers=1, consumer="mirror")
    assert max(len(found) for found in snapshots.values()) > 2
    assert kept == sorted(kept)
    assert len(set(kept)) > 2
    copied.check()


def test_an_application_with_two_locks_is_no_victim(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last step the copy has one table and waits for another one, which an application has that waits, too."""
    copied.tap.write("create table shop.s (id int primary key)")
    copied.tap.add("shop.s")
    arrive = ChunkSteps.arrive
    with copied.target.connect("su") as there, copied.tap.db.connect("su") as app, copied.tap.db.connect("su") as su:
        there.execute("create table shop.s (id int primary key)")
        # the server would end the copy's session, which waits first
        su.execute(f"alter role gdq_owner in database {copied.tap.db.name} set deadlock_timeout = '1h'".encode())
        app.execute("set deadlock_timeout = '2s'")

        def wait(steps: ChunkSteps, *values: Any) -> Any:
            app.execute("begin; lock table shop.s")
            with ThreadPoolExecutor(1) as pool:
                arrived = pool.submit(arrive, steps, *values)
                waits = "select from pg_locks where relation = 'shop.s'::regclass and not granted"
                until(lambda: su.execute(waits).rowcount, "the copy at the lock")
                app.execute("lock table shop.r; commit")
                return arrived.result()

        monkeypatch.setattr(ChunkSteps, "arrive", wait)
        copied.run(tables=["shop.r", "shop.s"])
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


def test_logs_that_are_dropped_before_they_are_locked(tap: Tap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance drops the logs of an old version of the columns while their table is waited for."""
    tap.write("create table shop.many (id int primary key)")
    tap.add("shop.many")
    tap.write("insert into shop.many values (1)", "alter table shop.many add x int", "insert into shop.many values (2)")
    tap.owner.execute("select gdq.unregister_consumer('q', %s)", [tap.consumer])
    listed: list[set[str]] = []

    def are_dropped() -> bool:
        tap.owner.execute("select gdq.force_tick('q')")
        tap.owner.execute("select gdq.maintain()")
        return bool(listed[0] - set(log_segments(tap.owner, "q", ["shop.many"])))

    def list_and_drop(connection: psycopg.Connection[Any], queue: str, tables: Sequence[str]) -> list[str]:
        found = log_segments(connection, queue, tables)
        listed.append(set(found))
        if len(listed) == 1:
            until(are_dropped, "dropped logs")
        return found

    monkeypatch.setattr(snapshot_holder, "log_segments", list_and_drop)
    with hold_snapshot(tap.db.su_dsn, "q", ["shop.many"]) as holder:
        assert holder.connection.execute("select count(*) from shop.many").fetchone() == (2,)
    assert listed[0] - listed[-1]
    with pytest.raises(psycopg.errors.UndefinedTable), hold_snapshot(tap.db.su_dsn, "q", ["shop.none"]):
        pass


def test_children_of_the_target_keep_their_rows(copied: Copied) -> None:
    """Rows of inheritance children are not the table's own, though they have its keys."""
    with copied.target.connect("su") as su:
        su.execute("create table shop.child () inherits (shop.r)")
        su.execute("insert into shop.child values (7, 7, 'child'), (60, 60, 'child')")

    def change(*_: object) -> None:
        copied.tap.write(
            "update shop.r set x = left(x || 'y', 9) where id in (7, 60)", "delete from shop.r where id = 8"
        )

    copied.run(tell=change)
    assert copied.there("select id, x from shop.child order by id") == [(7, "child"), (60, "child")]
    with copied.tap.db.connect("su") as su:
        assert copied.there("select id, u, x from only shop.r order by id") == su.execute(_ROWS.encode()).fetchall()


def test_a_key_that_includes_other_columns(copied: Copied) -> None:
    made = "create table shop.i (id int, x text, primary key (id) include (x))"
    copied.tap.write(made, "insert into shop.i select i, 'x' from generate_series(1, 20) i")
    copied.tap.add("shop.i")
    with copied.target.connect("su") as su:
        su.execute(made.encode())
    copied.run(tables=["shop.i"], tell=lambda *_: copied.tap.write("update shop.i set x = 'y' where id % 3 = 0"))
    with copied.tap.db.connect("su") as su:
        rows = "select id, x from shop.i order by id"
        assert copied.there(rows) == su.execute(rows.encode()).fetchall()


def test_chunks_end_at_keys_of_some_blocks(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of about the size that was asked for, by a look at the table for each range; rows come meanwhile."""
    monkeypatch.setattr("gdq.consumers.copy.chunk_bounds._APART_ROWS", 1000)
    copied.tap.write("insert into shop.r select i, i, 'x' from generate_series(101, 30000) i")
    looks, sizes = list[tuple[str, ...] | None](), list[int]()
    look, count = ChunkTable.sampled_bounds, ChunkTable.next_bound

    def looked(table: ChunkTable, *args: Any) -> Any:
        looks.append(args[1])
        return look(table, *args)

    def counted(table: ChunkTable, connection: Any, after: Any, until: Any, size: int) -> Any:
        assert after is not None
        sizes.append(size)
        return count(table, connection, after, until, size)

    monkeypatch.setattr(ChunkTable, "sampled_bounds", looked)
    monkeypatch.setattr(ChunkTable, "next_bound", counted)
    rows, most = 0, 0

    def told(done: TableProgress, _: str) -> None:
        nonlocal rows, most
        rows, most = done.rows, max(most, done.rows - rows)
        if len(sizes) == 0:
            copied.tap.write(f"insert into shop.r values (-{done.rows}, -{done.rows}, 'y') on conflict do nothing")

    copied.run(workers=1, chunk_rows=3000, tell=told)
    assert looks == [None]
    assert 2000 < most < 4000
    assert sizes == [3000] * len(sizes)
    assert len(sizes) <= 2  # the rows behind the last key alone are counted
    copied.check()


@pytest.mark.parametrize("after", [None, ("12000",)])
def test_sampled_bounds_divide_evenly(tap: Tap, after: tuple[str, ...] | None) -> None:
    """Each key is behind the last, at about the distance that was asked for: a fourth of the blocks is looked at."""
    made = "create table shop.r (id int primary key, x text)"
    tap.write(made, "insert into shop.r select i, repeat('x', 200) from generate_series(1, 60000) i")
    tap.add("shop.r")
    with tap.db.connect("su") as su, hold_snapshot(su, "q", ["shop.r"]) as holder:
        table = describe_table(holder.connection, "q", "shop.r")
        bounds = table.sampled_bounds(holder.connection, after, ("50000",), 5000)
    keys = [int(key) for (key,) in bounds]
    begin = 0 if after is None else int(after[0])
    assert begin < keys[0]
    assert keys[-1] <= 50000
    assert len(keys) >= (50000 - begin) // 5000 - 1
    assert all(1500 < later - earlier < 8500 for earlier, later in itertools.pairwise([begin, *keys]))
