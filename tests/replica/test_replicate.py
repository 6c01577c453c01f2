"""`gdq replicate` keeps tables of another database equal to captured ones, and says what keeps it from that."""

from __future__ import annotations

import json
import threading

import pytest

from tests.replica.conftest import Pair
from tests.support.programs import gdq, start_gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server

ORDERS = "create table orders (id int primary key, customer text, amount numeric(10, 2))"


def test_copy_then_changes(pair: Pair) -> None:
    pair.make(ORDERS)
    pair.run("insert into orders select i, 'c' || i, i from generate_series(1, 100) i")
    pair.capture("orders")
    assert "copied public.orders: 100 rows" in pair.apply().stderr
    pair.same("orders")
    pair.run(
        "update orders set amount = amount + 1 where id <= 10",
        "update orders set amount = amount + 1 where id <= 5",
        "delete from orders where id between 20 and 29",
        "insert into orders values (200, 'new', 1.5), (201, null, null)",
        "update orders set id = id + 1000 where id = 40",
        "insert into orders values (300, 'gone', 1)",
        "delete from orders where id = 300",
        "update orders set amount = amount + 1 where id = 50",
        "update orders set amount = amount - 1 where id = 50",
    )
    [batch] = json.loads(pair.apply("--json").stdout)
    # a row that was changed and changed back is written all the same
    assert (batch["inserted"], batch["updated"], batch["deleted"]) == (3, 11, 11)
    pair.same("orders")
    assert json.loads(pair.apply("--json").stdout) == []


def test_types_and_generated_columns(fed: Pair) -> None:
    for place in (fed.source, fed.target):
        with place.connect() as connection:
            connection.execute("create type mood as enum ('sad', 'glad')")
            connection.execute("create domain cents as int check (value >= 0)")
    fed.make(
        """create table kinds (id numeric primary key, a mood, b cents, c char(5), d bit(4), e jsonb, f float8,
             g text[], h regclass, i bytea, j timestamptz, k interval, l varchar(3), m money, n json, o point,
             p int generated always as (id::int * 2) stored, q int generated always as identity)"""
    )
    fed.capture("kinds")
    fed.apply()
    values = """'glad', 5, 'ab', b'1010', '{"x": 1.00}', 'NaN', '{a,NULL,"b c"}', 'pg_class', '\\x00ff',
        '2026-01-01 12:00+03', '1 mon 2 days', 'xyz', '12.50', '{"b": 1}', '(1,2)'"""
    fed.run(
        "insert into kinds (id, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o) values (1.0, " + values + ")",
        "insert into kinds (id, f) values (2, -0.0), (3, 'infinity')",
    )
    fed.apply()
    fed.same("kinds")
    # equal numbers with other texts, also as the key
    fed.run("update kinds set id = 1.00, e = '{\"x\": 1.0}' where id = 1", "update kinds set f = 0.0 where id = 2")
    fed.apply()
    fed.same("kinds")


def test_truncate_in_its_place(fed: Pair) -> None:
    fed.make(ORDERS)
    fed.make("create table lines (id int primary key, order_id int references orders)")
    fed.run("insert into orders select i from generate_series(1, 5) i", "insert into lines values (1, 1)")
    fed.capture("orders", "lines")
    fed.apply()
    fed.run(
        "update orders set amount = 7 where id = 1",
        "truncate orders, lines",
        "insert into orders values (1, 'again', 1), (9, 'x', 2)",
        "update orders set amount = 3 where id = 9",
    )
    fed.apply()
    fed.same("orders", "lines")
    fed.run("truncate orders, lines")
    fed.apply()
    fed.same("orders", "lines")


def test_another_unique_key_is_swapped(fed: Pair) -> None:
    fed.make("create table seat (id int primary key, place int unique)")
    fed.run("insert into seat select i, i from generate_series(1, 9) i")
    fed.capture("seat")
    fed.apply()
    fed.run(
        "update seat set place = null where id = 1",
        "update seat set place = 1 where id = 2",
        "update seat set place = 2 where id = 1",
        "delete from seat where id = 3",
        "insert into seat values (30, 3)",
    )
    fed.apply()
    fed.same("seat")


