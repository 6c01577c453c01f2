"""DDL that reaches captured columns through another object, or drops them with their table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.events import Tap, drain
from tests.support.guarded import T, emptied, exact, maintain, reasons, state, watched
from tests.support.history import History
from tests.support.server import Database

pytestmark = pytest.mark.server


@pytest.fixture
def tap(module_db: Database) -> Iterator[Tap]:
    yield from emptied(module_db)


@pytest.fixture
def history(tap: Tap) -> History:
    return watched(tap)


DROPS = {
    "drop type": ("create type k as enum ('x')", "drop type k cascade"),
    "drop domain": ("create domain k as int", "drop domain k cascade"),
    "drop composite": ("create type k as (x int)", "drop type k cascade"),
    "drop a table's row type": ("create table k (x int)", "drop table k cascade"),
    "drop a view's row type by a column": (
        "create table w (x int); create view k as select x from w",
        "alter table w drop x cascade",
    ),
    "drop schema": (
        "create schema away; create type away.k as enum ('x'); create domain k as away.k",
        "drop schema away cascade",
    ),
    "drop owned": ("create type k as enum ('x'); alter type k owner to other", "drop owned by other cascade"),
}


@pytest.mark.parametrize("kind", DROPS)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_columns_that_a_cascade_drops(tap: Tap, history: History, kind: str, isolation: str) -> None:
    create, drop = DROPS[kind]
    with tap.db.connect("su") as su:
        su.execute("drop role if exists other")
        su.execute("create role other")
        su.execute("grant other to app")
        su.execute("grant create, usage on schema shop to other")
    try:
        tap.write(*create.split("; "), "create table t (id int primary key, v k)")
        tap.add("shop.t")
        history.watch("t")
        tap.write("insert into t values (1)")
        with tap.db.connect("app" if kind != "drop owned" else "su") as issuer:
            issuer.execute("set search_path = shop")
            issuer.execute(f"set default_transaction_isolation = '{isolation}'".encode())
            issuer.execute(drop.encode())
        tap.write("insert into t values (2)", "update t set id = 3 where id = 2")
        maintain(tap)
        tap.write("insert into t values (4)")
        rows = drain(tap.db)
        if isolation == "read committed":
            exact(tap, history, rows, "t")
        else:
            result = history.compare(rows, "t")
            assert (result.lost, result.missed, result.matched, result.invented) == ([], 2, 2, [])
        assert [row[7] for row in rows if row[3] == "insert"][-1] == {"id": 4}
    finally:
        with tap.db.connect("su") as su:
            su.execute("drop owned by other cascade")
            su.execute("drop role other")


def test_collation_and_extension_that_go(tap: Tap, history: History) -> None:
    with tap.db.connect("su") as su:
        if not su.execute("select from pg_available_extensions where name = 'hstore'").rowcount:
            pytest.skip("this server has no hstore")
        su.execute("create extension if not exists hstore")
        su.execute('create collation shop.ours from "C"')
        su.execute("alter collation shop.ours owner to app")
    tap.write("create table t (id int primary key, h hstore, c text collate ours)")
    tap.add("shop.t")
    history.watch("t")
    tap.write("insert into t values (1, null, 'x')", "drop collation ours cascade")
    with tap.db.connect("su") as su:
        su.execute("drop extension hstore cascade")
    tap.write("insert into t values (2)")
    rows = drain(tap.db)
    exact(tap, history, rows, "t")
    assert [row[7] for row in rows if row[3] == "insert"][-1] == {"id": 2}


REACHED = {
    "type": (
        "create type k as (id int, a int); create table t of k",
        (
            "alter type k rename attribute a to b cascade; alter type k add attribute c int cascade; "
            "alter type k drop attribute b cascade"
        ),
    ),
    "parent": (
        "create table p (id int, a int); create table t () inherits (p)",
        "alter table p rename a to b; alter table p add c int; alter table p drop b",
    ),
    "grandparent": (
        "create table g (id int, a int); create table p () inherits (g); create table t () inherits (p)",
        "alter table g rename a to b; alter table g add c int; alter table g drop b",
    ),
    "root": (
        "create table p (id int, a int) partition by list (id); create table t partition of p for values in (1, 2, 3)",
        "alter table p rename a to b; alter table p add c int; alter table p drop b",
    ),
    "root of a root": (
        (
            "create table p (id int, a int) partition by list (id); "
            "create table o partition of p default partition by list (id); create table t partition of o default"
        ),
        "alter table p rename a to b; alter table p add c int; alter table p drop b",
    ),
}


@pytest.mark.parametrize("kind", REACHED)
@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_ddl_that_reaches_a_table_through_another(tap: Tap, history: History, kind: str, isolation: str) -> None:
    """The list of DDL commands has only the other object."""
    create, alter = REACHED[kind]
    tap.write(*create.split("; "))
    tap.add("shop.t")
    history.watch("t")
    tap.write("insert into t values (1)", f"set default_transaction_isolation = '{isolation}'")
    for statement in alter.split("; "):
        tap.write(statement, "insert into t values (2)")
        maintain(tap)
        tap.write(
            "insert into t values (3)", "update t set c = 1" if "c int" in statement else "delete from t where id = 2"
        )
    rows = drain(tap.db)
    if isolation == "read committed":
        exact(tap, history, rows, "t")
    else:
        result = history.compare(rows, "t")
        assert (result.lost, result.missed, result.invented) == ([], 3, [])
    assert [sorted(row[7]) for row in rows if row[3] == "insert"][-1] == ["c", "id"]


def test_create_schema_with_a_partition(tap: Tap, history: History) -> None:
    tap.write(
        "create table t (id int, v int) partition by list (id)",
        "alter default privileges grant usage on schemas to gdq_owner",
    )
    tap.add("shop.t")
    history.watch("t")
    tap.write(
        "create schema part create table one partition of shop.t for values in (1)",
        "insert into t values (1, 1)",
        "truncate part.one",
    )
    rows_before = rows = drain(tap.db)
    exact(tap, history, rows, "t")
    assert [row[7] for row in rows if row[3] == "truncate"] == [{"partition": "part.one"}]
    tap.write(
        "alter default privileges revoke usage on schemas from gdq_owner",
        "create schema closed create table two partition of shop.t for values in (2)",
        "insert into t values (2, 2)",
    )
    rows = drain(tap.db)
    exact(tap, history, rows_before + rows, "t")
    assert reasons(rows) == [
        "no right to put TRUNCATE triggers on partition closed.two: GRANT TRIGGER on it to gdq_owner"
    ]


def test_ddl_of_an_extension_script(tap: Tap, history: History) -> None:
    """Commands of a script are commands of their own, also where the list of DDL commands has only the extension."""
    tap.write(T)
    tap.add("shop.t")
    history.watch("t")
    with tap.db.connect("su") as su:
        if not su.execute("select from pg_available_extensions where name = 'citext'").rowcount:
            pytest.skip("this server has no citext")
        su.execute("create extension if not exists citext schema public")
        su.execute("alter table shop.t add c citext")
        su.execute("alter extension citext set schema shop")
        su.execute("alter extension citext add table shop.t")
        su.execute("alter table shop.t rename a to z")
        su.execute("alter extension citext drop table shop.t")
    tap.write("insert into t (id, z, c) values (2, 3, 'X')")
    with tap.db.connect("su") as su:
        su.execute("drop extension citext cascade")
    tap.write("insert into t (id, z) values (4, 3)")
    exact(tap, history, drain(tap.db), "t")


def test_dropped_table(tap: Tap) -> None:
    for drop in ("drop table t", "drop schema gone cascade"):
        with tap.db.connect("su") as su:
            su.execute("create schema if not exists gone authorization app")
            su.execute("grant usage on schema gone to gdq_owner")
        tap.write("create table gone.t (id int)" if "schema" in drop else T)
        name = "gone.t" if "schema" in drop else "shop.t"
        tap.add(name)
        tap.write(f"insert into {name} values (1)", drop)
        assert state(tap, name) == ("resync", drop.split()[0].upper() + " " + drop.split()[1].upper())
        seen = [(row[3], (row[7] or {}).get("dropped")) for row in drain(tap.db)]
        assert seen == [("insert", None), ("ddl", True)]
        drain(tap.db)
        maintain(tap)
        assert tap.owner.execute("select from gdq.table_info()").rowcount == 0
        assert tap.owner.execute("select from pg_proc where proname ~ '^t\\d+_q\\d+_[iudt]$'").rowcount == 0


def test_table_dropped_in_repeatable_read(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t")
    tap.write("set default_transaction_isolation = 'repeatable read'", "insert into t values (1)", "drop table t")
    maintain(tap)
    rows = drain(tap.db)
    assert [row[3] for row in rows] == ["insert", "resync", "ddl"]
    maintain(tap)
    assert tap.owner.execute("select from gdq.table_info()").rowcount == 0


def test_table_captured_after_the_snapshot_of_the_ddl(tap: Tap, history: History) -> None:
    tap.write(T)
    with tap.db.connect("app") as old:
        with old.transaction():
            old.execute("set transaction isolation level repeatable read")
            old.execute("select 1")
            tap.add("shop.t")
            history.watch("t")
            tap.write("insert into t values (1)")
            old.execute("alter table t rename a to c")
        tap.write("insert into t values (2)")
    assert state(tap)[0] == "resync"
    maintain(tap)
    tap.write("insert into t (id, c) values (3, 3)")
    result = history.compare(drain(tap.db), "t")
    assert (result.lost, result.matched, result.missed, result.invented) == ([], 2, 1, [])


def test_rename_of_another_session_after_the_snapshot_of_the_ddl(tap: Tap, history: History) -> None:
    tap.write(T)
    tap.add("shop.t")
    history.watch("t")
    with tap.db.connect("app") as old:
        with old.transaction():
            old.execute("set transaction isolation level repeatable read")
            old.execute("select 1")
            tap.write("alter table t rename a to c", "insert into t (id, c) values (1, 1)")
            old.execute("alter table t add d int")
            old.execute("insert into t (id, d) values (2, 2)")
            old.execute("alter table t add e int")
        tap.write("insert into t (id, d) values (3, 3)")
    maintain(tap)
    tap.write("insert into t (id, d, c) values (4, 4, 4)")
    rows = drain(tap.db)
    result = history.compare(rows, "t")
    assert (result.lost, result.matched, result.missed, result.invented) == ([], 2, 2, [])
    assert reasons(rows) == ["ALTER TABLE in a REPEATABLE READ transaction", "changes before this point were missed"]


def test_foreign_key_in_repeatable_read_leaves_the_other_table_alone(tap: Tap) -> None:
    tap.write(T, "set default_transaction_isolation = 'repeatable read'")
    tap.add("shop.t")
    tap.write("create table u (id int references t)", "create index on t (a)", "alter table u add f int references t")
    assert state(tap) == ("ok", None)


def test_events_of_a_dropped_table_are_kept_until_they_are_read(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t")
    tap.write("insert into t values (1)", "alter table t add c int", "drop table t")
    for _ in range(3):
        maintain(tap)
    assert [row[3] for row in drain(tap.db)] == ["insert", "ddl", "ddl"]
    drain(tap.db)
    maintain(tap)
    assert tap.owner.execute("select from gdq.table_info()").rowcount == 0


RENAMED = {
    "type": ("create type k as enum ('x')", "k", "alter type k rename to l"),
    "domain": ("create domain k as text", "k", "alter domain k rename to l"),
    "composite": ("create type k as (x int)", "k", "alter type k rename to l"),
    "row type": ("create table k (x int)", "k", "alter table k rename to l"),
    "array": ("create type k as enum ('x')", "k[]", "alter type k rename to l"),
    "new schema": ("create schema gone; create type k as enum ('x')", "k", "alter type k set schema gone"),
    "schema": ("create schema gone; create type gone.k as enum ('x')", "gone.k", "alter schema gone rename to part"),
    "constraint": ("create domain k as int constraint c check (value > 0)", "k", "alter domain k drop constraint c"),
}


@pytest.mark.parametrize("kind", RENAMED)
def test_new_names_of_types_are_followed(tap: Tap, history: History, kind: str) -> None:
    create, column, rename = RENAMED[kind]
    tap.write(*create.split("; "), f"create table t (id int primary key, v {column})")
    tap.add("shop.t")
    history.watch("t")
    tap.write("insert into t values (1)", rename, "insert into t values (2)")
    table = tap.owner.execute("select table_id from gdq.captured_table").fetchone()
    assert tap.owner.execute("select code, cause from gdq.table_findings(%s)", table).fetchall() == []
    tap.owner.execute("""select gdq.alter_table_options('q', 'shop.t', '{"origin": true}')""")
    tap.write("insert into t values (3)")
    rows = drain(tap.db)
    exact(tap, history, rows, "t")
    assert (state(tap), reasons(rows)) == (("ok", None), [])
