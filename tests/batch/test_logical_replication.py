"""Logical replication beside gdq: what a worker applies to captured tables, and a publication that holds gdq's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from gdq.embedded.server import EmbeddedServer
from tests.support.events import Tap
from tests.support.guarded import maintain, state
from tests.support.waiting import until

pytestmark = pytest.mark.server

TYPES = "create type k as enum ('x', 'y')"
COLUMNS = "(id int primary key, a int, k k)"


@pytest.fixture
def publisher(server: EmbeddedServer, tap: Tap) -> Iterator[psycopg.Connection[Any]]:
    """A database with a published table shop.t and a slot; `tap` is to subscribe to it."""
    name = f"{tap.db.name}_source"
    with psycopg.connect(server.conninfo(), autocommit=True) as su:
        su.execute(f"create database {name}".encode())
        su.execute("grant app to gdq_owner")
        try:
            with psycopg.connect(server.conninfo("postgres", name), autocommit=True) as connection:
                connection.execute("create schema shop; set search_path = shop")
                connection.execute(f"{TYPES}; create table t {COLUMNS}; create publication p for all tables".encode())
                connection.execute("select pg_create_logical_replication_slot(current_database()::text, 'pgoutput')")
                yield connection
        finally:
            with tap.db.connect("su") as target:
                target.execute("alter subscription s disable; alter subscription s set (slot_name = none)")
                target.execute("drop subscription s")
            su.execute("revoke app from gdq_owner")
            active = "select from pg_replication_slots where slot_name = %s and active"
            until(lambda: not su.execute(active, [name]).rowcount)
            su.execute("select pg_drop_replication_slot(%s)", [name])
            su.execute(f"drop database {name} with (force)".encode())


def test_changes_of_a_replication_worker(server: EmbeddedServer, tap: Tap, publisher: psycopg.Connection[Any]) -> None:
    tap.write(
        TYPES,
        f"create table t {COLUMNS} partition by range (id)",
        "create table t1 partition of t for values from (0) to (10)",
        "create table t2 partition of t default",
    )
    tap.add("shop.t", always=True)
    source = server.conninfo("postgres", publisher.info.dbname)
    with tap.db.connect("su") as su:
        su.execute(
            f"create subscription s connection '{source}' publication p"
            f" with (create_slot = false, slot_name = '{publisher.info.dbname}', copy_data = false)".encode()
        )
        publisher.execute("insert into t values (1, 1, 'x'), (20, 2, 'y')")
        publisher.execute("update t set id = 30 where id = 1")
        publisher.execute("delete from t where id = 20; truncate t; insert into t values (7, 3, 'x')")
        until(lambda: su.execute("select from shop.t where id = 7").rowcount)
        tap.write("alter table t add z int")
        publisher.execute("insert into t values (8, 4, 'x')")
        until(lambda: su.execute("select from shop.t where id = 8").rowcount)
    seen = [(e.op, (e.old or e.new or {}).get("id")) for e in tap.events() if e.op != "ddl"]
    # a worker that runs as the table's owner tells of a TRUNCATE for each partition besides
    assert [e for n, e in enumerate(seen) if e[0] != "truncate" or seen[n - 1][0] != "truncate"] == [
        ("insert", 1),
        ("insert", 20),
        ("delete", 1),
        ("insert", 30),
        ("delete", 20),
        ("truncate", None),
        ("insert", 7),
        ("insert", 8),
    ]
    assert state(tap) == ("ok", None)


def test_publication_for_all_tables(tap: Tap) -> None:
    """A table without a replica identity that is in one can be neither updated nor deleted from."""
    with tap.db.connect("su") as su:
        su.execute("create publication everything for all tables")
    tap.owner.execute("update gdq.queue set rotation_period = '1 us'")
    tap.write("create table t (id int) partition by list (id)", "create table t1 partition of t for values in (1)")
    tap.add("shop.t")
    tap.write(
        "create table t2 partition of t for values in (2)",
        "alter table t detach partition t2",
        "alter table t attach partition t2 for values in (2)",
        "drop table t2",
        "alter table t add a int",
        "alter table t1 disable trigger user",
        "alter table t rename to s",
    )
    assert [e.new["kind"] for e in tap.events() if e.op == "resync" and e.new] == ["gap", "gap", "disarmed"]
    for number in range(4):
        maintain(tap)
        tap.write(f"insert into s values (1, {number})")
        assert [e.new for e in tap.events() if e.op == "insert"] == [{"id": 1, "a": number}]
    assert state(tap, "shop.s") == ("ok", None)
    tap.owner.execute("select gdq.seek('q', 'c', at_tick => max(tick_id)) from gdq.tick")
    tap.owner.execute("select gdq.set_tables('q', 'c', array['shop.s']::regclass[])")
    tap.owner.execute("select gdq.unregister_consumer('q', 'c')")
    tap.owner.execute("select gdq.remove_table('q', 'shop.s'), gdq.drop_queue('q')")