def test_sequences(fed: Pair) -> None:
    fed.make(ORDERS)
    for place in (fed.source, fed.target):
        with place.connect() as connection:
            connection.execute("create sequence number")
    fed.capture("orders")
    fed.run("select gdq.add_sequence('shop', 'number')", "select nextval('number') from generate_series(1, 5)")
    fed.apply()
    fed.run("select nextval('number')", "insert into orders values (1)")
    fed.apply()
    with fed.target.connect() as connection:
        assert connection.execute("select last_value from number").fetchone() == (6,)


def test_triggers_and_foreign_keys_do_not_fire(fed: Pair) -> None:
    fed.make(ORDERS)
    fed.make("create table lines (id int primary key, order_id int references orders on delete cascade)")
    fed.there(
        "create function stop() returns trigger language plpgsql as $$ begin raise 'fired'; end $$",
        "create trigger t before insert or update or delete on lines execute function stop()",
    )
    fed.capture("orders", "lines")
    fed.apply()
    fed.run("insert into orders values (1), (2)", "insert into lines values (1, 1), (2, 2)")
    fed.apply()
    fed.run("update lines set order_id = 2", "delete from orders where id = 1")
    fed.apply()
    fed.same("orders", "lines")


def test_a_role_that_cannot_keep_triggers_from_firing(pair: Pair) -> None:
    pair.make(ORDERS)
    pair.make("create table lines (id int primary key, order_id int references orders)")
    pair.there(
        "create function stop() returns trigger language plpgsql as $$ begin raise 'stop'; end $$",
        "create trigger stops before insert on lines for each row execute function stop()",
    )
    pair.capture("orders", "lines")
    refused = pair.replicate(role="owner")
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        'Error: table public.lines of the target has trigger "stops", which this role cannot'
    )
    with pair.target.connect("su") as su:
        su.execute("grant set on parameter session_replication_role to gdq_owner")
        try:
            done = pair.replicate(role="owner")
        finally:
            su.execute("revoke set on parameter session_replication_role from gdq_owner")
    assert done.returncode == 0, done.stderr


def test_tables_that_come_later(fed: Pair) -> None:
    fed.make(ORDERS)
    fed.capture("orders")
    fed.apply()
    fed.make("create table later (id int primary key)")
    fed.run("insert into later values (1)")
    fed.capture("later")
    fed.run("insert into later values (2)", "insert into orders values (1)")
    fed.apply()
    fed.same("orders", "later")


@pytest.mark.parametrize(
    ("table", "options", "there", "message"),
    [
        ("orders (id int primary key)", "", None, "the target has no table public.orders"),
        ("orders (id int primary key)", "mode => 'pk'", "orders (id int primary key)", "is captured in part"),
        ("orders (id int primary key)", "", "orders (id int)", 'has no unique key ("id")'),
        ("orders (id int primary key, n int)", "", "orders (id int primary key)", 'lacks "n"'),
    ],
)
def test_what_cannot_be_replicated(pair: Pair, table: str, options: str, there: str | None, message: str) -> None:
    pair.run(f"create table {table}", f"select gdq.add_table('shop', 'orders'{', ' + options if options else ''})")
    if there:
        pair.there(f"create table {there}")
    failed = pair.replicate()
    assert failed.returncode == 1
    assert message in failed.stderr.splitlines()[0]


def test_a_target_that_has_rows_is_left_alone(fed: Pair) -> None:
    fed.make(ORDERS)
    fed.capture("orders")
    fed.run("insert into orders values (1)")
    fed.there("insert into orders values (5)")
    failed = fed.replicate()
    assert "table public.orders of the target has rows already" in failed.stderr
    assert fed.rows(fed.target, "orders") == [("(5,,)",)]
    fed.apply("--overwrite")
    fed.same("orders")


def test_a_target_that_somebody_changed(fed: Pair) -> None:
    fed.make(ORDERS)
    fed.run("insert into orders values (1), (2)")
    fed.capture("orders")
    fed.apply()
    fed.there("delete from orders where id = 1")
    fed.run("update orders set amount = 1")
    failed = fed.replicate()
    assert failed.returncode == 1
    assert 'update_missing, key {"id": 1}' in failed.stderr.splitlines()[0]
    assert fed.rows(fed.target, "orders") == [("(2,,)",)]
    fed.apply("--copy-again", "public.orders")
    fed.same("orders")


