"""Copies in chunks: exact, with the changes after their tick, whatever is written, altered or killed meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import psycopg
import pytest
from psycopg import Connection, sql
from psycopg.types.json import Jsonb

from gdq import Consumer
from gdq.consumers.copy.chunk import ChunkedCopier, ChunkedCopy
from gdq.consumers.copy.chunk_work import TableProgress
from gdq.errors import DivergedPosition, GdqError
from tests.support.events import Tap
from tests.support.server import Database

pytestmark = pytest.mark.server

TABLES = {
    "shop.t": "create table shop.t (a int, b text, v int, w numeric, twice int generated always as (v * 2) stored, "
    "primary key (b, a))",
    "shop.u": "create table shop.u (id bigint generated always as identity primary key, d timestamptz, x text)",
}
KEYS = {"shop.t": ("b", "a"), "shop.u": ("id",)}
_EXECUTE = Connection.execute


@dataclass(slots=True)
class Places:
    """A source with captured tables, a target with the same ones, and what is written in between."""

    tap: Tap
    target: Database
    random: random.Random
    second: Connection[Any]
    in_second: bool = False
    moved: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def copy(self, **options: Any) -> ChunkedCopy:
        """Run the copy `one` of both tables to its end."""
        options = {"copy": "one", "consumer": "mirror", "chunk_rows": 7, **self.options, **options}
        tables = options.pop("tables", [*TABLES])
        with ChunkedCopier(self.tap.db.dsn, "q", tables, options.pop("to", self.target.su_dsn), **options) as copier:
            return copier.run()

    def write(self) -> None:
        """A transaction of the application, and now and then a part of one that stays open."""
        with self.tap.app.transaction(force_rollback=self.random.random() < 0.1):
            for _ in range(self.random.randint(1, 4)):
                self._change(self.tap.app)
        if self.random.random() < 0.2:
            self._long()

    def _change(self, app: Connection[Any]) -> None:
        a, b, v = self.random.randint(1, 60), self.random.choice("aAbBäz"), self.random.randint(1, 9)
        match self.random.randint(1, 6):
            case 1 | 2:
                app.execute("insert into shop.t (a, b, v, w) values (%s, %s, %s, 1.50) on conflict do nothing",
                            [a, b, v])  # fmt: skip
            case 3:
                app.execute("update shop.t set v = %s where a = %s", [v, a])
            case 4 if not self.in_second:
                self.moved += 1
                app.execute(
                    "update shop.t set b = %s, a = %s where (b, a) = (select b, a from shop.t where a < 100000 "
                    "order by a %% %s, a, b limit 1)",
                    [b, 1000 + self.moved, a],
                )
            case 5:
                app.execute("delete from shop.t where a < 100000 and a %% 37 = %s", [a % 37])
            case 6:
                app.execute("insert into shop.u (d, x) values (now(), repeat('x', %s))", [v])
                app.execute("update shop.u set x = null where id = %s", [a])
                app.execute("delete from shop.u where id = %s", [a - v])

    def _long(self) -> None:
        """A step of a transaction that is open across steps of the copy, with rows of its own."""
        if self.in_second:
            self.second.execute("update shop.t set b = 'm', v = v + 1 where a = %s", [100000 + self.moved])
            self.second.execute("commit")
        else:
            self.second.execute("begin")
            self.second.execute("delete from shop.t where a >= 100000 and v > 1")
            self.moved += 1
            self.second.execute("insert into shop.t values (%s, 'y', 1, 1)", [100000 + self.moved])
        self.in_second = not self.in_second

    def follow(self) -> None:
        """Apply the consumer's events to the target; each must find exactly the row that it changes."""
        if self.in_second:
            self._long()
        with Consumer(self.tap.db.dsn, "q", "mirror") as consumer, self.target.connect("su") as su:
            for batch in consumer.batches(once=True):
                for event in batch.events():
                    assert event.table is not None
                    key = sql.SQL(" and ").join(
                        sql.SQL("t.{0} = (%(old)s::jsonb->>{1})::{2}").format(
                            sql.Identifier(name), name, sql.SQL({"a": "int", "b": "text", "id": "bigint"}[name])
                        )
                        for name in KEYS[event.table]
                    )
                    table = sql.SQL(event.table)
                    shown = event.in_json()
                    old, new = Jsonb(shown.old), Jsonb(shown.new)
                    if event.op in ("update", "delete"):
                        statement = sql.SQL("delete from {} as t where {}").format(table, key)
                        assert su.execute(statement, {"old": old}).rowcount == 1, event
                    if event.op in ("insert", "update"):
                        listed = [name for name in event.new or {} if name != "twice"]
                        names = sql.SQL(", ").join(map(sql.Identifier, listed))
                        su.execute(
                            sql.SQL(
                                "insert into {0} ({1}) overriding system value "
                                "select {1} from jsonb_populate_record(null::{0}, %s)"
                            ).format(table, names),
                            [new],
                        )

    def check(self) -> None:
        """Source and target have the same rows, and no changes are left."""
        self.follow()
        for table in TABLES:
            assert self.rows(self.target.connect("su"), table) == self.rows(self.tap.db.connect("su"), table)

    def rows(self, connection: Connection[Any], table: str) -> list[str]:
        with connection:
            return sorted(row for (row,) in connection.execute(f"select t::text from {table} t".encode()))


