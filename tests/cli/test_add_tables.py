"""`gdq add-table` with several tables, patterns and --all."""

from __future__ import annotations

import json

import pytest

from gdq.errors import GdqError
from gdq.table_choice import choose_tables
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import SECONDS, until


@pytest.fixture
def shop(db: Database) -> Database:
    """Tables of every kind in three schemas, and the queue q."""
    with db.connect() as connection:
        connection.execute(
            """create schema shop; create schema audit;
               create table shop.orders (id int primary key, note text);
               create table shop.items (id int primary key);
               create table shop."Odd* name" (id int primary key);
               create table shop.sales (id int primary key) partition by range (id);
               create table shop.sales_1 partition of shop.sales for values from (0) to (10);
               create table audit.log (line text);
               create table plain (id int primary key);
               create table elders (id int); create table children () inherits (elders);
               create view shop.seen as select 1; create sequence shop.numbers"""
        )
        connection.execute("select gdq.create_queue('q')")
    return db


def captured(db: Database) -> set[str]:
    return {table["table_name"] for table in json.loads(gdq("tables", "--json", dsn=db.dsn).stdout)}


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("shop.*", ["shop.items", 'shop."Odd* name"', "shop.orders", "shop.sales"]),
        ("SHOP.o?ders", ["shop.orders"]),
        ("SHOP.o?ers", []),
        ('sh?p."Odd* "*', ['shop."Odd* name"']),
        ('"SHOP".*', []),
        ("*.*l_g", []),
        ("*.lo?", ["audit.log"]),
        ("p*", ["public.plain"]),
        ("o*", []),
        ('"pl"*', ["public.plain"]),
    ],
)
def test_patterns(shop: Database, pattern: str, found: list[str]) -> None:
    """Patterns are psql's; one without a schema stands for tables that the search_path finds by their name."""
    with shop.connect() as connection:
        if not found:
            with pytest.raises(GdqError, match="no table matches"):
                choose_tables(connection, [pattern])
            return
        assert sorted(table.table_name for table in choose_tables(connection, [pattern])) == sorted(found)


def test_a_table_behind_another_is_not_found_without_its_schema(shop: Database) -> None:
    with shop.connect() as connection:
        connection.execute("create table shop.plain (id int); set search_path = shop, public")
        assert {"shop.plain"} == {table.table_name for table in choose_tables(connection, ["pl*"])}


@pytest.mark.parametrize("wrong", ["a.b.*", 'a."*', "shop.*."])
def test_wrong_patterns(shop: Database, wrong: str) -> None:
    done = gdq("add-table", "q", "shop.*", "--except", wrong, dsn=shop.dsn)
    assert (done.returncode, captured(shop)) == (1, set())
    assert done.stderr.startswith(f"Error: pattern {wrong} ")


def test_names_and_patterns(shop: Database) -> None:
    done = gdq("add-table", "q", "plain", "shop.*", "--except", "shop.i*", "--granularity", "row", dsn=shop.dsn)
    assert (done.returncode, done.stdout) == (0, "")
    added = {"public.plain", "shop.orders", "shop.sales", 'shop."Odd* name"'}
    assert set(done.stderr.splitlines()) == {f"added table {name} to q" for name in added}
    assert captured(shop) == added
    done = gdq("add-table", "q", "shop.*", dsn=shop.dsn)
    assert sorted(done.stderr.splitlines()) == [
        "added table shop.items to q",
        'already captured: shop."Odd* name" in q',
        "already captured: shop.orders in q",
        "already captured: shop.sales in q",
    ]
    assert done.returncode == 0


@pytest.mark.long
def test_all_tables(shop: Database) -> None:
    """Inheritance children come first, targets of views and gdq's own tables not at all."""
    made = ["create-view", "v", "--queue", "q", "--sql", "-", "--target", "shop.totals"]
    assert gdq("add-table", "q", "shop.orders", dsn=shop.dsn).returncode == 0
    query = "select note, count(*) as n, sum(id) as s from shop.orders group by note"
    assert gdq(*made, dsn=shop.dsn, stdin=query).returncode == 0
    assert gdq("refresh", dsn=shop.dsn).returncode == 0
    done = gdq("add-table", "q", "--all", "--except", "audit.*", dsn=shop.dsn)
    assert done.returncode == 0, done.stderr
    everything = {"shop.orders", "shop.items", "shop.sales", 'shop."Odd* name"', "public.plain", "public.elders"}
    assert captured(shop) == everything | {"public.children"}


WRONG = [
    (["shop.*", "none.*"], "no table matches none.*"),
    (["--all", "--except", "orders"], "no table matches orders"),
    (["shop.sales_?"], "no table matches shop.sales_?"),
    (["plain", "--except", "plain"], "the exceptions leave no table to capture"),
    (["plain", "missing"], 'relation "missing" does not exist'),
    (["plain", "shop.seen"], "shop.seen is a view, only tables can be captured"),
    (["--all", "--mode", "pk"], "table public.children has no primary key, which mode pk logs"),
    (["--all", "--except", "*.*"], "the exceptions leave no table to capture"),
]


def test_all_or_nothing(shop: Database) -> None:
    """A table or pattern that is wrong is named with a cure, and no other table is captured."""
    for arguments, message in WRONG:
        done = gdq("add-table", "q", *arguments, dsn=shop.dsn)
        assert (done.returncode, done.stderr.splitlines()[0]) == (1, f"Error: {message}"), arguments
    assert captured(shop) == set()
    assert gdq("add-table", "q", "--all", "plain", dsn=shop.dsn).returncode == 2


