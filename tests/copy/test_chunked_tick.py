"""Copies in chunks that arrive at an earlier tick: of another consumer, before changes that were copied already."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gdq.consumers.copy.chunk import ChunkedCopier, ChunkedCopy
from gdq.errors import GdqError, ResyncRequired
from tests.copy.arrival import check_arrival
from tests.support.events import Tap
from tests.support.programs import gdq
from tests.support.server import Database

pytestmark = pytest.mark.server

_TABLES = {
    "shop.a": "create table shop.a (id int, x text, n numeric, primary key (id))",
    "shop.b": "create table shop.b (id int, x text, n numeric)",
}


class Ticked:
    """Two tables, one without a key, and an application that changes some rows of both."""

    def __init__(self, tap: Tap, target: Database) -> None:
        self.tap, self.target, self.random = tap, target, random.Random(3)

    def write(self, *_: object) -> None:
        for table in _TABLES:
            first = self.random.randint(1, 60)
            some = f"id between {first} and {first + 4}"
            new = f"select i, 'new', 1.00 from generate_series({first}, {first + 9}) i"
            self.tap.write(
                f"update {table} set x = x || 'u', n = n + 0.50 where {some}",
                f"delete from {table} where {some} and id % 2 = 0",
                f"insert into {table} {new} {'on conflict do nothing' if table == 'shop.a' else ''}",
                f"delete from {table} where id = -{first + 6}",
                f"update {table} set id = -id where id = {first + 6}",
            )

    def tick(self) -> int:
        row = self.tap.owner.execute("select gdq.force_tick('q')").fetchone()
        assert row is not None
        return int(row[0])

    def copy(self, tick: int, **options: Any) -> ChunkedCopy:
        options = {"copy": "one", "consumer": "mirror", "chunk_rows": 9, "tell": self.write, **options}
        tables = options.pop("tables", [*_TABLES])
        with ChunkedCopier(self.tap.db.dsn, "q", tables, self.target.su_dsn, tick=tick, **options) as copier:
            return copier.run()

    def check(self) -> None:
        check_arrival(self.tap.db, self.target, "mirror", dict.fromkeys(_TABLES, ("id", "x", "n")))


@pytest.fixture
def ticked(tap: Tap, empty_db: Database) -> Ticked:
    with tap.db.connect("su") as su:
        su.execute("alter default privileges for role app grant select on tables to gdq_owner")
    with empty_db.connect("su") as su:
        su.execute("create schema shop")
        for table in _TABLES.values():
            su.execute(table.encode())
    for name, table in _TABLES.items():
        tap.write(table, f"insert into {name} select i, 'x', i / 4.0 from generate_series(1, 50) i")
        tap.add(name)
    tap.write("insert into shop.b select * from shop.b where id % 3 = 0")
    return Ticked(tap, empty_db)


def test_tables_arrive_where_a_consumer_is(ticked: Ticked) -> None:
    """A killed run has gone past the tick; the next one takes it back. The consumer was there before."""
    ticked.tap.owner.execute("select gdq.register_consumer('q', 'mirror')")
    ticked.write()
    tick = ticked.tick()
    ticked.tap.owner.execute("select gdq.seek('q', 'mirror', at_tick => %s)", [tick])
    ticked.write()

    def fail(*_: object) -> None:
        ticked.write()
        if ticked.random.random() < 0.3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ticked.copy(tick, tell=fail)
    ticked.write()
    done = ticked.copy(tick)
    assert f"/{tick}/" in done.position
    ticked.write()
    ticked.check()
    with pytest.raises(GdqError, match=f'copy "one" has arrived at tick {tick}, not at tick'):
        ticked.copy(ticked.tick())


def test_a_tick_after_the_last_chunk(ticked: Ticked) -> None:
    """What an earlier run has copied goes forward to the tick, and not beyond."""
    seen = []

    def fail(*_: object) -> None:
        seen.append(True)
        if len(seen) > 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ticked.copy(ticked.tick(), tell=fail)
    ticked.write()
    tick = ticked.tick()
    ticked.copy(tick)
    ticked.write()
    ticked.check()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("truncate shop.a", "table shop.a cannot be taken back to tick .*: there was a truncate after it"),
        ("alter table shop.b add y int", "table shop.b cannot be taken back to tick .*: there was a ddl after it"),
    ],
)
def test_what_rows_do_not_show(ticked: Ticked, action: str, message: str) -> None:
    """It is said before anything is copied, and also if it happens during the copy; then another tick will do."""
    tick = ticked.tick()
    done: list[bool] = []

    def act(*_: object) -> None:
        if not done:
            done.append(True)
            ticked.tap.write(action)
            with ticked.target.connect("su") as su:
                if "alter" in action:
                    su.execute(action.encode())

    for tell in (act, lambda *_: pytest.fail("something was copied")):
        with pytest.raises(GdqError, match=message):
            ticked.copy(tick, tell=tell)
    ticked.copy(ticked.tick())
    ticked.check()


def test_ticks_that_are_refused(ticked: Ticked) -> None:
    first = ticked.tick()
    ticked.tap.write(
        "create table shop.late (id int primary key)", "create table shop.keys (id int primary key, x int)"
    )
    ticked.tap.add("shop.late")
    ticked.tap.add("shop.keys", mode="pk")
    with ticked.target.connect("su") as su:
        su.execute("create table shop.late (id int primary key); create table shop.keys (id int primary key, x int)")
    with pytest.raises(GdqError, match='queue "q" has no tick 99999'):
        ticked.copy(99999)
    with pytest.raises(ResyncRequired, match=r"capture of table shop\.late begins after snapshot"):
        ticked.copy(first, tables=["shop.late"])
    with pytest.raises(GdqError, match=r"the log of table shop\.keys lacks columns? (id, )?x"):
        ticked.copy(ticked.tick(), tables=["shop.keys"])
    ticked.tap.owner.execute("select gdq.register_consumer('q', 'mirror')")
    with pytest.raises(GdqError, match=f'consumer "mirror" is at tick .*, past tick {first}'):
        ticked.copy(first)
    keepers = "select count(*) from gdq.consumer_info('q') where consumer_name like 'copy%'"
    assert ticked.tap.owner.execute(keepers).fetchone() == (0,)


def test_the_command(ticked: Ticked) -> None:
    tick = ticked.tick()
    ticked.write()
    command = [
        "snapshot",
        *_TABLES,
        "--to",
        ticked.target.su_dsn,
        "-q",
        "q",
        "--register",
        "mirror",
        "--tick",
        str(tick),
    ]
    refused = gdq(*command, dsn=ticked.tap.db.dsn)
    assert (refused.returncode, "--tick needs --chunked" in refused.stderr) == (2, True)
    done = gdq(*command, "--chunked", dsn=ticked.tap.db.dsn)
    assert done.returncode == 0, done.stderr
    ticked.check()