@pytest.fixture
def places(tap: Tap, empty_db: Database) -> Iterator[Places]:
    with tap.db.connect("su") as su:
        su.execute("alter default privileges for role app grant select on tables to gdq_owner")
    with empty_db.connect("su") as su:
        su.execute("create schema shop")
        for table in TABLES.values():
            su.execute(table.encode())
    for name, table in TABLES.items():
        tap.write(table)
        tap.add(name)
    tap.write(
        "insert into shop.t select i, chr(97 + i % 7), i, i / 3.0 from generate_series(1, 50) i",
        "insert into shop.u (d, x) select now(), i from generate_series(1, 20) i",
    )
    with tap.db.connect("app") as second:
        yield Places(tap, empty_db, random.Random(1), second)


class Fate:
    """What happens at the statements of a copy: writes at each, and the end of one of its sessions at some.

    It stands in place of Connection.execute(), and passes by the test's own sessions.
    """

    def __init__(self, places: Places, kill_at: int | None = None) -> None:
        self.places, self.kill_at, self.seen = places, kill_at, 0
        self.busy = threading.Lock()

    def __enter__(self) -> Self:
        self.patch = pytest.MonkeyPatch()
        fate = self

        def execute(connection: Connection[Any], *values: Any, **named: Any) -> Any:
            if fate.busy.acquire(blocking=False):  # not while a worker's statement has its fate, nor within it
                try:
                    fate.strike(connection)
                finally:
                    fate.busy.release()
            return _EXECUTE(connection, *values, **named)

        self.patch.setattr(Connection, "execute", execute)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def strike(self, connection: Connection[Any]) -> None:
        if connection.info.get_parameters().get("fallback_application_name") != "gdq:q/copy":
            return
        self.seen += 1
        if self.places.random.random() < 0.3:
            self.places.write()
        if self.seen == self.kill_at:
            with self.places.tap.db.connect("su") as su:
                victims = su.execute(
                    "select pid from pg_stat_activity where application_name = 'gdq:q/copy' order by pid"
                ).fetchall()
                [victim] = self.places.random.choice(victims)
                su.execute("select pg_terminate_backend(%s, 10000)", [victim])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_killed_at_any_statement_under_writers(places: Places, seed: int) -> None:
    places.random.seed(seed)
    with places.tap.db.connect("su") as su:
        kills = 0
        while True:
            try:
                with Fate(places, places.random.randint(20, 150)) as fate:
                    done = places.copy()
                break
            except psycopg.OperationalError:
                kills += 1
        keepers = "select count(*) from gdq.consumer_info('q') where consumer_name like 'copy%'"
        assert su.execute(keepers).fetchone() == (0,)
    assert fate.seen > 0
    assert kills
    assert [table.table_name for table in done.tables] == [*TABLES]
    places.check()


def steps(places: Places, at: int, action: str, **options: Any) -> list[str]:
    """Run the copy, and the action in its source once shop.t has that many rows; returns what it said of each step."""
    said: list[str] = []
    acted: list[bool] = []

    def tell(done: TableProgress, what: str) -> None:
        said.append(f"{done.table} {what}")
        if done.table == "shop.t" and done.rows >= at and not acted:
            acted.append(True)
            places.tap.write(action)

    places.copy(tell=tell, **options)
    return said


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("truncate shop.t", "truncate"),
        ("alter table shop.t alter v type bigint", "its columns have changed"),
        ("alter table shop.t drop column w", "its columns have changed"),
    ],
)
def test_ddl_starts_again_what_it_touches(places: Places, action: str, reason: str) -> None:
    if "type" in action:  # what depends on the column goes first
        places.tap.write("alter table shop.t drop column twice")
        with places.target.connect("su") as su:
            su.execute("alter table shop.t drop column twice")
    said = steps(places, 14, action, tables=["shop.u", "shop.t"])
    assert f"shop.t started again: {reason}" in said
    assert not [line for line in said if line.startswith("shop.u started")]
    if "drop" in action:  # the target may keep what the source has dropped
        with places.target.connect("su") as su:
            assert su.execute("select count(w) from shop.t").fetchone() == (0,)
            su.execute("alter table shop.t drop column w")
    places.check()


