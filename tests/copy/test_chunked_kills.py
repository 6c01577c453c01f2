"""A chunked copy that is killed at random moments goes on where it was, under writers, rotations and DDL."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.copy.arrival import check_arrival
from tests.support.events import Tap
from tests.support.programs import environment
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.long]

_ROWS = 30_000
_KILLS = 30
_TABLES = {
    # the target has its unique key, too, so that ranges meet in it
    "shop.big": "create table shop.big (id int primary key, u int unique, x text)",
    "shop.pair": "create table shop.pair (a text, b int, x text, primary key (a, b))",
    "shop.bag": "create table shop.bag (id int, x text)",
    "shop.ddl": "create table shop.ddl (id int primary key, x text)",
}
_COLUMNS = {
    "shop.big": ("id", "u", "x"),
    "shop.pair": ("a", "b", "x"),
    "shop.bag": ("id", "x"),
    "shop.ddl": ("id", "x"),
}
_STORED = """select table_name, range_no, row_count, pg_snapshot_xmax(snapshot::pg_snapshot)::text::bigint, until,
                    whole, arrived
               from gdq_target.chunked_copy order by 1, 2"""
_PROGRAM = """
import sys
from gdq.consumers.copy.chunk import copy_in_chunks
queue, target, tick, *tables = sys.argv[1:]
copy_in_chunks(None, queue, tables, target, copy="one", consumer="mirror", chunk_rows=40, workers=3,
               tick=int(tick) or None)
