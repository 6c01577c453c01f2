"""`gdq repair-tables` makes the rows that differ equal, and touches no others."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from typing import Any

import psycopg
import pytest

from gdq import GdqError, TableRepair, repair_tables
from tests.replica.conftest import Pair
from tests.replica.test_compare_tables import compared, counts, replicated
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = pytest.mark.server


def repair(pair: Pair, *arguments: str, to: str | None = None) -> subprocess.CompletedProcess[str]:
    return gdq("repair-tables", *arguments, "--to", to or pair.target.su_dsn, dsn=pair.source.dsn)


def repaired(pair: Pair, *arguments: str, code: int = 0) -> list[tuple[str, int, int, int]]:
    """Each table with the rows inserted, updated and deleted."""
    done = repair(pair, *arguments, "--json")
    assert done.returncode == code, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return [(table["table_name"], table["inserted"], table["updated"], table["deleted"]) for table in found]


def places(pair: Pair, table: str) -> dict[Any, Any]:
    """Where each row of the target is: a row that is written moves."""
    with pair.target.connect("su") as su:
        return dict(su.execute(f"select id, (ctid, xmin)::text from {table}".encode()).fetchall())


def test_each_difference_is_repaired(pair: Pair) -> None:
    replicated(pair)
    assert repaired(pair, "shop", "mirror") == [("public.orders", 0, 0, 0)]
    pair.there(
        "update orders set amount = 0, customer = 'x' where id = 7",
        "delete from orders where id in (8, 9)",
        "insert into orders values (9000, 'new', 1)",
    )
    before = places(pair, "orders")
    assert repaired(pair, "mirror", "--dry-run", code=3) == [("public.orders", 2, 1, 1)]
    assert places(pair, "orders") == before
    done = repair(pair, "mirror")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:11:6] == ["table", "public.orders"]
    pair.same("orders")
    after = places(pair, "orders")
    assert {number for number in before if after.get(number) != before[number]} == {7, 9000}
    assert repaired(pair, "mirror", "--dry-run") == [("public.orders", 0, 0, 0)]
    compared(pair, "mirror", code=0)


def test_a_replica_goes_on_from_what_was_repaired(pair: Pair) -> None:
    """Rows become those of the replica's tick: the changes after it are still to come."""
    replicated(pair)
    pair.there(
        "delete from orders where id in (1, 2, 3)",
        "update orders set amount = -5 where id in (10, 11)",
        "insert into orders values (6000, 'own', 1)",
    )
    pair.run(
        "update orders set amount = amount + 1 where id in (1, 10)",
        "delete from orders where id in (2, 11)",
        "insert into orders values (6000, 'late', 1)",
        "update orders set id = 7000 where id = 3",
    )
    assert repaired(pair, "mirror") == [("public.orders", 3, 2, 1)]
    with pair.target.connect("su") as su:
        rows = su.execute("select id, amount from orders where id in (1, 2, 3, 10, 11, 6000) order by 1").fetchall()
    assert [(number, int(amount)) for number, amount in rows] == [(1, 1), (2, 2), (3, 3), (10, 10), (11, 11)]
    pair.apply()
    pair.same("orders")


def test_a_condition_and_columns(pair: Pair) -> None:
    replicated(pair)
    pair.there(
        "update orders set customer = 'mine' where id between 1 and 4",
        "update orders set amount = 0 where id between 3 and 6",
        "delete from orders where id in (7, 8)",
    )
    assert repaired(pair, "mirror", "--where", "id in (5, 7)") == [("public.orders", 1, 1, 0)]
    assert repaired(pair, "mirror", "--columns", "amount") == [("public.orders", 1, 3, 0)]
    with pair.target.connect("su") as su:
        left = su.execute("select id, customer, amount = id from orders where id < 9 order by 1").fetchall()
    assert left == [*((number, "mine", True) for number in (1, 2, 3, 4)), *((n, f"c{n}", True) for n in (5, 6, 7, 8))]
    # a row that matches on one side only has not come or gone
    assert repaired(pair, "mirror", "--where", "customer like 'mi%'", "--dry-run", code=3) == [
        ("public.orders", 0, 4, 0)
    ]
    assert repaired(pair, "mirror", "--where", "customer like 'mi%'") == [("public.orders", 0, 4, 0)]
    pair.same("orders")


