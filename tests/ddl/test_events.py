"""DDL of captured tables as events: what they tell, and that the rows around them come with their own columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from gdq import Consumer
from gdq.batch import Batch
from gdq.batch_state import TableVersion
from gdq.embedded.server import EmbeddedServer
from gdq.errors import ResyncRequired
from tests.support.events import Event, Tap
from tests.support.server import Database, _temporary

ID = {"name": "id", "type": "integer", "key": True}
A = {"name": "a", "type": "integer", "key": False}
T = "create table t (id int primary key, a int)"


@pytest.fixture(scope="module")
def shared(server: EmbeddedServer, template: str) -> Iterator[Database]:
    yield from _temporary(server, template)


@pytest.fixture
def tap(shared: Database) -> Iterator[Tap]:
    """A new queue and an empty schema in the database of this module."""
    with shared.connect() as owner, shared.connect("su") as su:
        su.execute("drop schema if exists shop, away, later cascade")
        owner.execute("select gdq.drop_queue('q', true)")
    with Tap(shared) as opened:
        with shared.connect("su") as su:
            su.execute(f"grant create on database {shared.name} to app".encode())
        yield opened


def ddl(events: list[Event]) -> list[dict[str, Any]]:
    return [event.new or {} for event in events if event.op == "ddl"]


COLUMNS = {
    "add": ("alter table t add b text", [ID, A, {"name": "b", "type": "text", "key": False}]),
    "drop": ("alter table t drop a", [ID]),
    "rename": ("alter table t rename a to b", [ID, A | {"name": "b"}]),
    "type": ("alter table t alter a type numeric(6,2)", [ID, A | {"type": "numeric(6,2)"}]),
    "key": ("alter table t drop constraint t_pkey, add primary key (id, a)", [ID, A | {"key": True}]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_before_and_after(tap: Tap, kind: str) -> None:
    statement, after = COLUMNS[kind]
    tap.write(T)
    tap.add("shop.t")
    tap.write(
        "insert into t values (1, 0)",
        statement,
        "insert into t values (2, 3)" if kind != "drop" else "insert into t values (2)",
    )
    events = tap.events()
    assert [e.op for e in events if e.op != "resync"] == ["insert", "ddl", "insert"]
    (event,) = (e for e in events if e.op == "ddl")
    assert event.tbl == "shop.t"
    (told,) = ddl(events)
    assert told["new_version"] > told["old_version"]
    assert {k: told[k] for k in ("tag", "table", "statement")} == {
        "tag": "ALTER TABLE",
        "table": "shop.t",
        "statement": statement,
    }
    assert (told["old_columns"], told["new_columns"]) == ([ID, A], after)
    # each row with the columns of its own time
    assert [set(e.new or {}) for e in events if e.op == "insert"] == [{"id", "a"}, {c["name"] for c in after}]
    assert tap.events() == []


@pytest.mark.parametrize(
    "statement", ["alter table t drop column a, add column a int", "alter table t drop a, add a text"]
)
def test_a_column_that_took_the_name_of_a_dropped_one_is_told(tap: Tap, statement: str) -> None:
    tap.write("create table t (id int primary key, a int)")
    tap.add("shop.t")
    tap.write(statement, "alter table t rename a to b", "alter table t add column c int")
    assert [told.get("replaced_columns") for told in ddl(tap.events())] == [["a"], None, None]


def test_new_names_are_told_and_change_no_columns(tap: Tap) -> None:
    tap.write(T, "create schema away")
    tap.add("shop.t")
    with tap.db.connect("su") as su:
        su.execute("grant usage on schema away to gdq_owner")
    tap.write(
        "insert into t values (1)",
        "alter table t rename to u",
        "alter table u set schema away",
        "alter schema away rename to later",
        "alter table later.u alter a set statistics 5",
        "insert into later.u values (2)",
        "drop table later.u",
    )
    events = tap.events()
    assert [e.op for e in events] == ["insert", "ddl", "ddl", "ddl", "insert", "ddl"]
    assert [e.tbl for e in events] == ["shop.t", "shop.u", "away.u", "later.u", "later.u", "later.u"]
    told = ddl(events)
    assert [(d.get("old_table"), d["table"]) for d in told] == [
        ("shop.t", "shop.u"),
        ("shop.u", "away.u"),
        ("away.u", "later.u"),
        (None, "later.u"),
    ]
    assert [d["tag"] for d in told] == ["ALTER TABLE", "ALTER TABLE", "ALTER SCHEMA", "DROP TABLE"]
    assert all("new_version" not in d for d in told)
    assert (told[3]["dropped"], told[3]["object"], told[3]["old_columns"]) == (True, "later.u", [ID, A])


def test_typed_tables_and_parents(tap: Tap) -> None:
    """The event is the captured table's; its object is what the command named."""
    tap.write(
        "create type row as (id int, a int)",
        "create table t of row (primary key (id))",
        "create table p (id int, a int)",
        "create table c () inherits (p)",
        "create type gone as enum ('x')",
        "create table d (id int primary key, a gone)",
    )
    for table in ("t", "c", "d"):
        tap.add(f"shop.{table}")
    tap.write(
        "alter type row rename attribute a to b cascade",
        "insert into t values (1, 2)",
        "alter table p add b text",
        "insert into c values (1, 2, 'x')",
        "drop type gone cascade",
        "insert into d values (1)",
    )
    events = [e for e in tap.events() if e.op != "resync"]
    assert [(e.op, e.tbl) for e in events] == [
        ("ddl", "shop.t"),
        ("insert", "shop.t"),
        ("ddl", "shop.c"),
        ("insert", "shop.c"),
        ("ddl", "shop.d"),
        ("insert", "shop.d"),
    ]
    assert [(d["tag"], d["object"]) for d in ddl(events)] == [
        ("ALTER TYPE", 'shop."row".b'),
        ("ALTER TABLE", "shop.p"),
        ("DROP TYPE", "shop.gone"),
    ]
    assert [e.new for e in events if e.op == "insert"] == [{"id": 1, "b": 2}, {"id": 1, "a": 2, "b": "x"}, {"id": 1}]