@pytest.mark.long
def test_options_of_captured_tables(shop: Database) -> None:
    """Options that are not given do not count; those that differ are named, with the command that changes them."""
    options = ["--mode", "pk", "--include", "note", "--operations", "delete,insert,update"]
    assert gdq("add-table", "q", "shop.orders", *options, dsn=shop.dsn).returncode == 0
    for again in ([], options, ["--mode", "pk"], ["--key", "id"]):
        done = gdq("add-table", "q", "shop.orders", *again, dsn=shop.dsn)
        said = "already captured: shop.orders in q\n" if "--key" not in again else done.stderr
        assert (done.returncode, done.stderr) == (0 if "--key" not in again else 1, said)
    done = gdq("add-table", "q", "plain", "shop.orders", "--mode", "full", "--origin", dsn=shop.dsn)
    first, hint = done.stderr.splitlines()
    assert first == "Error: table shop.orders is already captured by this queue with other options: mode, origin"
    assert (done.returncode, hint) == (1, "Hint: gdq alter-table changes them.")
    assert captured(shop) == {"shop.orders"}


def test_a_waiting_writer_is_no_victim(shop: Database) -> None:
    """A writer that holds a later table and waits for an earlier one is never ended as a deadlock's victim."""
    with shop.connect() as watch, shop.connect("su") as writer:
        writer.execute("set deadlock_timeout = '100ms'")
        with writer.transaction():
            writer.execute("insert into shop.items values (1)")
            adding = start_gdq("add-table", "q", "shop.orders", "shop.items", dsn=shop.dsn)
            held = """select from pg_locks where relation = 'shop.orders'::regclass
                         and mode = 'ShareRowExclusiveLock' and granted"""
            until(lambda: watch.execute(held).rowcount)
            writer.execute("insert into shop.orders values (1)")
        assert adding.communicate(timeout=SECONDS)[1].splitlines()[-1] == "added table shop.items to q"


def test_too_many_tables_for_the_servers_locks(shop: Database) -> None:
    """Other sessions need locks too: the command stops while half of them are left."""
    slots = "current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int"
    locks = f"generate_series(1, current_setting('max_locks_per_transaction')::int * ({slots}) / 2)"
    with shop.connect("su") as others, others.transaction():
        others.execute(f"select count(pg_advisory_xact_lock_shared(i)) from {locks} i")
        done = gdq("add-table", "q", "shop.*", dsn=shop.dsn)
        assert (done.returncode, captured(shop)) == (1, set())
        first, hint = done.stderr.splitlines()
        assert first.startswith("Error: too many tables in one transaction: ")
        assert hint.endswith("or raise max_locks_per_transaction.")
    assert gdq("add-table", "q", "shop.*", dsn=shop.dsn).returncode == 0


def test_new_tables(shop: Database) -> None:
    """Rules are made, changed, listed and removed; tables that exist are not captured by them."""
    rule = ("add-table", "q", "--new-tables", "shop.*", "--except", "shop.tmp_*")
    done = gdq(*rule, "--operations", "insert", dsn=shop.dsn)
    assert (done.returncode, done.stderr) == (0, "q captures new tables shop.*\n")
    assert gdq(*rule, "--operations", "insert", dsn=shop.dsn).stderr == "unchanged: new tables shop.* in q\n"
    assert gdq(*rule, dsn=shop.dsn).stderr == "q captures new tables shop.*\n"
    with shop.connect() as connection:
        connection.execute("create table shop.later (id int); create unlogged table shop.never (id int)")
    assert captured(shop) == {"shop.later"}
    [listed] = json.loads(gdq("tables", "--new-tables", "--json", dsn=shop.dsn).stdout)
    reason = "shop.never is unlogged: a crash empties it without any event"
    assert listed == {
        "queue_name": "q",
        "pattern": "shop.*",
        "excepted": ["shop.tmp_*"],
        "options": {},
        "missing": ["shop.never"],
        "reason": reason,
    }
    assert json.loads(gdq("status", "--json", dsn=shop.dsn).stdout)["new_tables"] == [listed]
    done = gdq("doctor", dsn=shop.dsn)
    assert done.returncode == 3
    assert f"and is not captured: {reason} [new_table_not_captured]" in done.stdout
    done = gdq("remove-table", "q", "--new-tables", "shop.*", dsn=shop.dsn)
    assert (done.returncode, done.stderr) == (0, "q does not capture new tables shop.* any more\n")
    done = gdq("remove-table", "q", "--new-tables", "shop.*", dsn=shop.dsn)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, 'Error: queue "q" has no rule for new tables shop.*')
    assert captured(shop) == {"shop.later"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--new-tables"], 2, "give TABLE or PATTERN, or --all"),
        (["--new-tables", "t*"], 1, "pattern t* is not of the form SCHEMA.TABLE"),
        (["--new-tables", "--all", "--include", "a"], 1, "include goes with mode pk"),
    ],
)
def test_rules_that_are_refused(shop: Database, arguments: list[str], code: int, message: str) -> None:
    done = gdq("add-table", "-q", "q", *arguments, dsn=shop.dsn)
    assert done.returncode == code
    assert message in done.stderr
