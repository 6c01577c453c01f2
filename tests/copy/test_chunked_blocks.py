"""Copies of tables without a key, which are read block by block while their rows move between the blocks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gdq.consumers.copy.chunk import ChunkedCopier
from gdq.consumers.copy.chunk_work import TableProgress
from tests.copy.arrival import check_arrival
from tests.support.events import Tap
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = pytest.mark.server

# three rows fill a block
_TABLE = "create table shop.k (id int, n int, pad text)"
_PAD = "alter table shop.k alter pad set storage plain"
_FILL = "insert into shop.k select i, 0, repeat(chr(97 + i % 26), 2500) from generate_series(1, 30) i"


class Moving:
    """A table of twenty blocks, its target, and an application that writes after every step of the copy."""

    def __init__(self, tap: Tap, target: Database) -> None:
        self.tap, self.target, self.random = tap, target, random.Random(3)
        self.readings: set[int] = set()
        self.told: list[str] = []
        self.steps = self.moved_on = self.moved_back = 0

    def copy(self, write: Callable[[], None], **options: Any) -> None:
        """Copy block by block, and let the application write after each one."""

        def tell(_: TableProgress, what: str) -> None:
            self.told.append(what)
            self.steps += 1
            write()

        options = {"chunk_rows": 1, "workers": 2, "consumer": "mirror", "copy": "one", **options}
        with ChunkedCopier(self.tap.db.dsn, "q", ["shop.k"], self.target.su_dsn, tell=tell, **options) as copier:
            copier.run()
        check_arrival(self.tap.db, self.target, "mirror", {"shop.k": ("id", "n::int", "pad")})

    def block(self) -> int:
        """Before which block the copy is; 0 between two readings."""
        found = self.there("select upto from gdq_target.chunked_copy where upto is not null")
        if not found:
            return 0
        reading, _, _, block, _ = map(int, json.loads(found[0][0]))
        self.readings.add(reading)
        return block

    def there(self, query: str) -> list[tuple[Any, ...]]:
        with self.target.connect("su") as su:
            found = su.execute(query.encode())
            return found.fetchall() if found.description else []

    def update(self, change: str, blocks: str) -> None:
        """Change a row of some blocks, and note whether it has left those that are read, or those that are not."""
        read = self.block()
        places = "select (ctid::text::point)[0]::int as block, ctid from shop.k"
        chosen = f"(select ctid from ({places}) as p where {blocks} order by block, ctid limit 1)"
        query = f"""with was as (select ctid as place from shop.k where ctid = {chosen})
                    update shop.k as t set {change} from was where t.ctid = was.place
                    returning (was.place::text::point)[0]::int, (t.ctid::text::point)[0]::int"""
        for before, after in self.tap.app.execute(query.encode()).fetchall():
            self.moved_on += before < read <= after
            self.moved_back += after < read <= before

    def move(self) -> None:
        """Rows leave the blocks that are read, and, when VACUUM has made room there, those that are not."""
        read, change = self.block(), self.random.choice(["n = t.n", "n = t.n + 1", "n = 0"])
        self.update(change, f"block < {read}")
        with self.tap.db.connect("su") as su:
            su.execute("vacuum shop.k")
        self.update(change, f"block > {read}")
        one = self.random.randint(1, 30)
        self.tap.write(
            f"delete from shop.k where ctid = (select max(ctid) from shop.k where id = {one})",
            f"insert into shop.k select * from shop.k where id = {one + 1} limit 1",
        )


@pytest.fixture
def moving(tap: Tap, empty_db: Database) -> Moving:
    with tap.db.connect("su") as su, empty_db.connect("su") as there:
        su.execute("alter default privileges for role app grant select on tables to gdq_owner")
        there.execute("create schema shop")
        there.execute(_TABLE.encode())
    tap.write(_TABLE, _PAD, _FILL, _FILL)
    tap.add("shop.k")
    return Moving(tap, empty_db)


def test_rows_that_move_between_steps(moving: Moving) -> None:
    moving.copy(moving.move)
    assert moving.moved_on > 5
    assert moving.moved_back > 5
    assert moving.readings >= {1, 2, 3}


@pytest.mark.long
def test_rows_that_never_rest(moving: Moving) -> None:
    """Equal rows that come and go all the time are counted in one snapshot in the end."""

    def write() -> None:
        moving.block()
        moving.tap.write(
            "update shop.k set n = n where id = 7",
            "delete from shop.k where ctid = (select min(ctid) from shop.k where id = 8)",
            "insert into shop.k select * from shop.k where id = 8 limit 1",
        )

    moving.copy(write)
    assert max(moving.readings) == 4


def test_a_table_that_rests_is_read_once(moving: Moving) -> None:

    def write() -> None:
        moving.block()

    moving.copy(write)
    assert moving.readings == {1}
    assert 20 <= moving.steps <= 24


@pytest.mark.long
def test_rows_that_go_on_with_a_unique_value(moving: Moving) -> None:
    """A row is met at its next place with the value that the target has from the place before."""
    moving.tap.write("delete from shop.k where ctid in (select max(ctid) from shop.k group by id)")
    moving.there("create unique index on shop.k (id) include (n)")
    with moving.tap.db.connect("su") as su:
        su.execute("vacuum shop.k")

    def write() -> None:
        moving.update("n = t.n + 1", f"block < {moving.block()}")
        moving.update("id = t.id + 100", f"block < {moving.block()} and id < 100")
        moving.tap.write("update shop.k set id = id - 100 where id > 110")

    moving.copy(write)
    assert moving.moved_on > 0


@pytest.mark.long
def test_rows_of_another_form_in_the_target(moving: Moving) -> None:
    """The target's texts are others than the source's: all rows come again, and the target sorts them out."""
    moving.there("alter table shop.k alter n type numeric(9, 2), alter id type text")
    moving.copy(moving.move)
    assert moving.moved_on > 5
    assert moving.readings >= {1, 2, 3}


@pytest.mark.long
def test_vacuum_full_meanwhile(moving: Moving) -> None:
    def write() -> None:
        if moving.steps == 5:
            with moving.tap.db.connect("su") as su:
                su.execute("delete from shop.k where id % 3 = 0")
                su.execute("vacuum full shop.k")

    moving.copy(write)
    assert "started again: its rows were moved, as VACUUM FULL does" in moving.told


def test_no_snapshot_is_held_while_the_target_is_slow(moving: Moving) -> None:
    """The target's table is searched for rows that went when the source's snapshot has been given back."""
    held = "select state, backend_xmin from pg_stat_activity where application_name = 'gdq:q/copy' and datname = %s"
    with moving.target.connect("su", autocommit=False) as locker, moving.target.connect("su") as there:

        def write() -> None:
            if moving.steps == 1:
                moving.tap.write("delete from shop.k where id < 10")
                locker.execute("lock table shop.k in share row exclusive mode")

        with ThreadPoolExecutor(1) as pool:
            copying = pool.submit(moving.copy, write, chunk_rows=1000)
            waits = "select from pg_locks where relation = 'shop.k'::regclass and not granted"
            until(lambda: copying.done() or there.execute(waits).rowcount, "the copy at the lock")
            with moving.tap.db.connect("su") as su:
                found = su.execute(held, [moving.tap.db.name]).fetchall()
            locker.commit()
            copying.result()
    assert set(found) == {("idle", None)}