def test_source_and_target_are_one(pair: Pair) -> None:
    done = gdq("replicate", "shop", "mirror", "--to", pair.source.dsn, dsn=pair.source.dsn)
    assert done.stderr.startswith("Error: source and target are the same database")


def test_the_consumer_follows_the_target(pair: Pair) -> None:
    """Where somebody has moved the consumer, or the target was restored, the target's position decides."""
    pair.make(ORDERS)
    pair.capture("orders")
    pair.apply()
    pair.run("insert into orders values (1)", "select gdq.force_tick('shop')")
    pair.run("select gdq.seek('shop', 'mirror', to_now => true)")
    pair.apply()
    pair.same("orders")


def test_follow_list_and_drop(pair: Pair) -> None:
    pair.make(ORDERS)
    pair.capture("orders")
    to = ("--to", pair.target.su_dsn)
    follower = start_gdq("replicate", "shop", "mirror", *to, "--follow", "--json", dsn=pair.source.dsn)
    try:
        assert follower.stdout is not None
        pair.run("insert into orders values (1)")
        until(lambda: pair.rows(pair.target, "orders"), "the row in the target")
        pair.run("insert into orders values (2)")
        until(lambda: len(pair.rows(pair.target, "orders")) == 2, "the second row")
    finally:
        follower.terminate()
        out, err = follower.communicate()
    assert follower.returncode == 0, err
    assert sum(json.loads(line)["inserted"] for line in out.splitlines()) == 2 or "copied public.orders: 1" in err
    [listed] = json.loads(gdq("replicas", *to, "--json", dsn=pair.source.dsn).stdout)
    assert (listed["replica_name"], listed["tables"]) == ("mirror", ["public.orders"])
    dropped = gdq("drop-replica", "shop", "mirror", *to, dsn=pair.source.dsn)
    assert dropped.stderr.strip().endswith("dropped replica mirror of shop")
    assert json.loads(gdq("replicas", *to, "--json", dsn=pair.source.dsn).stdout) == []
    assert "has rows already" in pair.replicate().stderr


def test_capture_that_is_off(pair: Pair) -> None:
    """No copy is made, let alone one after the other: a run up to now fails, and one that follows waits."""
    pair.make(ORDERS)
    pair.capture("orders")
    pair.apply()
    pair.run("alter table orders set unlogged", "insert into orders values (1)")
    failed = pair.replicate()
    assert failed.returncode == 1
    assert failed.stderr.startswith("Error: capture of table public.orders is off, so that no copy can follow its")
    assert "public.orders is unlogged" in failed.stderr.splitlines()[0]
    to = ("--to", pair.target.su_dsn)
    told: list[str] = []
    waits = "replica mirror waits: capture of table public.orders is off"
    with start_gdq("replicate", "shop", "mirror", *to, "--follow", dsn=pair.source.dsn) as follower:
        reader = threading.Thread(target=lambda: told.extend(follower.stderr or ()))
        reader.start()
        try:
            until(lambda: waits in "".join(told), "what it waits for")
            pair.run("alter table orders set logged", "select gdq.maintain()", "insert into orders values (2)")
            until(lambda: len(pair.rows(pair.target, "orders")) == 2, "the copy and the row after it")
        finally:
            follower.terminate()
            reader.join()
    text = "".join(told)
    assert (follower.returncode, text.count("copied public.orders"), text.count(waits)) == (0, 1, 1), text


def test_a_unique_key_is_swapped_beside_columns_of_the_target(fed: Pair) -> None:
    """Rows that go and come again keep what the target alone has of them."""
    fed.make("create table seat (id int primary key, place int unique)")
    fed.there("alter table seat add own text default 'new', add twice int generated always as (id * 2) stored")
    fed.run("insert into seat select i, i from generate_series(1, 4) i")
    fed.capture("seat")
    fed.apply()
    fed.there("update seat set own = 'kept ' || id")
    fed.run(
        "begin; update seat set place = null where id = 1; update seat set place = 1 where id = 2; "
        "update seat set place = 2 where id = 1; delete from seat where id = 4; insert into seat values (5, 4); commit"
    )
    fed.apply()
    assert fed.rows(fed.target, "(select id, place, own, twice from seat)") == [
        ('(1,2,"kept 1",2)',),
        ('(2,1,"kept 2",4)',),
        ('(3,3,"kept 3",6)',),
        ("(5,4,new,10)",),
    ]
