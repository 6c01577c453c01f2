"""A switchover of a table without a key, whose rows may be there several times, there and back."""

from __future__ import annotations

import pytest

from tests.support.server import Database
from tests.switchover.conftest import Pair

pytestmark = [pytest.mark.server, pytest.mark.long]

HEAP = "create table heap (a int, n numeric, j json)"


def open_heap(pair: Pair) -> None:
    for place in (pair.old, pair.new):
        pair.run(place, HEAP)
    pair.run(
        pair.old,
        "select gdq.create_queue('shop')",
        "select gdq.add_table('shop', 'heap')",
        "insert into heap select i % 9, 1.0, '{}' from generate_series(1, 100) i",
        "insert into heap values (null, 1.00, null), (null, 1.00, null)",
    )
    pair.done("replicate")
    pair.done("switchover", "--prepare")


def write(pair: Pair, place: Database) -> None:
    """Some of equal rows come, go and become others."""
    pair.run(
        place,
        "delete from heap where ctid = any (array(select ctid from heap where a = 3 limit 2))",
        "update heap set n = n + 1 where ctid = (select min(ctid) from heap where a is null)",
        "update heap set n = 1.00, j = '{ }' where ctid = any (array(select ctid from heap where a = 5 limit 3))",
        "insert into heap select * from heap where a = 4 or a is null limit 9",
    )


def equal(pair: Pair) -> None:
    old, new = (pair.rows(place, "select t::text from heap t order by 1") for place in (pair.old, pair.new))
    assert old == new


def test_there_and_back(pair: Pair) -> None:
    open_heap(pair)
    assert pair.obstacles() == []
    write(pair, pair.old)
    pair.done("switchover", "--compare")
    equal(pair)
    write(pair, pair.new)
    assert "copied" not in pair.done("replicate", back=True).stderr
    equal(pair)
    write(pair, pair.new)
    pair.done("switchover", "--back", "--compare")
    equal(pair)
    write(pair, pair.old)
    assert "copied" not in pair.done("replicate").stderr
    equal(pair)
    assert pair.obstacles() == []


def test_a_key_that_only_the_target_has(pair: Pair) -> None:
    """The way back would look for rows by it, and the old database has no such key."""
    open_heap(pair)
    pair.run_su(pair.new, "alter table heap add id int generated always as identity primary key")
    pair.done("switchover", "--prepare")
    assert ("key_differs", "public.heap") in pair.codes()
