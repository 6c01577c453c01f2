"""Values that are equal and yet not the same are changes too, and reach the target."""

from __future__ import annotations

import psycopg
import pytest

from tests.replica.conftest import Pair


@pytest.mark.server
def test_equal_is_not_the_same(fed: Pair) -> None:
    fed.make("create table price (id numeric primary key, n numeric, f double precision, j json)")
    fed.capture("price")
    fed.run("insert into price values (1.0, 1.0, 0, '{}'), (2, 5, 5, '[]')")
    fed.apply()
    fed.same("price")
    fed.run("update price set n = 1.00, f = '-0', j = '{ }' where id = 1", "update price set id = 2.0 where id = 2")
    fed.apply()
    fed.same("price")


@pytest.mark.server
def test_a_collation_that_takes_two_texts_for_one(fed: Pair) -> None:
    try:
        fed.make("create collation fold (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this PostgreSQL has no ICU")
    fed.make("create table word (word text collate fold primary key, note text collate fold)")
    fed.capture("word")
    fed.run("insert into word values ('a', 'b'), ('c', 'd')")
    fed.apply()
    fed.run("update word set note = 'B' where word = 'a'", "update word set word = 'C' where word = 'c'")
    fed.apply()
    fed.same("word")


def test_a_key_that_stays_equal_keeps_its_row(pair: Pair) -> None:
    """A column that only the target has keeps its value, though the key has another text."""
    pair.make("create table price (id numeric primary key, n int)")
    pair.run("insert into price values (1.0, 1)")
    pair.capture("price")
    pair.apply()
    pair.there("alter table price add own text", "update price set own = 'kept'")
    pair.run("update price set id = 1.00, n = 2")
    pair.apply()
    assert pair.rows(pair.target, "price") == [("(1.00,2,kept)",)]
