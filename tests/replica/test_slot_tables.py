"""Tables whose keys, columns and names are not what a slot sends."""

from __future__ import annotations

import pytest

from tests.replica.conftest import Pair
from tests.replica.test_slot_source import apply, slot

pytestmark = pytest.mark.server


def test_rows_that_have_one_key_for_a_while(pair: Pair) -> None:
    """Under a deferrable key a row may come to a key before another one leaves it."""
    pair.make("create table item (id int primary key deferrable, v text)")
    pair.run(
        "alter table item replica identity full", "insert into item select i, 'v' || i from generate_series(1, 6) i"
    )
    with slot(pair, "item"):
        apply(pair)
        for change in (
            "update item set id = 7 - id",
            "update item set id = id % 6 + 1, v = v || '!' where id > 3 or true",
        ):
            pair.run(change)
            apply(pair)
            pair.same("item")


def test_a_column_that_is_generated_no_longer(pair: Pair) -> None:
    """DROP EXPRESSION leaves the rows what was computed, which a slot has not sent."""
    pair.run(
        "create table item (id int primary key, a int, g int generated always as (a * 2) stored)",
        "insert into item (id, a) values (1, 1), (2, 2)",
    )
    pair.there("create table item (id int primary key, a int)")
    with slot(pair, "item"):
        apply(pair)
        pair.run("alter table item alter g drop expression", "update item set a = 5 where id = 1")
        apply(pair)
        pair.same("item")


def test_tables_that_are_renamed_and_dropped(pair: Pair) -> None:
    """Rows before and after arrive under the new name, and nothing is copied; what was dropped stays as it was."""
    pair.make("create table item (id int primary key, n int)")
    pair.make("create table other (id int primary key)")
    pair.run("insert into item values (1, 1), (2, 2)", "insert into other values (1)")
    with slot(pair, "item", "other"):
        apply(pair)
        pair.run(
            "update item set n = 10 where id = 1",
            "create schema stock",
            'alter table item set schema stock; alter table stock.item rename to "Odd one"',
            'update stock."Odd one" set n = 20 where id = 2',
            "drop table other",
        )
        told, _ = apply(pair)
        assert told == ["public.other was dropped in the source: its copy stays in the target"]
        pair.same('stock."Odd one"')
        assert pair.rows(pair.target, "other") == [("(1)",)]
        pair.run("""insert into stock."Odd one" values (3, 3)""")
        assert apply(pair)[0] == []
        pair.same('stock."Odd one"')
