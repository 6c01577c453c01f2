"""What switches capture off until it is mended: triggers, keys, partitions and tables that cannot be captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg import errors

from tests.support.events import Tap, drain
from tests.support.guarded import T, emptied, maintain, reasons, state, triggers, watched
from tests.support.history import History
from tests.support.server import Database


@pytest.fixture
def tap(module_db: Database) -> Iterator[Tap]:
    yield from emptied(module_db)


@pytest.fixture
def history(tap: Tap) -> History:
    return watched(tap)


TRIGGERS = {
    "disable all": "alter table t disable trigger user",
    "replica": "alter table t enable replica trigger {i}",
    "disable one": "alter table t disable trigger {u}",
    "drop one": "drop trigger {d} on t",
    "drop truncate": "drop trigger {t} on t",
    "replace": "create or replace trigger {i} after insert on t for each row execute function nothing()",
}


@pytest.mark.parametrize("kind", TRIGGERS)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_capture_triggers_that_go_are_noticed_and_come_back(tap: Tap, kind: str, isolation: str) -> None:
    tap.write(
        T,
        "create function nothing() returns trigger language plpgsql as 'begin return null; end'",
        f"set default_transaction_isolation = '{isolation}'",
    )
    tap.add("shop.t")
    tap.write(TRIGGERS[kind].format(**triggers(tap)), "insert into t values (1)")
    assert state(tap)[0] == "resync"
    maintain(tap)
    tap.write("insert into t values (2)", "update t set a = 1 where id = 2", "delete from t", "truncate t")
    rows = drain(tap.db)
    assert [row[3] for row in rows] == ["resync", "resync", "insert", "update", "delete", "delete", "truncate"]
    assert state(tap) == ("ok", None)


PARTED = ("create table t (id int) partition by list (id)", "create table t1 partition of t for values in (1)")


@pytest.mark.parametrize("what", ["disable trigger user", "disable trigger all"])
def test_disabled_triggers_of_a_partition(tap: Tap, what: str) -> None:
    tap.write(*PARTED)
    tap.add("shop.t")
    with tap.db.connect("su") as su:
        su.execute(f"alter table shop.t1 {what}".encode())
    tap.write("insert into t values (1)")
    assert state(tap) == ("resync", "a capture trigger of shop.t1 was dropped or disabled")
    maintain(tap)
    tap.write("insert into t values (1)")
    assert [row[3] for row in drain(tap.db)] == ["resync", "resync", "insert"]


LOADED = {
    "disable": ("alter table t1 disable trigger user", "alter table t1 enable trigger user"),
    "replica": ("alter table t1 enable replica trigger {i}", "alter table t1 enable trigger {i}"),
    "replace": (
        "create or replace trigger {t} after truncate on t1 for each statement execute function nothing()",
        "select 1",
    ),
}


@pytest.mark.parametrize("kind", LOADED)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_partition_loaded_without_its_triggers(tap: Tap, kind: str, isolation: str) -> None:
    """They may be back before the transaction ends, and nothing in the catalogs tells it afterwards."""
    tap.write(*PARTED, "create function nothing() returns trigger language plpgsql as 'begin return null; end'")
    tap.add("shop.t")
    off, on = (statement.format(**triggers(tap)) for statement in LOADED[kind])
    with tap.app.transaction():
        tap.write(f"set transaction isolation level {isolation}", "select 1", off)
        tap.write("insert into t1 values (1)", "truncate t1", on)
    assert state(tap)[0] == "resync"
    maintain(tap)
    tap.write("insert into t values (1)", "truncate t1")
    assert [row[3] for row in drain(tap.db)][-3:] == ["resync", "insert", "truncate"]
    assert state(tap) == ("ok", None)


def test_partition_that_is_half_detached(tap: Tap) -> None:
    """No event trigger fires where DETACH CONCURRENTLY breaks off, and the partition keeps the triggers."""
    tap.write(*PARTED)
    tap.add("shop.t")
    tap.write("insert into t values (1)")
    with tap.db.connect("app") as old, old.transaction():
        old.execute("set transaction isolation level repeatable read")
        old.execute("select from shop.t")
        with pytest.raises(errors.LockNotAvailable):
            tap.write("set lock_timeout = '50 ms'", "alter table t detach partition t1 concurrently")
    tap.owner.execute("select gdq.check_tables('q')")
    maintain(tap)
    tap.write("insert into t1 values (1)")
    found, why = state(tap)
    assert (found, (why or "").partition(":")[0]) == ("resync", "capture stays off")
    assert "partition shop.t1 is half detached" in (why or "")
    tap.write("alter table t detach partition t1 finalize", "insert into t1 values (1)")
    maintain(tap)
    assert [row[3] for row in drain(tap.db) if row[3] not in ("resync", "ddl")] == ["insert"]
    assert state(tap) == ("ok", None)


def test_truncate_trigger_dropped_from_a_partition(tap: Tap) -> None:
    tap.write("create table t (id int) partition by list (id)", "create table t1 partition of t for values in (1)")
    tap.add("shop.t")
    tap.write(f"drop trigger {triggers(tap)['t']} on t1")
    assert state(tap)[0] == "resync"
    maintain(tap)
    tap.write("truncate t1")
    assert [row[3] for row in drain(tap.db)] == ["resync", "resync", "truncate"]


FAULTS = {
    "unlogged": ("alter table t set unlogged", "alter table t set logged", "is unlogged"),
    "too wide": ("too wide", "too narrow", "shop.t cannot be captured"),
    "renamed trigger": (
        "alter trigger {i} on t rename to gone",
        "drop trigger gone on t",
        "trigger gone of shop.t is a renamed",
    ),
    "inheritance child": ("create table c () inherits (t)", "drop table c", "inheritance child shop.c is not captured"),
    "no right": (
        "revoke trigger on t from gdq_owner; alter table t add c int, disable trigger user",
        "grant trigger on t to gdq_owner",
        "permission denied",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_table_that_cannot_be_captured_is_off_until_it_can(tap: Tap, kind: str, isolation: str) -> None:
    spoil, mend, reason = FAULTS[kind]
    columns = range(1100)
    spoil = spoil.replace("too wide", "alter table t " + ", ".join(f"add c{i} bigint" for i in columns))
    mend = mend.replace("too narrow", "alter table t " + ", ".join(f"drop c{i}" for i in columns))
    tap.write(T, f"set default_transaction_isolation = '{isolation}'")
    tap.add("shop.t")
    spoil = spoil.replace("{i}", triggers(tap)["i"])
    tap.write(*spoil.split("; "), "insert into t (id) values (1)")
    maintain(tap)
    maintain(tap)
    found, why = state(tap)
    assert found == "resync"
    assert why
    assert reason in why
    # a consumer that starts now does not hear of it, so it must not end by itself
    tap.owner.execute("select gdq.register_consumer('q', 'late')")
    assert state(tap)[0] == "resync"
    tap.write("insert into t (id) values (2)", mend)
    maintain(tap)
    tap.write("insert into t (id) values (3)")
    rows = drain(tap.db)
    inserted = [row[5] for row in rows if row[3] == "insert"]
    if (kind, isolation) == ("inheritance child", "repeatable read"):
        # only the child was locked, so the functions stayed
        assert inserted == [{"id": 1}, {"id": 2}, {"id": 3}]
    else:
        assert inserted == [{"id": 3}]
    assert len(reasons(rows)) <= 4
    assert [row[7]["kind"] for row in drain(tap.db, consumer="late") if row[3] == "resync"][-1:] == ["armed"]
    assert state(tap) == ("ok", None)


def test_foreign_partition_switches_off(tap: Tap) -> None:
    with tap.db.connect("su") as su:
        su.execute("create foreign data wrapper nowhere")
        su.execute("create server nowhere foreign data wrapper nowhere")
        su.execute("grant usage on foreign server nowhere to app")
    tap.write("create table t (id int) partition by list (id)", "create table t1 partition of t for values in (1)")
    tap.add("shop.t")
    tap.write("create foreign table f partition of t for values in (2) server nowhere", "insert into t values (1)")
    maintain(tap)
    assert state(tap)[0] == "resync"
    tap.write("drop foreign table f")
    maintain(tap)
    tap.write("insert into t values (1)")
    assert [row[3] for row in drain(tap.db) if row[3] != "resync"] == ["insert"]


NO_KEY = (
    "drop index k",
    "drop index concurrently k",
    "alter table t alter a drop not null",
    "alter table t drop constraint k",
)


@pytest.mark.parametrize("how", NO_KEY)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_key_that_is_no_longer_one(tap: Tap, how: str, isolation: str) -> None:
    tap.write("create table t (id int, a int not null)", f"set default_transaction_isolation = '{isolation}'")
    tap.write("alter table t add constraint k unique (a)" if "constraint" in how else "create unique index k on t (a)")
    tap.add("shop.t", key=["a"])
    tap.write(how, "insert into t values (1, 1)")
    assert state(tap)[0] == "resync"
    maintain(tap)
    assert state(tap)[0] == "resync"


def test_pk_mode_follows_its_key(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t", mode="pk", include=["b"])
    tap.write(
        "insert into t values (1, 1, 'x')",
        "alter table t add c int, drop a",
        "insert into t values (2, 'x')",
        "alter table t rename id to nr",
        "insert into t values (3, 'x')",
        "alter table t drop constraint t_pkey, add primary key (nr, b)",
        "insert into t values (4, 'x')",
        "alter table t drop constraint t_pkey",
        "insert into t values (5, 'x')",
    )
    maintain(tap)
    assert state(tap)[0] == "resync"
    tap.write("alter table t add primary key (b, nr)")
    maintain(tap)
    tap.write("insert into t values (6, 'x')")
    rows = drain(tap.db)
    assert [row[5] for row in rows if row[3] == "insert"] == [
        {"id": 1},
        {"id": 2},
        {"nr": 3},
        {"nr": 4, "b": "x"},
        {"nr": 6, "b": "x"},
    ]


def test_partition_detached_and_attached_in_repeatable_read(tap: Tap) -> None:
    """Also concurrently: there the partition is detached before the guard runs."""
    tap.write("create table t (id int) partition by list (id)", "create table t1 partition of t for values in (1)")
    tap.add("shop.t")
    tap.write("insert into t values (1)", "set default_transaction_isolation = 'repeatable read'")
    attach = "alter table t attach partition t1 for values in (1)"
    detach = "alter table t detach partition t1"
    for ddl in (f"{detach} concurrently", attach, detach, attach, "drop table t1"):
        tap.write(ddl)
        assert state(tap)[0] == "resync", ddl
        maintain(tap)
        assert reasons(drain(tap.db))
        assert state(tap) == ("ok", None)


def test_leaf_captured_alone_then_attached_in_repeatable_read(tap: Tap) -> None:
    tap.write("create table t (id int) partition by list (id)", "create table t1 (id int)")
    tap.add("shop.t")
    tap.add("shop.t1")
    tap.write(
        "set default_transaction_isolation = 'repeatable read'", "alter table t attach partition t1 for values in (1)"
    )
    maintain(tap)
    tap.write("insert into t values (1)", "truncate t")
    rows = drain(tap.db)
    assert [(row[3], row[4]) for row in rows if row[3] != "resync"] == [("insert", "shop.t"), ("truncate", "shop.t")]
    assert {row[4] for row in rows if row[3] == "resync"} == {"shop.t", "shop.t1"}


def test_ddl_of_a_table_whose_partition_was_the_reason_to_be_off(tap: Tap, history: History) -> None:
    """The functions of the root still stand then, and have to go once its columns change."""
    tap.write("create table t (id int, a int) partition by list (id)", "create table t1 (id int, a int)")
    tap.add("shop.t")
    history.watch("t")
    tap.write(
        "set default_transaction_isolation = 'repeatable read'",
        "alter table t attach partition t1 for values in (1)",
        "set default_transaction_isolation = 'read committed'",
        "insert into t values (1)",
        "alter table t rename a to b",
        "insert into t values (1)",
    )
    maintain(tap)
    tap.write("insert into t values (1)")
    result = history.compare(drain(tap.db), "t")
    assert (result.lost, result.matched, result.missed, result.invented) == ([], 2, 1, [])


def test_functions_that_cannot_be_replaced(tap: Tap, history: History) -> None:
    """Somebody has locked them: capture is recorded to be off, and what they still write is not all of a row."""
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    history.watch("t")
    with tap.db.connect("su") as su, su.transaction(force_rollback=True):
        functions = (
            "select gdq.capture_function(queue_id, relid, op) from gdq.captured_table, unnest('{i,u,d}'::text[]) op"
        )
        for (function,) in su.execute(functions).fetchall():
            su.execute(f"alter function {function} cost 99".encode())
        tap.write("alter table t add a int default 7", "insert into t values (1)")
    assert state(tap)[0] == "resync"
    maintain(tap)
    tap.write("insert into t values (2)")
    rows = drain(tap.db)
    seen = [row[7].get("kind", row[7]) for row in rows if row[3] in ("resync", "insert")]
    assert (*seen[:2], *seen[-2:]) == ("disarmed", {"id": 1}, "armed", {"id": 2, "a": 7})
    result = history.compare(rows, "t")
    assert (result.lost, result.matched, result.missed, result.invented) == ([], 1, 1, [])