@pytest.mark.parametrize("how", ["", " concurrently"])
def test_partitions_that_come_and_go(tap: Tap, how: str) -> None:
    tap.write(
        "create table t (id int primary key, a int) partition by range (id)",
        "create table t1 partition of t for values from (0) to (10)",
    )
    tap.add("shop.t")
    tap.write(
        "create table t2 partition of t for values from (10) to (20)",
        "create table t3 (id int primary key, a int)",
        "insert into t3 values (25)",
        "insert into t values (11)",
        "alter table t attach partition t3 for values from (20) to (30)",
        f"alter table t detach partition t1{how}",
        "drop table t2",
        "insert into t1 values (1)",
        "update t set a = 1 where id = 25",
    )
    events = tap.events()
    told = ddl(events)
    assert [{k: d[k] for k in ("tag", "attached", "detached") if k in d} for d in told] == [
        {"tag": "CREATE TABLE", "attached": ["shop.t2"]},
        {"tag": "ALTER TABLE", "attached": ["shop.t3"]},
        {"tag": "ALTER TABLE", "detached": ["shop.t1"]},
        {"tag": "DROP TABLE", "detached": ["shop.t2"]},
    ]
    assert [e.op for e in events] == ["ddl", "insert", "ddl", "resync", "ddl", "resync", "ddl", "resync", "update"]
    assert {e.tbl for e in events} == {"shop.t"}


def test_partition_tree_that_is_attached_is_one_event(tap: Tap) -> None:
    tap.write(
        "create table t (id int primary key, a int) partition by range (id)",
        "create table s (id int primary key, a int) partition by range (id)",
        "create table s1 partition of s for values from (0) to (10)",
        "create table s2 partition of s for values from (10) to (20)",
    )
    tap.add("shop.t")
    tap.write(
        "alter table t attach partition s for values from (0) to (20)", "insert into t values (1), (11)", "truncate t"
    )
    events = tap.events()
    assert [e.op for e in events] == ["ddl", "insert", "insert", "truncate"]
    assert ddl(events)[0]["attached"] == ["shop.s", "shop.s1", "shop.s2"]
    assert tap.owner.execute("select state from gdq.table_info('q')").fetchone() == ("ok",)


