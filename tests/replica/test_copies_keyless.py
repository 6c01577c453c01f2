"""Copies in parts of a replica's tables without a key, whose rows may be there several times."""

from __future__ import annotations

import pytest

from tests.replica.conftest import Pair, count
from tests.replica.copies_in_parts import brought, written
from tests.support.programs import start_gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server

ROWS = 20_000
# parts of some blocks
PARTS = ("--chunk-rows", "10")
HEAP = "create table heap (a int, n numeric, note text)"
FILL = f"insert into heap select i % 5000, 1.0, 'note ' || i % 7 from generate_series(1, {ROWS}) i"


@pytest.fixture
def heap(pair: Pair) -> Pair:
    """A pair with a large table in which each row is there at least twice, and that has other rows nearby."""
    pair.make(HEAP)
    pair.run(FILL, "insert into heap select * from heap", "analyze heap")
    pair.capture("heap")
    return pair


def changes(number: int) -> list[str]:
    """Rows of all parts of the table come, go, and become others, or those that are there already, meanwhile."""
    a = number * 7919 % 5000
    return [
        f"update heap set n = n + 1 where a between {a} and {a + 9}",
        f"update heap set note = note where a = {a + 20}",
        f"update heap set n = 1.00 where ctid = (select min(ctid) from heap where a = {a + 30})",
        f"update heap set a = a + 1 where a = {a + 40}",
        f"delete from heap where ctid = any (array(select ctid from heap where a = {a + 50} limit 3))",
        f"insert into heap values ({a}, 1.0, 'note 1'), ({a}, 1.0, 'note 1'), (null, null, null)",
    ]


def begin(pair: Pair, *options: str, parts: tuple[str, ...] = PARTS) -> int:
    """Begin the copy, or go on with it, and kill the program after some parts; the rows that have come so far."""
    goal = brought(pair) + ROWS // 5
    command = ("replicate", "shop", "mirror", "--to", pair.target.su_dsn, *parts, *options)
    copying = start_gdq(*command, dsn=pair.source.dsn)
    until(lambda: copying.poll() is not None or brought(pair) > goal, "a part of the copy")
    copying.kill()
    _, told = copying.communicate()
    assert "Error" not in told
    assert "started again" not in told
    return brought(pair)


def test_a_copy_goes_on_after_a_kill(heap: Pair) -> None:
    assert begin(heap) > ROWS // 5
    heap.run("update heap set n = n + 1 where a % 3 = 0", "delete from heap where a % 5 = 0")
    assert "started again" not in heap.apply(*PARTS).stderr
    heap.same("heap")
    with heap.target.connect("su") as there:
        assert count(there, "select count(*) from gdq_target.chunked_copy") == 0
    heap.run("update heap set n = n + 1 where a < 100", "delete from heap where a = 4")
    assert "copied" not in heap.apply(*PARTS).stderr
    heap.same("heap")


@pytest.mark.long
def test_kills_under_writers(heap: Pair) -> None:
    with written(heap, changes):
        for _ in range(8):
            begin(heap)
    assert "started again" not in heap.apply(*PARTS).stderr
    heap.same("heap")
    with written(heap, changes):
        heap.apply(*PARTS)
    heap.apply(*PARTS)
    heap.same("heap")


@pytest.mark.long
def test_a_table_that_is_copied_again_and_one_that_comes_later(heap: Pair) -> None:
    heap.apply(*PARTS)
    heap.there("delete from heap where a < 2500", "insert into heap select * from heap limit 10")
    heap.run(
        "create table later (a int, v text)", "insert into later select i % 900, 'x' from generate_series(1, 5000) i"
    )
    heap.run("analyze later")
    heap.capture("later")
    with written(heap, changes):
        begin(heap, "--copy-again", "public.heap", "--create")
        heap.run("update later set v = 'y' where a < 300", "delete from later where a > 800")
        told = heap.apply(*PARTS, "--create").stderr
    assert "copied public.later: " in told
    heap.apply(*PARTS)
    heap.same("heap", "later")


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("alter table heap add column more int default 5", "started again: its columns have changed"),
        ("truncate heap", "copied public.heap: "),
        ("alter table heap rename to pile", "copied public.pile: "),
        ("vacuum full heap", "copied public.heap: "),
    ],
)
def test_ddl_meanwhile(heap: Pair, change: str, told: str) -> None:
    begin(heap)
    heap.run(change)
    table = "pile" if "pile" in change else "heap"
    heap.run(f"insert into {table} (a) values (-1), (-1)", f"update {table} set n = 7 where a < 100")
    assert told in heap.apply(*PARTS).stderr
    heap.run(f"delete from {table} where a % 3 = 0")
    heap.apply()
    heap.same(table)


@pytest.mark.long
def test_partitions_on_one_side(pair: Pair) -> None:
    pair.there(HEAP)
    pair.run(
        f"{HEAP} partition by list (a)",
        "create table heap_1 partition of heap for values in (1, 2, 3) partition by hash (note)",
        "create table heap_1a partition of heap_1 for values with (modulus 2, remainder 0)",
        "create table heap_1b partition of heap_1 for values with (modulus 2, remainder 1)",
        "create table heap_2 partition of heap default",
        FILL,
        "analyze heap",
    )
    pair.capture("heap")
    with written(pair, changes):
        begin(pair)
        begin(pair)
    pair.run("update heap set a = 1 + a % 3 where a % 7 = 0", "update heap set a = 4444 where a = 2")
    assert "started again" not in pair.apply(*PARTS).stderr
    pair.same("heap")


@pytest.mark.long
def test_a_unique_key_of_the_target(pair: Pair) -> None:
    """Rows that get the value of others meanwhile, or come to another place with it, meet no row of before."""
    pair.make(HEAP)
    pair.run(f"insert into heap select i, 1, 'x' from generate_series(1, {ROWS}) i", "analyze heap")
    pair.there("alter table heap add unique (a)")
    pair.capture("heap")
    for _ in range(3):
        begin(pair)
        pair.run(
            "update heap set n = n + 1 where a % 9 = 0",
            f"update heap set a = -a where a between {ROWS // 2} and {ROWS // 2 + 500}",
            f"delete from heap where a > {ROWS - 50}",
            f"update heap set a = {ROWS} where a = (select max(a) from heap)",
        )
    assert "started again" not in pair.apply(*PARTS).stderr
    pair.same("heap")
