"""`gdq compare-tables` finds each row that differs, and none that is only under way."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.replica.conftest import Pair
from tests.support.programs import gdq
from tests.support.server import Database

pytestmark = pytest.mark.server

ORDERS = "create table orders (id int primary key, customer text, amount numeric(10, 2))"


def compare(pair: Pair, *arguments: str) -> subprocess.CompletedProcess[str]:
    return gdq("compare-tables", *arguments, "--to", pair.target.su_dsn, dsn=pair.source.dsn)


def compared(pair: Pair, *arguments: str, code: int) -> list[dict[str, Any]]:
    done = compare(pair, *arguments, "--json")
    assert done.returncode == code, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def counts(table: dict[str, Any]) -> tuple[int, int, int, int]:
    return table["rows"], table["different"], table["missing"], table["extra"]


def replicated(pair: Pair) -> None:
    pair.make(ORDERS)
    pair.run("insert into orders select i, 'c' || i, i from generate_series(1, 5000) i")
    pair.capture("orders")
    pair.apply()


def test_each_difference_is_named(pair: Pair) -> None:
    replicated(pair)
    [table] = compared(pair, "shop", "mirror", code=0)
    assert (table["table_name"], *counts(table)) == ("public.orders", 5000, 0, 0, 0)
    assert isinstance(table["tick"], int)
    pair.there(
        "update orders set amount = 0, customer = 'x' where id = 7",
        "delete from orders where id in (8, 9)",
        "insert into orders values (9000, 'new', 1)",
    )
    [table] = compared(pair, "mirror", code=3)
    assert counts(table) == (5000, 1, 2, 1)
    examples = {(one["kind"], one["key"]["id"], *one["columns"]) for one in table["examples"]}
    assert examples == {
        ("different", "7", "customer", "amount"),
        ("missing", "8"),
        ("missing", "9"),
        ("extra", "9000"),
    }
    done = compare(pair, "mirror", "--examples", "1")
    assert done.returncode == 3
    assert "1 of 1 tables differ: public.orders" in done.stderr
    assert "gdq replicate shop mirror ... --copy-again" in done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_what_is_under_way_is_no_difference(pair: Pair) -> None:
    replicated(pair)
    pair.there("update orders set amount = -1 where id = 5", "delete from orders where id = 6")
    pair.run(
        "update orders set amount = amount + 1 where id between 1 and 100",
        "delete from orders where id between 200 and 300",
        "insert into orders select i, 'late', i from generate_series(6000, 6100) i",
        "update orders set amount = -1 where id = 5",
        "update orders set id = 7000 where id = 400",
        "update orders set amount = amount + 1 where id = 500",
        "update orders set amount = amount - 1 where id = 500",
    )
    [table] = compared(pair, "mirror", code=3)
    assert counts(table) == (5000, 1, 1, 0)
    assert {(one["kind"], one["key"]["id"]) for one in table["examples"]} == {("different", "5"), ("missing", "6")}


def test_a_replica_has_to_pass_a_truncate(pair: Pair) -> None:
    replicated(pair)
    pair.run("truncate orders", "insert into orders values (1, 'again', 1)")
    done = compare(pair, "mirror", "--wait", "0")
    assert done.returncode == 1
    assert "table public.orders cannot be compared: there was a truncate after the replica's position" in done.stderr
    pair.apply()
    [table] = compared(pair, "mirror", code=0)
    assert counts(table) == (1, 0, 0, 0)


def test_a_table_copied_after_the_position(pair: Pair) -> None:
    replicated(pair)
    pair.make("create table late (id text primary key, n int)")
    pair.run("insert into late values ('a', 1), ('b', 2)")
    pair.capture("late")
    pair.apply()
    pair.run("update late set n = 3 where id = 'a'", "update orders set amount = 5 where id = 1")
    assert [table["table_name"] for table in compared(pair, "mirror", code=0)] == ["public.late", "public.orders"]
    pair.there("update late set n = 9 where id = 'a'")
    [table] = compared(pair, "mirror", "--tables", "late", code=3)
    assert counts(table) == (2, 1, 0, 0)
    [table] = compared(pair, "mirror", "--tables", "late", "--where", "id = 'b' -- x", code=0)
    assert counts(table) == (1, 0, 0, 0)


def test_without_a_replica(empty_db: Database, db: Database) -> None:
    """Two databases without a link: other types, columns in another order, no key, partitions on one side."""
    pair = Pair(empty_db, db)
    for place, tables in (
        (
            empty_db,
            """create table kinds (id int primary key, n numeric(10, 2), c char(5), j jsonb, f real, t timestamptz,
                                   b bytea, i interval);
               create table twice (a int, b text);
               create table parts (id int primary key, n int)""",
        ),
        (
            db,
            """create table kinds (b bytea, f double precision, j json, extra int default 5, c text, n numeric,
                                   t timestamptz, i interval, id bigint primary key);
               create table twice (b text, a int);
               create table parts (id int primary key, n int) partition by range (id);
               create table parts_1 partition of parts for values from (0) to (50);
               create table parts_2 partition of parts for values from (50) to (1000)""",
        ),
    ):
        with place.connect() as connection:
            connection.execute(tables.encode())
            connection.execute(
                """insert into kinds (id, n, c, j, f, t, b, i) values
                     (1, 1.5, 'ab', '{"x": 1}', 0.1, '2026-01-01 12:00+03', '\\x00ff', '1 mon 2 days'),
                     (2, 'NaN', '', null, '-0', 'infinity', '', null)"""
            )
            connection.execute("insert into twice (a, b) values (1, 'x'), (1, 'x'), (1, 'x'), (null, null), (2, '')")
            connection.execute("insert into parts select i, i from generate_series(1, 100) i")
    names = ("--tables", "kinds,twice,parts", "--wait", "0")
    found = compared(pair, *names, code=0)
    assert [(counts(table), table["tick"]) for table in found] == [
        ((2, 0, 0, 0), None),
        ((5, 0, 0, 0), None),
        ((100, 0, 0, 0), None),
    ]
    pair.there(
        "update kinds set f = 0.2 where id = 1",
        "delete from twice where ctid = (select min(ctid) from twice where a = 1)",
        "update twice set b = null where a = 2",
        "delete from parts where id = 60",
    )
    kinds, twice, parts = compared(pair, *names, code=3)
    assert counts(kinds) == (2, 1, 0, 0)
    assert kinds["examples"] == [{"kind": "different", "rows": 1, "key": {"id": "1"}, "columns": ["f"]}]
    assert counts(twice) == (5, 0, 2, 1)
    assert counts(parts) == (100, 0, 1, 0)


def test_columns_that_one_side_computes(pair: Pair) -> None:
    """What the target computes is not compared, and does not tell rows apart; what the source computes is compared."""
    pair.run(
        """create table item (tenant int, name text, slug text generated always as (lower(name)) stored,
                             n int, twice int generated always as (n * 2) stored, primary key (tenant, slug))""",
        "insert into item (tenant, name, n) values (1, 'A', 1), (1, 'B', 2), (2, 'A', 3)",
    )
    pair.there(
        """create table item (tenant int, name text, slug text generated always as (lower(name)) stored,
                             n int, twice int, primary key (tenant, slug))"""
    )
    pair.capture("item")
    pair.apply()
    [table] = compared(pair, "mirror", code=0)
    assert counts(table) == (3, 0, 0, 0)
    pair.there("update item set twice = 0 where n = 2", "delete from item where n = 3")
    [table] = compared(pair, "mirror", code=3)
    assert counts(table) == (3, 0, 2, 1)
    done = gdq("repair-tables", "mirror", "--to", pair.target.su_dsn, dsn=pair.source.dsn)
    assert done.returncode == 0, done.stderr
    pair.same("item")


def test_character_and_text(pair: Pair) -> None:
    """The blanks that fill a character up are no difference, whether a row was copied or changed."""
    pair.run("create table item (id int primary key, c char(5))", "insert into item values (1, 'a'), (2, 'b')")
    pair.there("create table item (id int primary key, c text)")
    pair.capture("item")
    pair.apply()
    compared(pair, "mirror", code=0)
    pair.run("update item set c = 'c' where id = 2")
    pair.apply()
    compared(pair, "mirror", code=0)
    assert pair.rows(pair.target, "item") == [('(1,"a    ")',), ('(2,"c    ")',)]