def test_ddl_and_dml_in_one_transaction_with_savepoints(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t")
    with tap.app.transaction():
        tap.write(
            "insert into t values (1, 1)", "alter table t add b int", "insert into t values (2, 2, 2)", "savepoint s"
        )
        tap.write(
            "alter table t drop a", "insert into t values (3, 3)", "rollback to s", "insert into t values (4, 4, 4)"
        )
        tap.write(
            "alter table t rename b to c", "savepoint s2", "alter table t drop c", "release s2", "update t set a = 5"
        )
    events = tap.events()
    assert [e.op for e in events] == ["insert", "ddl", "insert", "insert", "ddl", "ddl", *["update"] * 3]
    assert [e.new for e in events if e.op == "insert"] == [
        {"id": 1, "a": 1},
        {"id": 2, "a": 2, "b": 2},
        {"id": 4, "a": 4, "b": 4},
    ]
    assert [set(e.new or {}) for e in events if e.op == "update"] == [{"id", "a"}] * 3
    told = ddl(events)
    assert [d["new_version"] for d in told[:-1]] == [d["old_version"] for d in told[1:]]


@pytest.mark.long
def test_hundreds_of_alters_in_one_transaction(tap: Tap) -> None:
    """They leave the lock table to others, and nothing is lost unseen."""
    tap.write(T)
    tap.add("shop.t")
    with tap.app.transaction():
        tap.write(
            "do $$ begin for n in 0 .. 499 loop"
            " execute format('alter table t rename %s', case n % 2 when 0 then 'a to b' else 'b to a' end);"
            " insert into t values (n); end loop; end $$"
        )
        with tap.db.connect("su") as su:
            (locks,) = su.execute("select count(*) from pg_locks").fetchone() or (0,)
            slots = su.execute(
                "select current_setting('max_locks_per_transaction')::int * (current_setting('max_connections')::int"
                " + current_setting('max_prepared_transactions')::int)"
            ).fetchone()
            assert slots
            assert locks < slots[0] / 4
    tap.owner.execute("select gdq.maintain()")
    tap.write("insert into t values (1000, 7)")
    events = tap.events()
    assert [e.new for e in events if e.op == "insert"][-1] == {"id": 1000, "a": 7}
    captured = sum(e.op == "insert" for e in events) - 1
    gap = [(e.new or {})["kind"] for e in events if e.op == "resync"]
    assert (captured, gap) == (500, []) or (captured < 500 and gap == ["disarmed", "armed"])


def one_batch(tap: Tap) -> Iterator[Batch]:
    with Consumer(tap.db.dsn, tap.queue, tap.consumer) as consumer:
        yield from consumer.batches(once=True)


def test_typed_rows_of_a_batch_with_ddl_are_read_version_by_version(tap: Tap) -> None:
    tap.write("create table t (id int primary key, a text)")
    tap.add("shop.t")
    tap.write(
        "insert into t values (1, 'x')",
        "alter table t alter a type varchar",
        "alter table t rename a to b",
        "insert into t values (2, 'y')",
        "alter table t drop b",
        "update t set id = 3 where id = 2",
    )
    for batch in one_batch(tap):
        versions = batch.versions("shop.t")
        assert [version.columns for version in versions] == [["id", "a"], ["id", "b"], ["id"]]
        read = [batch.arrow("shop.t", version=version.id).to_pylist() for version in versions]
        assert [[(row["ev_op"], row["old_id"], row["new_id"]) for row in rows] for rows in read] == [
            [("I", None, 1)],
            [("I", None, 2)],
            [("U", 2, 3)],
        ]
        assert (read[0][0]["new_a"], read[1][0]["new_b"]) == ("x", "y")
        deltas = [batch.delta("shop.t", version=version.id).sort_by("id").to_pylist() for version in versions]
        assert deltas == [
            [{"id": 1, "a": "x", "_weight": 1}],
            [{"id": 2, "b": "y", "_weight": 1}],
            [{"id": 2, "_weight": -1}, {"id": 3, "_weight": 1}],
        ]
        assert batch.arrow("shop.t").num_rows == 3  # the column whose type changed is gone
        with pytest.raises(ResyncRequired, match="was altered"):
            batch.delta("shop.t")
        with pytest.raises(psycopg.errors.UndefinedObject, match="has no version 0"), batch.connection.transaction():
            batch.arrow("shop.t", version=0)


def test_changed_type_says_how_to_read_it(tap: Tap) -> None:
    tap.write("create table t (id int primary key, a text)", "create table o (id int)")
    tap.add("shop.t")
    tap.add("shop.o")
    tap.write("insert into t values (1, 'x')", "alter table t alter a type varchar", "insert into t values (2, 'y')")
    for batch in one_batch(tap):
        assert batch.versions("shop.o") == []
        changed = pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="changed the type of a")
        with changed as caught, batch.connection.transaction():
            batch.arrow("shop.t")
        assert "batch.versions(table)" in (caught.value.diag.message_hint or "")
        first, second = batch.versions("shop.t")
        assert isinstance(first, TableVersion)
        assert [batch.arrow("shop.t", version=v.id).column("new_a").to_pylist() for v in (first, second)] == [
            ["x"],
            ["y"],
        ]


def test_new_name_does_not_stop_a_delta(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t")
    tap.write("insert into t values (1)", "alter table t rename to u", "insert into u values (2)")
    for batch in one_batch(tap):
        assert batch.delta("shop.u").num_rows == 2
