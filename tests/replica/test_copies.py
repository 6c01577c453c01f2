"""Copies of a replica's tables: several at once, and large ones in parts that survive whatever is killed."""

from __future__ import annotations

import json
import random
import re

import pytest

from tests.replica.conftest import Pair, count
from tests.replica.copies_in_parts import brought, written
from tests.support.programs import gdq, start_gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server


def test_tables_are_copied_side_by_side(pair: Pair) -> None:
    """A table that somebody has locked in the target keeps no other one from being copied."""
    for table in ("one", "two"):
        pair.make(
            f"create table {table} (id int primary key, v text); alter table {table} alter v set storage external"
        )
        pair.run(f"insert into {table} select i, repeat('x', 100000) from generate_series(1, 170) i")
    pair.capture("one", "two")
    with pair.target.connect("su") as holder, pair.target.connect("su") as there:
        with holder.transaction():
            holder.execute("lock table one")
            replica = start_gdq("replicate", "shop", "mirror", "--to", pair.target.su_dsn, dsn=pair.source.dsn)
            until(lambda: count(there, "select count(*) from two"), "the copy of the table that is free")
            assert count(holder, "select count(*) from one") == 0
        _, told = replica.communicate()
    assert replica.returncode == 0, told
    assert sorted(told.splitlines()) == ["copied public.one: 170 rows", "copied public.two: 170 rows"]
    pair.same("one", "two")


@pytest.mark.parametrize("drop", ["drop table two", "alter table two rename to three"])
def test_a_table_that_goes_before_its_copy_begins(pair: Pair, drop: str) -> None:
    """Somebody has locked the table before it in the target; it is of another group, which shares no snapshot."""
    pair.make("create table one (id int primary key, v text); alter table one alter v set storage external")
    pair.run(
        "insert into one select i, repeat('x', 100000) from generate_series(1, 170) i",
        "create table two (id int primary key)",
        "insert into two values (1)",
    )
    pair.capture("one", "two")
    command = ("replicate", "shop", "mirror", "--create", "--workers", "1", "--to", pair.target.su_dsn)
    with pair.target.connect("su") as holder, pair.target.connect("su") as there:
        with holder.transaction():
            holder.execute("lock table one")
            replica = start_gdq(*command, dsn=pair.source.dsn)
            waits = "select count(*) from pg_locks where relation = 'one'::regclass and not granted"
            until(lambda: count(there, waits), "the copy of the table before")
            pair.run(drop)
        _, told = replica.communicate()
    assert replica.returncode == 0, told
    assert "copied public.one: 170 rows" in told
    pair.same("one")
    if "three" in drop:
        pair.same("three")
    with pair.target.connect("su") as there:
        assert count(there, "select to_regclass('two') is null")


LARGE = ("replicate", "shop", "mirror", "--chunk-rows", "1000")
ROWS = 20_000
_SESSIONS = """
select pg_terminate_backend(pid) from pg_stat_activity
 where datname = current_database() and application_name like 'gdq:shop/mirror%'"""


@pytest.fixture
def large(pair: Pair) -> Pair:
    """A pair with a table that is copied in chunks, whose rows have two unique keys."""
    pair.make("create table big (id int primary key, n int, place int unique, note text)")
    pair.run(f"insert into big select i, 0, i, 'note ' || i from generate_series(1, {ROWS}) i", "analyze big")
    pair.capture("big")
    return pair


def changes(number: int) -> list[str]:
    """Rows of all parts of the table are changed meanwhile; some swap the values of the other unique key."""
    n, near = number * 7919 % ROWS, number * 31 % ROWS
    return [
        f"update big set n = n + 1 where id between {n} and {n + 5}",
        f"delete from big where id = {near}",
        f"insert into big values ({ROWS + number}, 1, -{number}, 'new')",
        f"update big set id = -{number} where id = {near + 1}",
        f"update big set place = null where id = {n}",
    ]


def reached(pair: Pair) -> int:
    """As brought(), or all rows once the copy is whole."""
    rows = brought(pair)
    with pair.target.connect("su") as there:
        if not rows and count(there, "select to_regclass('gdq_target.replica_table') is not null"):
            return ROWS * there.execute("select from gdq_target.replica_table where columns->'mark' is null").rowcount
    return rows


@pytest.mark.long
def test_a_large_copy_goes_on_after_kills(large: Pair) -> None:
    so_far, goal = 0, ROWS // 5
    with written(large, changes):
        while so_far < ROWS:
            copying = start_gdq(*LARGE, "--to", large.target.su_dsn, dsn=large.source.dsn)
            until(lambda: copying.poll() is not None or reached(large) > goal, "a part of the copy")  # noqa: B023
            copying.kill()
            _, told = copying.communicate()
            assert "Error" not in told
            assert "started again" not in told
            now = reached(large)
            assert now >= so_far
            so_far, goal = now, now + ROWS // 5
    told = large.apply("--chunk-rows", "1000").stderr
    assert "started again" not in told
    large.same("big")
    with large.target.connect("su") as there:
        assert count(there, "select count(*) from gdq_target.chunked_copy") == 0