def test_values_of_another_unique_key_swapped(pair: Pair) -> None:
    """Also with rows of other portions; columns that are the target's own, or not to be repaired, keep their values."""
    pair.make("create table item (id int primary key, place int unique, note text)")
    pair.run("insert into item select i, i, 'n' from generate_series(1, 6000) i")
    pair.capture("item")
    pair.apply()
    pair.there("update item set place = -place", "update item set place = 1 + place + 6000")
    assert repaired(pair, "mirror") == [("public.item", 0, 6000, 0)]
    pair.same("item")
    pair.there("alter table item add column own int", "update item set own = id")
    swap = ["update item set place = -place where id < 3", "update item set place = 3 + place where id < 3"]
    pair.there(*swap)
    assert repaired(pair, "mirror") == [("public.item", 0, 2, 0)]
    pair.there(*swap, "update item set note = 'mine' where id = 1")
    assert repaired(pair, "mirror", "--columns", "place") == [("public.item", 0, 2, 0)]
    with pair.target.connect("su") as su:
        assert su.execute("select from item where place <> id or own <> id").rowcount == 0
        assert su.execute("select id from item where note <> 'n'").fetchall() == [(1,)]


def test_two_databases_without_a_link(empty_db: Database, db: Database) -> None:
    """Other types, columns in another order, generated and own columns, partitions, identity, triggers, no gdq."""
    pair = Pair(empty_db, db)
    tables = {
        empty_db: """
            create table kinds (id int primary key, n numeric(10, 2), c char(5), j jsonb, f real, t timestamptz,
                                b bytea, i interval, "odd %s" text[]);
            create table parts (id numeric primary key, n int);
            create table counted (id int primary key, n int generated always as identity)""",
        db: """
            create function stop() returns trigger language plpgsql as $$ begin raise 'fired'; end $$;
            create table kinds (b bytea, f double precision, j json, extra int default 5, c text, n numeric,
                                t timestamptz, i interval, id bigint primary key, "odd %s" text[],
                                twice numeric generated always as (n * 2) stored);
            create trigger t before insert or update or delete on kinds execute function stop();
            create table parts (id numeric primary key, n int) partition by range (id);
            create table parts_1 partition of parts for values from (0) to (50);
            create table parts_2 partition of parts for values from (50) to (1000);
            create table counted (id int primary key, n int generated always as identity)""",
    }
    for place, made in tables.items():
        with place.connect("su") as connection:
            connection.execute(made.encode())
            connection.execute("grant all on all tables in schema public to gdq_owner")
    with empty_db.connect("su") as su:
        su.execute(
            """insert into kinds values
                 (1, 1.5, 'ab', '{"x": 1}', 0.1, '2026-01-01 12:00+03', '\\x00ff', '1 mon 2 days', '{"a,b",null}'),
                 (2, 'NaN', '', null, '-0', 'infinity', '', null, '{}')"""
        )
        su.execute("insert into kinds (id) values (3)")
        su.execute("insert into parts select i, i from generate_series(1, 100) i; insert into parts values (1.50, 1)")
        su.execute("insert into counted (id) select generate_series(1, 5)")
    with db.connect("su") as su:
        su.execute("set session_replication_role = replica")
        su.execute("insert into kinds (id, extra, n, f) values (2, 8, 'NaN', 0), (5000000000, 1, 1, 1)")
        su.execute("insert into parts values (1, 2), (1.5, 1), (60, 60), (700, 1)")
        su.execute("insert into counted (id, n) overriding system value values (1, 7), (2, 2)")
    names = ("--tables", "kinds,parts,counted")
    expected = [("public.kinds", 2, 1, 1), ("public.parts", 99, 1, 2), ("public.counted", 3, 1, 0)]
    assert repaired(pair, *names, "--dry-run", code=3) == expected
    assert repaired(pair, *names) == expected
    found = compared(pair, *names, "--wait", "0", code=0)
    assert [counts(table) for table in found] == [(3, 0, 0, 0), (101, 0, 0, 0), (5, 0, 0, 0)]
    with db.connect("su") as su:
        kept = su.execute("select id, extra, twice from kinds where id < 3 order by id").fetchall()
    assert [tuple(map(str, row)) for row in kept] == [("1", "5", "3.00"), ("2", "8", "NaN")]


def test_batches_applied_between_comparison_and_repair(pair: Pair) -> None:
    """The replica passes changes, and even a TRUNCATE, after the keys were found."""
    replicated(pair)
    changes = [
        ["update orders set amount = amount + 1 where id in (1, 2)", "delete from orders where id = 3"],
        ["truncate orders", "insert into orders select i, 'again', i from generate_series(1, 10) i"],
    ]
    for statements in changes:
        pair.there("update orders set amount = -1 where id between 1 and 5", "insert into orders values (9000)")

        def tell(table: str, phase: str, rows: int, expected: int | None) -> None:
            if phase == "repairing":
                pair.run(*statements)  # noqa: B023
                pair.apply()
                pair.run("update orders set amount = 77 where id = 4")

        [done] = repair_tables(pair.source.dsn, pair.target.su_dsn, queue="shop", replica="mirror", progress=tell)
        assert isinstance(done, TableRepair)
        compared(pair, "mirror", code=0)
        pair.apply()
        pair.same("orders")


