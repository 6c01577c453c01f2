"""Rows of the target that are not as the source's changes suppose: found, settled as asked for, noted and counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.replica.conftest import Pair
from tests.support.programs import gdq

pytestmark = pytest.mark.server

ITEM = "create table item (id int primary key, place int unique, note text, at int)"


@pytest.fixture
def items(pair: Pair) -> Pair:
    """A table of which both sides have rows 1 to 5."""
    pair.make(ITEM)
    pair.run("insert into item select i, i, 'n' || i, 1 from generate_series(1, 5) i")
    pair.capture("item")
    pair.apply()
    return pair


def conflicts(pair: Pair) -> list[dict[str, Any]]:
    listed = gdq("replica-conflicts", "mirror", "--to", pair.target.su_dsn, "--json", dsn=pair.source.dsn)
    assert listed.returncode == 0, listed.stderr
    found: list[dict[str, Any]] = json.loads(listed.stdout)
    return found


def test_a_replica_that_is_not_there(items: Pair) -> None:
    """A misspelt name is no empty list; without a name the conflicts of all replicas are listed."""
    wrong = gdq("replica-conflicts", "miror", "--to", items.target.su_dsn, dsn=items.source.dsn)
    assert wrong.returncode == 1
    assert wrong.stderr.splitlines()[0] == 'Error: the target holds no replica "miror"'
    listed = gdq("replica-conflicts", "--to", items.target.su_dsn, "--json", dsn=items.source.dsn)
    assert (listed.returncode, json.loads(listed.stdout)) == (0, [])


def test_an_error_names_table_kind_and_key(items: Pair) -> None:
    items.there("delete from item where id = 2", "insert into item values (9, 9, 'theirs', 1)")
    items.run("update item set note = 'x' where id = 2", "insert into item values (9, 90, 'ours', 1)")
    failed = items.replicate()
    assert failed.returncode == 1
    line = failed.stderr.splitlines()[0]
    assert line == 'Error: conflict in table public.item of the target: update_missing, key {"id": 2} and 1 more'
    assert items.rows(items.target, "(select * from item where id = 9)") == [("(9,9,theirs,1)",)]
    assert conflicts(items) == []


def test_rows_that_the_target_lacks(items: Pair) -> None:
    items.there("delete from item where id in (1, 2, 3)")
    items.run("update item set note = 'x' where id in (1, 4)", "delete from item where id = 2")
    items.apply("--on-conflict", "skip")
    assert items.rows(items.target, "item") == [("(4,4,x,1)",), ("(5,5,n5,1)",)]
    found = conflicts(items)
    assert [(one["kind"], one["key"], one["resolution"]) for one in found] == [
        ("update_missing", {"id": 1}, "skip"),
        ("delete_missing", {"id": 2}, "skip"),
    ]
    assert (found[0]["local"], found[0]["remote"]) == (None, {"id": 1, "place": 1, "note": "x", "at": 1})
    items.run("update item set note = 'y' where id = 1", "delete from item where id = 3")
    items.apply("--on-conflict", "apply")
    items.same("item")
    [listed] = json.loads(gdq("replicas", "--to", items.target.su_dsn, "--json", dsn=items.source.dsn).stdout)
    assert listed["conflicts"] == 4


def test_rows_that_are_there_already(items: Pair) -> None:
    items.there("insert into item values (10, 10, 'theirs', 1), (11, 11, 'theirs', 1)")
    items.run(
        "insert into item values (10, 100, 'ours', 1), (12, 11, 'ours', 1)", "update item set note = 'x' where id = 1"
    )
    items.apply("--on-conflict", "insert_exists=skip")
    assert items.rows(items.target, "(select * from item where id >= 10)") == [
        ("(10,10,theirs,1)",),
        ("(11,11,theirs,1)",),
    ]
    assert items.rows(items.target, "(select * from item where id = 1)") == [("(1,1,x,1)",)]
    items.there("insert into item values (20, 20, 'theirs', 1), (21, 21, 'theirs', 1), (31, 31, 'theirs', 1)")
    items.there("delete from item where id in (10, 11)")
    items.run("delete from item where id in (10, 12)")
    items.run(
        "insert into item values (20, 200, 'ours', 1), (22, 21, 'ours', 1)",
        "update item set place = 31 where id = 2",
    )
    [batch] = json.loads(items.apply("--on-conflict", "apply", "--json").stdout)
    assert batch["conflicts"] == 5
    items.same("item")
    kinds = [(one["kind"], one["key"]["id"]) for one in conflicts(items)[2:]]
    assert sorted(kinds) == [
        ("delete_missing", 10),
        ("delete_missing", 12),
        ("insert_exists", 20),
        ("insert_exists", 22),
        ("update_exists", 2),
    ]


def test_several_rows_in_the_way(items: Pair) -> None:
    items.there("insert into item values (10, 10, 'one', 1), (11, 11, 'other', 1)")
    items.run("insert into item values (10, 11, 'ours', 1)")
    assert "multiple_unique" in items.replicate().stderr
    items.apply("--on-conflict", "multiple_unique=apply")
    items.same("item")
    [found] = conflicts(items)
    assert sorted(row["id"] for row in found["local"]) == [10, 11]


def test_swapped_values_beside_a_conflict(items: Pair) -> None:
    items.there("insert into item values (10, 10, 'theirs', 1)")
    items.run(
        "update item set place = null where id = 1",
        "update item set place = 1 where id = 2",
        "update item set place = 2 where id = 1",
        "insert into item values (10, 12, 'ours', 1)",
    )
    items.apply("--on-conflict", "public.item=apply")
    items.same("item")
    assert [one["kind"] for one in conflicts(items)] == ["insert_exists"]


def test_the_newer_row_stays(items: Pair) -> None:
    items.there(
        "update item set note = 'theirs', at = 5 where id in (1, 2, 5)",
        "insert into item values (10, 10, 'theirs', 5), (11, 11, 'theirs', null)",
    )
    items.run(
        "update item set note = 'ours', at = 9 where id = 1",
        "update item set note = 'ours', at = 3 where id = 2",
        "update item set note = 'ours' where id = 3",
        "insert into item values (10, 10, 'ours', 4), (11, 11, 'ours', 4)",
        "delete from item where id = 5",
    )
    items.apply("--on-conflict", "newest:at")
    assert items.rows(items.target, "item") == [
        ("(1,1,ours,9)",),
        ("(10,10,theirs,5)",),
        ("(11,11,ours,4)",),
        ("(2,2,theirs,5)",),
        ("(3,3,ours,1)",),
        ("(4,4,n4,1)",),
        ("(5,5,theirs,5)",),
    ]
    found = {(one["kind"], one["key"]["id"]): one["resolution"] for one in conflicts(items)}
    assert found == {
        ("update_differs", 1): "apply",
        ("update_differs", 2): "skip",
        ("delete_differs", 5): "skip",
        ("insert_exists", 10): "skip",
        ("insert_exists", 11): "apply",
    }


def test_keys_over_parts_of_a_table_and_over_expressions(pair: Pair) -> None:
    pair.make('create table "odd one" ("a b" int primary key, name text, live boolean, local int)')
    pair.make('create unique index on "odd one" (lower(name)) where live')
    pair.make('create unique index on "odd one" (local) nulls not distinct')
    pair.capture('"odd one"')
    pair.apply()
    pair.there("""insert into "odd one" values (1, 'ANN', true, 1), (2, 'BOB', false, 2), (3, 'CY', true, null)""")
    pair.run("""insert into "odd one" values (11, 'ann', true, 11), (12, 'bob', true, 12), (13, 'dan', true, null)""")
    pair.apply("--on-conflict", "apply")
    assert pair.rows(pair.target, '"odd one"') == [
        ("(11,ann,t,11)",), ("(12,bob,t,12)",), ("(13,dan,t,)",), ("(2,BOB,f,2)",)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("maybe", '"maybe" is no answer to a conflict'),
        ("newest:", '"newest:" is no answer to a conflict'),
        ("insert_exist=skip", '"insert_exist" in --on-conflict insert_exist=skip is no kind of conflict'),
        ("public.other=skip", "--on-conflict names public.other, which the replica does not have"),
        ("public.item=newest:moment", 'table public.item has no column "moment"'),
    ],
)
def test_answers_that_mean_nothing(items: Pair, answer: str, message: str) -> None:
    items.run("insert into item values (100)")
    failed = items.replicate("--on-conflict", answer)
    assert failed.returncode == 1
    assert message in failed.stderr.splitlines()[0]


def test_deferrable_keys(pair: Pair) -> None:
    """PostgreSQL checks them by triggers, which do not fire in a replica: two rows would have one key."""
    pair.make(
        """create table item (id int primary key deferrable initially deferred, place int unique deferrable,
             span int4range, exclude using gist (span with &&) deferrable)"""
    )
    pair.capture("item")
    pair.apply()
    for number, row in enumerate(("(1, 100)", "(9, 2)", "(9, 100, '[3,9)')"), 1):
        pair.there(f"insert into item values {row}")
        pair.run(f"insert into item values ({number}, {number}, '[{number},{number + 1})')")
        failed = pair.replicate()
        assert failed.returncode == 1, number
        assert "item" in failed.stderr
        pair.there("delete from item where place = 100 or id = 9")
        pair.apply()
        pair.same("item")
    pair.there("insert into item values (4, 100)")
    pair.run("begin; update item set id = 5 - id, place = 5 - place; insert into item values (1, 40); commit")
    pair.apply("--on-conflict", "apply")
    pair.same("item")


def test_a_row_in_the_way_whose_type_has_its_own_equality(pair: Pair) -> None:
    """The operator is in the extension's schema: texts that differ in case alone are one value of a unique key."""
    with pair.source.connect("su") as su:
        if not su.execute("select from pg_extension where extname = 'citext'").rowcount:
            pytest.skip("this PostgreSQL has no citext")
    with pair.target.connect("su") as su:
        su.execute("create extension citext")
    pair.make("create table account (id public.citext primary key, mail public.citext unique)")
    pair.capture("account")
    pair.run("insert into account values ('ann', 'a@x')")
    pair.apply()
    pair.there("insert into account values ('eve', 'B@X')", "update account set id = 'Ann' where id = 'ann'")
    pair.run("insert into account values ('bob', 'b@x')", "update account set mail = 'ann@x' where id = 'ann'")
    failed = pair.replicate()
    assert failed.returncode == 1
    assert failed.stderr.startswith("Error: conflict in table public.account of the target: insert_exists, key")
    pair.apply("--on-conflict", "apply")
    pair.same("account")