def begin(pair: Pair, *options: str) -> None:
    """Begin the copy, and kill the program in the middle."""
    copying = start_gdq(*LARGE, "--to", pair.target.su_dsn, *options, dsn=pair.source.dsn)
    until(lambda: copying.poll() is not None or brought(pair) > ROWS // 5, "a part of the copy")
    copying.kill()
    assert "Error" not in copying.communicate()[1]
    assert brought(pair) > ROWS // 5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("alter table big add column more int default 5, drop column note", "started again: its columns have changed"),
        pytest.param("truncate big", "copied public.big: 0 rows", marks=pytest.mark.long),
        pytest.param("alter table big rename to huge", "copied public.huge: 20000 rows", marks=pytest.mark.long),
    ],
)
def test_ddl_during_a_large_copy(large: Pair, change: str, told: str) -> None:
    begin(large)
    large.run(change)
    assert told in large.apply("--chunk-rows", "1000").stderr
    table = "huge" if "huge" in change else "big"
    large.run(f"delete from {table} where id % 3 = 0", f"insert into {table} (id, n) values (-1, 1)")
    large.apply()
    large.same(table)
    with large.target.connect("su") as there:
        assert count(there, "select count(*) from gdq_target.chunked_copy") == 0


@pytest.mark.long
def test_a_table_that_is_dropped_amid_its_copy(large: Pair) -> None:
    begin(large)
    large.run("drop table big", "create table big (id int primary key, n int)", "insert into big values (1, 1)")
    assert "public.big was dropped in the source: its copy stays in the target" in large.apply().stderr
    large.capture("big")
    large.apply("--chunk-rows", "1000")
    with large.target.connect("su") as there:
        assert there.execute("select id, n from big").fetchall() == [(1, 1)]


@pytest.mark.long
def test_a_signal_ends_a_large_copy_that_goes_on_later(large: Pair) -> None:
    with large.target.connect("su") as there:
        there.execute("drop table big")
    copying = start_gdq(*LARGE, "--to", large.target.su_dsn, "--create", dsn=large.source.dsn)
    until(lambda: copying.poll() is not None or reached(large) > 0, "a part of the copy")
    copying.terminate()
    assert "Error" not in copying.communicate()[1]
    assert copying.returncode == 0
    listed = gdq("replicas", "--to", large.target.su_dsn, "--json", dsn=large.source.dsn)
    assert json.loads(listed.stdout)[0]["tables"] == []
    told = large.apply("--chunk-rows", "1000", "--create").stderr
    assert re.fullmatch("copied public.big: 20000 rows\n", told)
    large.same("big")


@pytest.mark.long
def test_a_large_table_is_copied_again(large: Pair) -> None:
    large.apply("--chunk-rows", "1000")
    large.there("update big set n = 7")
    begin(large, "--copy-again", "public.big")
    large.run("update big set n = 3 where id < 100")
    large.apply("--chunk-rows", "1000")
    large.same("big")


@pytest.mark.long
def test_columns_that_one_side_computes(pair: Pair) -> None:
    """A column that the source computes and the target stores is copied as well."""
    for place, kind in ((pair.source, "int generated always as (id * 2) stored"), (pair.target, "int")):
        with place.connect() as connection:
            connection.execute(f"create table sum (id int primary key, twice {kind})".encode())
            connection.execute(b"create table big (id int primary key, n int, m int generated always as (id) stored)")
    pair.run("insert into sum select i from generate_series(1, 5000) i", "analyze sum")
    pair.run("insert into big select i, i from generate_series(1, 5000) i", "analyze big")
    pair.capture("sum", "big")
    pair.apply("--chunk-rows", "1000")
    pair.same("sum", "big")


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_a_large_copy_whose_sessions_are_ended(large: Pair, seed: int) -> None:
    """Sessions on either side, again and again: no part of the copy is lost."""
    chance = random.Random(seed)
    with written(large, changes):
        copying = start_gdq(*LARGE, "--to", large.target.su_dsn, "--follow", dsn=large.source.dsn)
        try:
            so_far = 0
            while so_far < ROWS:
                until(lambda: copying.poll() is not None or reached(large) > so_far, "a part of the copy")  # noqa: B023
                with chance.choice([large.source, large.target]).connect("su") as su:
                    su.execute(_SESSIONS)
                now = reached(large)
                assert now >= so_far
                so_far = now
        finally:
            copying.kill()
            told = copying.communicate()[1]
    assert "started again" not in told
    assert [line for line in told.splitlines() if line.startswith("Error") and "connection" not in line] == []
    large.apply()
    large.same("big")