@pytest.mark.long
def test_a_replica_that_runs(pair: Pair) -> None:
    """Writers on the source, and a replica that follows, while the target is damaged and repaired."""
    replicated(pair)
    stop = threading.Event()

    def write() -> None:
        number = 0
        with pair.source.connect() as source:
            while not stop.is_set():
                number += 1
                source.execute("update orders set amount = amount + 1 where id %% 50 = %s", [20 + number % 20])
                source.execute("delete from orders where id = %s", [4000 + number % 100])
                source.execute("insert into orders values (%s, 'new', 1) on conflict do nothing", [6000 + number])

    to = ("shop", "mirror", "--to", pair.target.su_dsn)
    writer = threading.Thread(target=write)
    writer.start()
    follower = start_gdq("replicate", *to, "--follow", dsn=pair.source.dsn)
    try:
        for number in range(1, 4):
            pair.there(
                f"update orders set customer = 'damaged' where id % 10 = {number}",
                f"insert into orders values ({-number}, 'own', 1)",
            )
            [(_, inserted, updated, deleted)] = repaired(pair, "mirror")
            assert (inserted, deleted) == (0, 1)
            # of 500 rows those that the source changes may be repaired by the replica
            assert 250 < updated <= 500
            assert follower.poll() is None
    finally:
        stop.set()
        writer.join()
        follower.terminate()
        assert follower.communicate()[1].count("Error") == 0
    pair.apply()
    pair.same("orders")


@pytest.mark.long
def test_killed(pair: Pair) -> None:
    """Whole portions stay, and the next run repairs the rest."""
    pair.make("create table item (id int primary key, n int)")
    pair.run("insert into item select i, i from generate_series(1, 15000) i")
    pair.capture("item")
    pair.apply()
    pair.there("update item set n = -1")

    def wrong() -> int:
        with pair.target.connect("su") as su:
            return su.execute("select from item where n = -1").rowcount

    program = start_gdq("repair-tables", "mirror", "--to", pair.target.su_dsn, dsn=pair.source.dsn)
    until(lambda: program.poll() is not None or wrong() < 15000, "a portion")
    program.kill()
    program.communicate()
    with pair.target.connect("su") as su:
        left = "select from pg_stat_activity where datname = current_database() and application_name = 'gdq:repair'"
        until(lambda: su.execute(left).rowcount == 0, "the end of its session")
    assert (15000 - wrong()) % 2000 in (0, 1000)
    assert wrong() < 15000
    left_over = wrong()
    assert repaired(pair, "mirror") == [("public.item", 0, left_over, 0)]
    pair.same("item")


def test_an_interrupted_portion_leaves_nothing(pair: Pair) -> None:
    """A session that is ended within the second portion; then a table that somebody holds for a while."""
    pair.make("create table item (id int primary key, n int)")
    pair.run("insert into item select i, i from generate_series(1, 3000) i")
    pair.capture("item")
    pair.apply()
    pair.there("update item set n = -1")
    waiting = "select from pg_stat_activity where application_name = 'gdq:repair' and wait_event_type = 'Lock'"
    end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'gdq:repair'"
    holder = pair.target.connect("su")
    holder.autocommit = False

    def finish(done: str) -> None:
        with pair.target.connect("su") as su:
            until(lambda: su.execute(f"{waiting} and datname = current_database()".encode()).rowcount == 1, "it")
            if done == "end":
                su.execute(f"{end} and datname = current_database()".encode())
        holder.rollback()

    def call(done: str) -> int:
        waiter = threading.Thread(target=finish, args=[done])

        def tell(table: str, phase: str, rows: int, expected: int | None) -> None:
            if (phase, rows) == ("repairing", 2000) or (phase, done) == ("repairing", "wait"):
                holder.execute("select from item where id = 1 for update")
                waiter.start()

        try:
            [repair] = repair_tables(
                pair.source.dsn, pair.target.su_dsn, ["item"], queue="shop", replica="mirror", progress=tell
            )
            return repair.updated
        finally:
            waiter.join()

    with holder:
        with pytest.raises(psycopg.OperationalError):
            call("end")
        with pair.target.connect("su") as su:
            assert su.execute("select from item where n = -1").rowcount == 1000
        assert call("wait") == 1000
    pair.same("item")


