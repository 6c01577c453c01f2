"""Values that are equal and yet not the same are changes too, and reach the target."""

from __future__ import annotations

import psycopg
import pytest

from tests.replica.conftest import Pair
from tests.replica.test_repair_tables import repaired

# Columns whose values differ in blanks at their end alone, also by way of a domain; char(4) fills them up.
BLANKS = (
    "create domain padded as bpchar",
    "create domain filled as char(4)",
    "create table bag (v bpchar, d padded, n int)",
    "create table word (k bpchar, d padded, c char(4), f filled, v bpchar, primary key (k, d, c, f))",
)


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


@pytest.mark.server
def test_blanks_at_the_end_tell_rows_apart(fed: Pair) -> None:
    """To PostgreSQL values of type character are equal without them, and a cast to text cuts them."""
    for statement in BLANKS:
        fed.make(statement)
    fed.run(
        "alter table bag replica identity full",
        'insert into bag select v, w, 1 from unnest(\'{a,"a ","a  "}\'::bpchar[]) v, unnest(\'{a,"a "}\'::bpchar[]) w',
        "insert into word values ('a ', 'b  ', 'c', 'd', 'v '), ('b', 'b', '', 'd', 'w')",
    )
    fed.capture("public.bag", "public.word")
    fed.apply()
    fed.same("bag", "word")
    fed.run(
        "delete from bag where octet_length(v) = 2 and octet_length(d) = 1",
        "update bag set n = 2 where octet_length(v) = 1 and octet_length(d) = 2",
        "update bag set d = 'a   ' where octet_length(v) = 3",
        "update word set v = 'v' where k = 'a'",
        "update word set k = 'b  ', d = 'b ' where k = 'b'",
    )
    fed.apply()
    fed.same("bag", "word")


def test_rows_that_differ_in_blanks_alone_are_repaired(pair: Pair) -> None:
    for statement in BLANKS:
        pair.make(statement)
    pair.run(
        "insert into bag select v, 'b ', 1 from unnest('{a,\"a \",\"a  \"}'::bpchar[]) v",
        "insert into word select k, 'd ', 'c', 'f', 'v ' from unnest('{\"a \",b,\"c  \",\"d \"}'::bpchar[]) k",
    )
    pair.capture("bag", "word")
    pair.apply()
    pair.there(
        "delete from bag where octet_length(v) = 2",
        "insert into bag values ('a  ', 'b', 1)",
        "update word set k = 'a' where k = 'a'",
        "update word set v = 'v' where k = 'b'",
        "delete from word where k = 'c'",
        "update word set k = 'e ' where k = 'd'",
    )
    assert repaired(pair, "shop", "mirror") == [("public.bag", 1, 0, 1), ("public.word", 3, 1, 2)]
    pair.same("bag", "word")


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
