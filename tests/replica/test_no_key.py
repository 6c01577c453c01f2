"""Tables without a key: a replica keeps them equal as multisets, each row as often as the source has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.replica.conftest import Pair
from tests.replica.test_conflicts import conflicts
from tests.replica.test_dead_letters import ASIDE, letters, there
from tests.replica.test_repair_tables import places, repair, repaired

pytestmark = pytest.mark.server

BAG = "create table bag (a int, n numeric, v text, j json)"

# Deletes one of the rows that are equal to the one that a condition finds.
ONE = "delete from bag where ctid = (select min(ctid) from bag where {})"


@pytest.fixture
def bag(pair: Pair) -> Pair:
    """A table of which both sides have the row (1,1.0,x,{}) three times, and others."""
    filled(pair)
    return pair


def filled(pair: Pair) -> None:
    pair.make(BAG)
    pair.run(
        "alter table bag replica identity full",
        "insert into bag select 1, 1.0, 'x', '{}' from generate_series(1, 3)",
        "insert into bag values (1, 1.00, 'x', '{}'), (null, null, null, null), (null, null, '', '{ }')",
    )
    pair.capture("bag")
    pair.apply()
    pair.same("bag")


def shown(pair: Pair, query: str = "bag") -> list[str]:
    return [row for (row,) in pair.rows(pair.target, query)]


def test_equal_rows_are_counted(fed: Pair) -> None:
    """NULLs are equal to NULLs, and values only to the same text: 1.0 is not 1.00, {} not { }."""
    filled(fed)
    fed.run(
        ONE.format("n::text = '1.0'"),
        "insert into bag select null, null, null, null from generate_series(1, 3)",
        "update bag set n = 1.000 where n::text = '1.00'",
        "update bag set j = '{}' where v = ''",
        "insert into bag (a, v) select 2, string_agg(md5(i::text), '') from generate_series(1, 300) i",
        "update bag set a = 3 where a = 2",
    )
    fed.apply()
    fed.same("bag")
    fed.run("insert into bag values (5)", "update bag set a = 6 where a = 5", "delete from bag where a = 6")
    fed.run(ONE.format("a is null and v is null"), "truncate bag", "insert into bag values (7), (7)")
    fed.apply()
    assert shown(fed) == ["(7,,,)", "(7,,,)"]


def test_a_row_that_the_target_lacks(bag: Pair) -> None:
    bag.there(ONE.format("n::text = '1.0'"), ONE.format("n::text = '1.0'"), "delete from bag where a is null")
    bag.run("delete from bag where n::text = '1.0'", "insert into bag values (9)")
    failed = bag.replicate()
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[0] == (
        "Error: conflict in table public.bag of the target: delete_missing, "
        'key {"a": 1, "j": {}, "n": 1.0, "v": "x"} and 1 more'
    )
    bag.apply("--on-conflict", "delete_missing=skip")
    assert shown(bag) == ["(1,1.00,x,{})", "(9,,,)"]
    found = [(one["kind"], one["key"]["n"], one["local"], one["remote"]) for one in conflicts(bag)]
    assert found == [("delete_missing", 1.0, None, None)] * 2


def test_refused_rows_are_put_aside_one_by_one(bag: Pair) -> None:
    """A later deletion of an equal row settles one of them, and so does the row when it is tried again."""
    bag.there("alter table bag add constraint few check (a < 100)")
    bag.run("insert into bag values (100), (100), (200), (7)", "update bag set a = 300 where n::text = '1.00'")
    [batch] = json.loads(bag.apply(*ASIDE, "--json").stdout)
    assert (batch["inserted"], batch["deleted"], batch["dead_letters"]) == (1, 1, 4)
    assert shown(bag, "(select * from bag where a > 1)") == ["(7,,,)"]
    found = sorted((one["operation"], one["key"]["a"], one["local"]) for one in letters(bag))
    assert found == [("insert", a, None) for a in ("100", "100", "200", "300")]
    bag.run(ONE.format("a = 100"), "insert into bag values (200)")
    bag.apply(*ASIDE)
    assert sorted(one["remote"]["a"] for one in letters(bag)) == ["100", "200", "200", "300"]
    bag.there("alter table bag drop constraint few", "alter table bag add constraint few check (a <> 300)")
    replayed = there(bag, "replay-replica-dead-letters", "--all")
    assert (replayed.returncode, replayed.stderr.splitlines()[0]) == (1, "replayed 3 of mirror")
    [left] = letters(bag)
    assert left["remote"] == {"a": "300", "n": "1.00", "v": "x", "j": "{}"}
    bag.run("delete from bag where a = 300")
    bag.apply()
    assert letters(bag) == []
    bag.same("bag")


def test_a_key_that_comes_and_goes(pair: Pair) -> None:
    """The target gets a unique index over it, by which rows are found from then on; it keeps that when the key goes."""
    pair.make("create table item (id int, v text)")
    pair.capture("item")
    pair.run("insert into item values (1, 'a'), (1, 'a')")
    pair.apply()
    pair.run(
        "insert into item values (2, 'b')",
        "delete from item where ctid = (select min(ctid) from item where id = 1)",
        "alter table item add primary key (id)",
        "update item set v = 'c'",
    )
    pair.apply()
    pair.same("item")
    pair.there("alter table item add own text", "update item set own = 'kept'")
    pair.run("update item set v = 'd' where id = 1", "alter table item drop constraint item_pkey")
    pair.apply()
    assert pair.rows(pair.target, "item") == [("(1,d,kept)",), ("(2,c,kept)",)]
    pair.run("insert into item values (1, 'e')")
    failed = pair.replicate()
    assert "insert_exists" in failed.stderr.splitlines()[0]
    pair.there("drop index item_id_idx")
    pair.apply()
    assert pair.rows(pair.target, "(select id, v from item)") == [("(1,d)",), ("(1,e)",), ("(2,c)",)]


def scans(pair: Pair) -> Any:
    with pair.target.connect("su") as su:
        su.execute("select pg_stat_force_next_flush()")
        row = su.execute("select seq_scan from pg_stat_user_tables where relname = 'bag'").fetchone()
    assert row is not None
    return row[0]


def test_many_rows_are_found_by_one_join(bag: Pair) -> None:
    """Not by looking through the table for each of them."""
    bag.run("insert into bag select i, i, 't' || i from generate_series(1, 3000) i")
    bag.apply()
    before = scans(bag)
    bag.run("delete from bag where a % 2 = 0")
    bag.apply()
    bag.same("bag")
    assert scans(bag) - before <= 3


@pytest.mark.long
def test_they_are_repaired(pair: Pair) -> None:
    """Each row comes to be there as often as in the source as of the replica's tick; equal rows are not touched."""
    bag = "create table bag (id int, n numeric, v text)"
    pair.make(bag)
    pair.run(
        "insert into bag select 1, 1.0, 'x' from generate_series(1, 3)",
        "insert into bag values (2, 1.0, null), (2, 1.00, null), (3, null, 'a'), (4, 4, '')",
    )
    pair.capture("bag")
    pair.apply()
    pair.there(
        "delete from bag where ctid in (select ctid from bag where id = 1 limit 2)",
        "insert into bag values (2, 1.00, null), (2, 1.00, null), (9, null, null)",
        "update bag set v = 'b' where id = 3",
    )
    before = places(pair, "bag")
    pair.run("insert into bag values (1, 1.0, 'x')", "delete from bag where id = 3")  # under way
    assert repaired(pair, "mirror", "--dry-run", code=3) == [("public.bag", 3, 0, 4)]
    assert repaired(pair, "mirror", "--where", "id = 1") == [("public.bag", 2, 0, 0)]
    assert repaired(pair, "mirror") == [("public.bag", 1, 0, 4)]
    assert places(pair, "bag")[4] == before[4]
    assert repaired(pair, "mirror") == [("public.bag", 0, 0, 0)]
    pair.apply()
    pair.same("bag")
    failed = repair(pair, "mirror", "--columns", "id")
    assert (failed.returncode, failed.stderr.splitlines()[0]) == (
        1,
        "Error: table public.bag has no key, and its rows are compared in part",
    )
    pair.there("drop table bag", bag.replace("n numeric", "n float"))
    pair.there("insert into bag values (1, 1, 'x'), (5, null, null)")
    assert repaired(pair, "--tables", "bag") == [("public.bag", 6, 0, 1)]
    with pair.target.connect("su") as su:
        rows = su.execute("select id, n, v, count(*) from bag group by 1, 2, 3 order by 1").fetchall()
    assert rows == [(1, 1.0, "x", 4), (2, 1.0, None, 2), (4, 4.0, "", 1)]