def test_ctrl_c(pair: Pair) -> None:
    """While it waits for a table that somebody holds."""
    pair.make("create table orders (id int primary key)")
    pair.run("insert into orders values (1)")
    with pair.target.connect("su") as holder, holder.transaction():
        holder.execute("lock table orders in row share mode")
        program = start_gdq("repair-tables", "--tables", "orders", "--to", pair.target.su_dsn, dsn=pair.source.dsn)
        waiting = "select from pg_locks where relation = 'orders'::regclass and not granted"
        until(lambda: holder.execute(waiting).rowcount == 1, "a lock that is waited for")
        program.send_signal(signal.SIGINT)
        told = program.communicate()[1]
    assert program.returncode == 130
    assert told.splitlines()[-1].startswith("Error: interrupted: the tables above were repaired")
    assert pair.rows(pair.target, "orders") == []


def test_what_cannot_be_repaired(pair: Pair) -> None:
    """One clear line, and nothing is written, also not to tables before it."""
    pair.make("create table orders (id int primary key, n int)")
    pair.run("create table bag (n int, v int)", "create table keyed (id int primary key)")
    pair.run("insert into orders values (1, 1)", "insert into keyed values (1)")
    pair.there("create table bag (n int)", "create table keyed (id int)", "create table narrow (id int primary key)")
    pair.run("create table narrow (id int primary key, n int)")
    for tables, message in {
        "orders,bag": 'table public.bag of the target lacks "v"',
        "orders,keyed": 'table public.keyed of the target has no unique key ("id")',
        "orders,narrow": 'table public.narrow of the target lacks "n"',
        "orders,nowhere": 'relation "nowhere" does not exist',
    }.items():
        failed = repair(pair, "--tables", tables)
        assert (failed.returncode, failed.stdout) == (1, "")
        assert message in failed.stderr.splitlines()[0]
    assert pair.rows(pair.target, "orders") == []
    with pytest.raises(GdqError, match="named by its queue and its name"):
        repair_tables(pair.source.dsn, pair.target.su_dsn, replica="mirror")
    assert repaired(pair, "--tables", "narrow", "--columns", "id") == [("public.narrow", 0, 0, 0)]


def test_a_target_that_does_not_take_rows(pair: Pair) -> None:
    pair.run("create table orders (id int primary key, n int, note text)")
    pair.there("create table orders (id int primary key, n int check (n < 100), note varchar(5))")
    pair.run("insert into orders values (1, 1, 'a'), (2, 100, 'b')")
    for change, message in (
        ("update orders set n = n", "does not take the source's rows: new row for relation"),
        ("update orders set n = 2, note = 'longer'", "does not take the source's rows: value too long"),
    ):
        pair.run(change)
        failed = repair(pair, "--tables", "orders")
        assert (failed.returncode, failed.stdout) == (1, "")
        assert f"table public.orders of the target {message}" in failed.stderr.splitlines()[0]
        assert pair.rows(pair.target, "orders") == []
    pair.run("update orders set note = 'short'")
    pair.there(
        "create function keep() returns trigger language plpgsql as $$ begin return null; end $$",
        "create trigger t before insert on orders for each row execute function keep()",
        "alter table orders enable always trigger t",
    )
    failed = repair(pair, "--tables", "orders")
    assert failed.stderr.startswith("Error: table public.orders of the target does not keep the source's row of key ")
    pair.there("alter table orders enable replica trigger t", "drop trigger t on orders")
    assert repaired(pair, "--tables", "orders") == [("public.orders", 2, 0, 0)]


def test_a_role_without_rights(pair: Pair) -> None:
    replicated(pair)
    pair.there("update orders set amount = 0 where id = 1")
    owner = pair.target.dsn
    failed = repair(pair, "mirror", to=owner)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "permission denied for schema gdq_target" in failed.stderr.splitlines()[0]
    with pair.target.connect("su") as su:
        su.execute("revoke all on orders from public, gdq_owner; grant select on orders to gdq_owner")
        su.execute("alter table orders owner to current_user")
    failed = repair(pair, "--tables", "orders", to=owner)
    assert "permission denied for table orders" in failed.stderr.splitlines()[0]
    with pair.target.connect("su") as su:
        su.execute("grant all on orders to gdq_owner")
        su.execute("create trigger lower before update on orders execute function suppress_redundant_updates_trigger()")
    failed = repair(pair, "--tables", "orders", to=owner)
    assert 'has trigger "lower", which this role cannot keep from firing' in failed.stderr.splitlines()[0]
    with pair.target.connect("su") as su:
        su.execute("drop trigger lower on orders")
    assert repair(pair, "--tables", "orders", to=owner).returncode == 0
    pair.same("orders")


def test_a_replica_has_to_pass_a_truncate(pair: Pair) -> None:
    replicated(pair)
    pair.there("delete from orders where id = 1")
    pair.run("truncate orders")
    failed = repair(pair, "mirror", "--wait", "0")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "there was a truncate after the replica's position" in failed.stderr.splitlines()[0]