"""


class Application:
    """A thread that writes, has the logs rotate and, until it is told otherwise, alters shop.ddl."""

    def __init__(self, tap: Tap, target: Database, seed: int) -> None:
        self.tap, self.target, self.random = tap, target, random.Random(seed)
        self.alters, self.altered, self.columns = True, 0, 0
        self._ended = threading.Event()
        self.failed: list[BaseException] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="application", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
        assert not self.failed, self.failed

    def _run(self) -> None:
        try:
            while not self._ended.wait(self.random.uniform(0, 0.02)):
                with suppress(psycopg.errors.UniqueViolation):  # a row that meets another under its new key
                    self.tap.write(self._write())
                if self.random.random() < 0.05:
                    self.tap.owner.execute("select gdq.force_tick('q')")
                    self.tap.owner.execute("select gdq.maintain()")
                if self.alters and self.random.random() < 0.01:
                    self._alter()
        except BaseException as error:
            self.failed.append(error)

    def _write(self) -> str:
        one, other = self.random.sample(range(1, _ROWS), 2)
        some = f"between {one} and {one + self.random.choice((0, 3, 200))}"
        table = self.random.choice(("shop.big", "shop.bag", "shop.ddl"))
        return self.random.choice(
            (
                f"update {table} set x = left(x || '{one}', 20) where id {some}",
                f"delete from {table} where id {some} and id % 5 = 0",
                f"insert into shop.big values ({one}, {one}, 'new') on conflict do nothing",
                f"insert into shop.bag values ({one}, 'new'), ({one}, 'new'), ({one}, null)",
                f"insert into shop.ddl (id, x) values ({one}, 'new') on conflict do nothing",
                f"update shop.pair set a = chr(97 + {one} % 26), x = x || 'm' where b {some}",
                f"update shop.big set id = id + {_ROWS} where id = {one}",
                # two rows, which are mostly of two ranges, swap a unique value
                f"""with was as (select id, u from shop.big where id in ({one}, {other})),
                         gone as (delete from shop.big where id in (select id from was) and id = {other} returning u)
                    update shop.big set x = 's' where id = {one}""",
                f"""do $$ declare a int; b int; begin
                    select u into a from shop.big where id = {one}; select u into b from shop.big where id = {other};
                    if a is not null and b is not null then
                      update shop.big set u = -1 where id = {one}; update shop.big set u = a where id = {other};
                      update shop.big set u = b where id = {one};
                    end if; end $$""",
            )
        )

    def _alter(self) -> None:
        if self.random.random() < 0.5:
            self.tap.write("truncate shop.ddl", "insert into shop.ddl select i, 't' from generate_series(1, 3000) i")
        else:
            self.columns += 1
            with self.target.connect("su") as su:
                su.execute(f"alter table shop.ddl add c{self.columns} int".encode())
            self.tap.write(f"alter table shop.ddl add c{self.columns} int default {self.columns}")
        self.altered += 1


class Stored:
    """The progress as the target has it, which never goes down but for a table that was altered, or has no key."""

    def __init__(self, su: psycopg.Connection[Any]) -> None:
        self.su = su
        self.seen: dict[str, dict[int, tuple[int, tuple[int, bool], str | None, bool]]] = {}

    def rows(self) -> int:
        """Look, compare with the last look, and return the rows so far of tables that are not altered."""
        if self.su.execute("select to_regclass('gdq_target.chunked_copy')").fetchone() == (None,):
            return 0
        now: dict[str, dict[int, tuple[int, tuple[int, bool], str | None, bool]]] = {}
        for table, number, count, xmax, end, whole, arrived in self.su.execute(_STORED.encode()).fetchall():
            now.setdefault(table, {})[number] = (count, (xmax or 0, arrived), end, whole)
        for table, before in self.seen.items():
            if table not in ("shop.ddl", "shop.bag"):
                self._compare(table, before, now[table])
        self.seen = now
        return sum(row[0] for table, ranges in now.items() if table != "shop.ddl" for row in ranges.values())

    @staticmethod
    def _compare(table: str, before: dict[int, Any], now: dict[int, Any]) -> None:
        change = f"{table} went from {before} to {now}"
        assert sum(row[0] for row in now.values()) >= sum(row[0] for row in before.values()), change
        if len(now) == 1 < len(before):  # all were whole, and are one now
            assert now[1][3], change
        elif before != {1: (0, (0, False), None, False)}:  # else it may have been divided
            assert now.keys() == before.keys(), change
            for number, (count, at, end, whole) in before.items():
                assert now[number][0] >= count, change
                assert now[number][1] >= at or now[number][1][1], change  # it may arrive at an earlier tick
                assert now[number][2] == end, change
                assert now[number][3] >= whole, change


@pytest.mark.parametrize("goes_back", [False, True])
def test_killed_at_random(tap: Tap, empty_db: Database, goes_back: bool) -> None:
    tap.owner.execute("select gdq.set_queue('q', rotation_period => '1 ms', rotation_bytes => 1)")
    with tap.db.connect("su") as su, empty_db.connect("su") as there:
        su.execute("alter default privileges for role app grant select on tables to gdq_owner")
        there.execute("create schema shop")
        for name, table in _TABLES.items():
            tap.write(table)
            there.execute(table.encode())
            tap.add(name)
    tap.write(
        f"insert into shop.big select i, i, 'x' from generate_series(1, {_ROWS}) i",
        f"insert into shop.pair select chr(97 + i % 7), i, 'x' from generate_series(1, {_ROWS // 4}) i",
        f"insert into shop.bag select i % 1000, 'x' from generate_series(1, {_ROWS // 10}) i",
        "insert into shop.ddl select i, 'x' from generate_series(1, 2000) i",
    )
    tap.owner.execute("select gdq.unregister_consumer('q', %s)", [tap.consumer])
    app, tick = Application(tap, empty_db, 5), 0
    if goes_back:
        tap.owner.execute("select gdq.register_consumer('q', 'mirror')")
        app.alters = False
        [tick] = tap.owner.execute("select gdq.force_tick('q')").fetchone() or [0]
    with empty_db.connect("su") as there:
        kills = Counter(_run(tap, empty_db, Stored(there), app, tick))
    assert kills["killed"] == _KILLS
    assert goes_back or app.altered
    check_arrival(tap.db, empty_db, "mirror", _COLUMNS)


def _run(tap: Tap, target: Database, stored: Stored, app: Application, tick: int) -> Iterator[str]:
    """Start the copy until it has ended, and kill it each time at a random moment, _KILLS times."""
    chance, killed = random.Random(9), 0
    with app.running():
        while True:
            goal = stored.rows() + chance.randint(0, 1_500)
            command = [sys.executable, "-c", _PROGRAM, "q", target.su_dsn, str(tick), *_TABLES]
            running = subprocess.Popen(command, env=environment(tap.db.dsn), stderr=subprocess.PIPE, text=True)
            if killed == _KILLS:
                app.alters = False
            elif chance.random() < 0.2:
                time.sleep(chance.uniform(0, 1))  # before it has come to anything, or amid it
            else:
                until(partial(_came_on, stored, goal, running), "chunks")
            if killed < _KILLS:
                running.kill()
            _, told = running.communicate()
            stored.rows()
            if running.returncode == 0:
                break
            if running.returncode < 0:
                killed += 1
                yield "killed"
            else:  # the server has not yet noticed the end of the one before
                assert "another session is at work" in told, told
                yield "too early"


def _came_on(stored: Stored, goal: int, running: subprocess.Popen[str]) -> bool:
    return stored.rows() >= goal or running.poll() is not None