def test_column_that_the_target_lacks(places: Places) -> None:
    with pytest.raises(GdqError, match=r"target table shop\.t lacks column more of table shop\.t"):
        steps(places, 14, "alter table shop.t add more int default 7")
    with places.target.connect("su") as su:
        su.execute("alter table shop.t add more int")
    places.copy()
    places.check()


def test_lost_chunk_is_found(places: Places) -> None:
    """A restore of the source to an earlier time would leave rows in the target that it never had."""
    with pytest.raises(ZeroDivisionError):
        places.copy(tell=lambda done, _: 1 // (done.rows == 0))
    with places.tap.db.connect("su") as su:
        su.execute("delete from gdq.tick where refresh")
    with pytest.raises(DivergedPosition):
        places.copy()
    places.write()
    places.copy(anew=True)
    places.check()


def test_consumer_takes_a_table_later(places: Places) -> None:
    places.tap.owner.execute("select gdq.register_consumer('q', 'mirror', tables => '{shop.u}')")
    places.copy(copy="first", tables=["shop.u"])
    places.write()
    places.follow()
    places.copy(copy="later", tables=["shop.t"])
    places.write()
    places.check()
    [tables] = places.tap.owner.execute(
        "select tables from gdq.consumer_info('q') where consumer_name = 'mirror'"
    ).fetchone() or [None]
    assert sorted(tables) == ["shop.t", "shop.u"]


def test_log_that_no_ticker_looks_after(places: Places) -> None:
    """A step reads the changes since the last one, not all that a bulk load has left in the log."""
    places.tap.write("insert into shop.u (d, x) select now(), repeat('x', 200) from generate_series(1, 12000)")
    behind = """select sum(gdq.unsummarised_pages(s.segment))
                  from gdq.log_segment s where pg_relation_size(s.segment) > 1048576"""
    assert places.tap.owner.execute(behind).fetchone() != (0,)
    places.copy(tables=["shop.u"], chunk_rows=5000)
    assert places.tap.owner.execute(behind).fetchone() == (0,)


def test_finished_copy_is_left_alone(places: Places) -> None:
    first = places.copy()
    places.write()
    assert places.copy() == replace(first, done_before=True)
    places.tap.write("create table shop.more (id int primary key)")
    places.tap.add("shop.more")
    with places.target.connect("su") as su:
        su.execute("create table shop.more (id int primary key)")
    with pytest.raises(GdqError, match=r'copy "one" has finished, with table shop\.t, shop\.u'):
        places.copy(tables=[*TABLES, "shop.more"])
    places.check()


def test_rights_of_a_plain_role_are_enough(places: Places) -> None:
    with places.target.connect("su") as su:
        su.execute(f"grant create on database {places.target.name} to app".encode())
        su.execute("grant usage on schema shop to app; grant all on all tables in schema shop to app")
    places.copy(to=places.target.app_dsn)
    places.check()


@pytest.mark.parametrize(
    ("setup", "options", "message"),
    [
        ("create table shop.x (id int)", {}, 'queue "q" does not capture table shop.x'),
        ("create table shop.x (id int); select 1", {"add": True}, "the target has no table shop.x"),
        ("create table shop.x (id int primary key)", {"add": True}, "the target has no table shop.x"),
        (
            "create table shop.x (id int primary key)",
            {"add": True, "into": {"shop.x": "shop.bare"}},
            "target table shop.bare has no primary key or unique index on id",
        ),
        (
            "create table shop.x (id int primary key)",
            {"add": True, "into": {"shop.x": "shop.filled"}},
            "target table shop.filled has rows already",
        ),
        ("create table shop.x (id int primary key)", {"add": True, "self": True}, "would be copied into itself"),
    ],
)
def test_refusals(places: Places, setup: str, options: dict[str, Any], message: str) -> None:
    places.tap.write(setup.partition(";")[0])
    if options.pop("add", False):
        places.tap.add("shop.x")
    if options.pop("self", False):
        options["to"] = places.tap.db.su_dsn
    with places.target.connect("su") as su:
        su.execute("create table shop.bare (id int); create table shop.filled (id int primary key)")
        su.execute("insert into shop.filled values (1)")
    with pytest.raises(GdqError, match=message):
        places.copy(tables=["shop.x"], **options)


def test_two_sessions_do_not_meet(places: Places) -> None:
    def again(*_: object) -> None:
        with pytest.raises(GdqError, match='another session is at work on copy "one"'):
            places.copy()

    places.copy(tell=again)
    places.check()
