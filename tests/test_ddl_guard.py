"""What the DDL guard makes of single commands: the right columns go on being logged, or the table is in resync."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from gdq.embedded import Server
from tests.events import Tap, drain
from tests.fix_server import Database, _temporary
from tests.history import History, Row

pytestmark = pytest.mark.server

T = "create table t (id int primary key, a int, b text)"


@pytest.fixture(scope="module")
def shared(server: Server, template: str) -> Iterator[Database]:
    """One database for all tests of this module: making one takes longer than most of them."""
    yield from _temporary(server, template)


@pytest.fixture
def tap(shared: Database) -> Iterator[Tap]:
    """A new queue `q` with a consumer `c`, and an empty schema."""
    with shared.connect() as owner, shared.connect("su") as su:
        su.execute("drop schema if exists shop, gone, part, closed cascade")
        su.execute("drop foreign data wrapper if exists nowhere cascade")
        su.execute("drop table if exists public.t")
        for queue in ("q", "second"):
            owner.execute("select gdq.drop_queue(%s, true)", [queue])
        assert owner.execute("select from pg_class where relnamespace = 'gdq_log'::regnamespace").rowcount == 0
        assert owner.execute("select from pg_proc where pronamespace = 'gdq_log'::regnamespace").rowcount == 0
    with Tap(shared) as opened:
        yield opened


@pytest.fixture
def history(tap: Tap) -> History:
    """Also the rights that an application needs for the DDL of these tests."""
    history = History(tap.db)
    history.create()
    with tap.db.connect("su") as su:
        su.execute("grant create, usage on schema public to app")
        su.execute(f"grant create on database {tap.db.name} to app".encode())
    return history


def state(tap: Tap, table: str = "shop.t") -> tuple[str, str | None]:
    found = tap.owner.execute("select state, reason from gdq.table_info() where table_name = %s", [table]).fetchone()
    assert found
    return found[0], found[1]


def reasons(rows: list[Row]) -> list[str]:
    return [row[7]["reason"] for row in rows if row[3] == "resync"]


def maintain(tap: Tap) -> None:
    for _ in range(500):
        if tap.owner.execute("select gdq.maintain()").fetchone() == (False,):
            return
    pytest.fail("maintenance does not come to an end")


def triggers(tap: Tap) -> dict[str, str]:
    """The quoted names of the capture triggers of shop.t by operation."""
    found = tap.owner.execute(
        "select relid::oid, queue_id from gdq.captured_table where table_name = 'shop.t'"
    ).fetchone()
    assert found
    return {op: f'"!gdq_{found[0]}_{found[1]}_{op}"' for op in "iudt"}


def exact(tap: Tap, history: History, rows: list[Row], *names: str) -> None:
    """Every change of these tables is an event with the right columns, none was missed."""
    for name in names:
        result = history.compare(rows, name)
        assert (name, result.lost, result.missed, result.invented) == (name, [], 0, [])
        assert result.matched


INSERT = "insert into t (id) values (2)"

FOLLOWED = {
    "add column": ("alter table t add c int", "insert into t (id, c) values (2, 5)"),
    "add generated": ("alter table t add c int generated always as (id + 1) stored", INSERT),
    "drop column": ("alter table t drop b", INSERT),
    "drop all columns but one": ("alter table t drop b, drop a", INSERT),
    "rename column": ("alter table t rename a to c", "insert into t (id, c) values (2, 5)"),
    "rename to a name of the log": ("alter table t rename a to ev_id", "insert into t (id, ev_id) values (2, 5)"),
    "swap names": (
        "alter table t rename a to x; alter table t rename id to a; alter table t rename x to id",
        "insert into t (id, a) values (3, 2)",
    ),
    "change type": ("alter table t alter a type text", "insert into t (id, a) values (2, 'x')"),
    "rename table": ("alter table t rename to t2", "insert into t2 (id) values (2)"),
    "set schema": ("alter table t set schema public", "insert into public.t (id) values (2)"),
    "drop the key": ("alter table t drop constraint t_pkey", INSERT),
    "change the key": (
        "alter table t drop constraint t_pkey, add primary key (id, b)",
        "insert into t (id, b) values (2, '')",
    ),
    "owner": ("alter table t owner to app", INSERT),
    "as a view": ("alter view t rename column a to c", "insert into t (id, c) values (2, 5)"),
    "as a materialized view": ("alter materialized view t rename column a to c", "insert into t (id, c) values (2, 5)"),
    "as an index": ("alter index t rename to t2", "insert into t2 (id) values (2)"),
    "in a block": ("do $$ begin alter table t rename a to c; insert into t values (9); end $$", INSERT),
    "in a function": (
        (
            "create function f() returns void language plpgsql as "
            "$$ begin execute 'alter table t drop a'; insert into t values (9); end $$; select f()"
        ),
        INSERT,
    ),
    "in a security definer function": (
        "create function f() returns void language sql security definer as 'alter table t drop a'; select f()",
        INSERT,
    ),
    "several commands at once": (
        "alter table t drop a; insert into t values (8); alter table t add a int; insert into t values (9)",
        INSERT,
    ),
    "drop and add of one name": ("alter table t drop a, add a text", "insert into t (id, a) values (2, 'x')"),
    "a constraint": ("alter table t add check (id > 0)", INSERT),
    "a trigger": (
        "create trigger x before update on t for each row execute function suppress_redundant_updates_trigger()",
        INSERT,
    ),
    "a foreign key": ("create table u (id int references t)", INSERT),
    "a rule": ("create rule r as on delete to t do also nothing", INSERT),
    "copy": ("create table u (like t including all)", INSERT),
    "cluster": ("cluster t using t_pkey", INSERT),
    "an access method": ("alter table t set access method heap", INSERT),
    "set storage": (
        "alter table t alter b set storage external, alter b set statistics 5, replica identity full",
        INSERT,
    ),
    "row security": ("alter table t enable row level security", INSERT),
}


@pytest.mark.parametrize("kind", FOLLOWED)
def test_ddl_is_followed(tap: Tap, history: History, kind: str) -> None:
    """No event is missing, also without maintenance; a type change besides says that old rows have changed."""
    ddl, write = FOLLOWED[kind]
    tap.write(T)
    tap.add("shop.t")
    history.watch("t")
    tap.write("insert into t values (1, 1, 'x')", ddl, write, write.replace("2)", "7)").replace("(2", "(7"))
    rows = drain(tap.db)
    tables = {row[4] for row in rows if row[3] == "insert"}
    assert len(tables) == 1
    renamed = [(*row[:4], "shop.t", *row[5:]) for row in rows]
    exact(tap, history, renamed, "t")
    columns = {"change type", "add generated"}
    assert bool(reasons(rows)) == (kind in columns)
    assert state(tap, tables.pop())[0] == "ok"


FILLED = {
    "constant default": "alter table t add c int default 5",
    "constant default in another rewrite": "alter table t add c int default 5, alter b type varchar(3)",
    "constant default and persistence": "alter table t add c int default 5, set unlogged; alter table t set logged",
    "constant default of a domain": "create domain five int default 5; alter table t add c five",
    "constrained domain": "create domain five int default 5 not null; alter table t add c five",
    "volatile default": "alter table t add c float default random()",
    "identity": "alter table t add c int generated always as identity",
    "stored generated": "alter table t add c int generated always as (id * 2) stored",
    "serial": "alter table t add c serial",
    "conversion": "alter table t alter a type text using 'x'",
    "same type": "alter table t alter a type int using a + 1",
    "same bytes": "alter table t add o oid; alter table t alter o type int",
}


@pytest.mark.parametrize("kind", FILLED)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_ddl_that_changes_rows_without_events_asks_for_a_resync(tap: Tap, kind: str, isolation: str) -> None:
    tap.write(T, "insert into t values (1, 1, 'x')")
    tap.add("shop.t")
    tap.owner.execute("select gdq.force_tick('q')")
    tap.write(f"set default_transaction_isolation = '{isolation}'", FILLED[kind])
    assert state(tap)[0] == "resync"
    maintain(tap)
    assert reasons(drain(tap.db))
    assert state(tap) == ("ok", None)


def test_default_added_to_a_partitioned_table_asks_for_a_resync(tap: Tap) -> None:
    tap.write("create table t (id int) partition by list (id)", "create table t1 partition of t for values in (1)")
    tap.add("shop.t")
    tap.write("insert into t values (1)", "alter table t add c int default 5")
    assert reasons(drain(tap.db)) == ["column c was added with a default: existing rows changed without events"]


TYPES = {
    "rename value": ("create type k as enum ('x', 'y')", "alter type k rename value 'x' to 'z'", True),
    "rename value in a function": (
        "create type k as enum ('x', 'y')",
        "do $$ begin alter type k rename value 'x' to 'z'; end $$",
        True,
    ),
    "rename value that reads like an added one": (
        "create type k as enum ('x', 'y')",
        "/* alter type k add value 'q' */ alter type k rename value 'x' to 'alter type k add value'",
        True,
    ),
    "add value": ("create type k as enum ('x', 'y')", "alter type k add value 'z' after 'y'", False),
    "rename type": ("create type k as enum ('x', 'y')", "alter type k rename to l", False),
    "add attribute": ("create type k as (x int)", "alter type k add attribute z int", True),
    "of an array of domains": (
        "create type e as enum ('x', 'y'); create domain m as e; create domain k as m[]",
        "alter type e rename value 'x' to 'z'",
        True,
    ),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_alter_type_that_changes_how_rows_read_asks_for_a_resync(tap: Tap, kind: str, isolation: str) -> None:
    create, alter, changes = TYPES[kind]
    tap.write(*create.split("; "), "create table t (id int, v k)", "create table u (id int)")
    tap.add("shop.t")
    tap.add("shop.u")
    tap.write(f"set default_transaction_isolation = '{isolation}'", alter, "insert into t values (1)")
    rows = drain(tap.db)
    assert {(row[4], row[7]["kind"]) for row in rows if row[3] == "resync"} == (
        {("shop.t", "gap")} if changes else set()
    )
    assert [row[3] for row in rows if row[3] == "insert"] == ["insert"]


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


@pytest.mark.parametrize("what", ["disable trigger user", "disable trigger all"])
def test_disabled_triggers_of_a_partition(tap: Tap, what: str) -> None:
    tap.write("create table t (id int) partition by list (id)", "create table t1 partition of t for values in (1)")
    tap.add("shop.t")
    with tap.db.connect("su") as su:
        su.execute(f"alter table shop.t1 {what}".encode())
    tap.write("insert into t values (1)")
    assert state(tap) == ("resync", "a capture trigger of shop.t1 was dropped or disabled")
    maintain(tap)
    tap.write("insert into t values (1)")
    assert [row[3] for row in drain(tap.db)] == ["resync", "resync", "insert"]


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


@pytest.mark.parametrize(
    "how", ["drop index k", "alter table t alter a drop not null", "alter table t drop constraint k"]
)
def test_key_that_is_no_longer_one(tap: Tap, how: str) -> None:
    tap.write("create table t (id int, a int not null)")
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


def test_rollback_of_ddl_brings_everything_back(tap: Tap, history: History) -> None:
    tap.write(T)
    tap.add("shop.t")
    history.watch("t")
    for isolation in ("read committed", "repeatable read", "serializable"):
        tap.write(f"set default_transaction_isolation = '{isolation}'", "truncate t")
        for ddl in (
            "alter table t rename a to c",
            "drop table t",
            "alter table t disable trigger user",
            "alter table t set unlogged",
        ):
            with tap.app.transaction(force_rollback=True):
                tap.write(ddl)
            with tap.app.transaction():
                tap.write("insert into t values (1, 1)")
                with tap.app.transaction(force_rollback=True):
                    tap.write(ddl)
                tap.write("update t set a = 2", "delete from t")
    rows = drain(tap.db)
    exact(tap, history, rows, "t")
    assert reasons(rows) == []
    assert state(tap) == ("ok", None)


def test_two_queues_follow(tap: Tap) -> None:
    with Tap(tap.db, "second", "other") as second:
        tap.write(T)
        tap.add("shop.t")
        second.add("shop.t", mode="pk")
        tap.write("alter table t rename id to nr", "alter table t add c int", "insert into t values (1)")
        assert [e.key for e in tap.events() if e.op == "insert"] == [{"nr": 1}]
        assert [e.key for e in second.events() if e.op == "insert"] == [{"nr": 1}]


def test_removing_a_table_is_no_gap(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t")
    tap.write("insert into t values (1)")
    assert [row[3] for row in drain(tap.db)] == ["insert"]
    tap.owner.execute("select gdq.remove_table('q', 'shop.t')")
    assert [row[3:5] for row in drain(tap.db)] == [("ddl", "shop.t")]
    tap.add("shop.t")
    tap.write("insert into t values (2)")
    assert [row[3] for row in drain(tap.db)] == ["insert"]
    assert state(tap) == ("ok", None)


def test_consumer_registered_after_a_gap_hears_nothing_of_it(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t")
    tap.write("set default_transaction_isolation = 'repeatable read'", "alter table t add c int")
    maintain(tap)
    drain(tap.db)
    tap.owner.execute("select gdq.register_consumer('q', 'late')")
    tap.write("insert into t values (1)")
    assert [row[3] for row in drain(tap.db, consumer="late")] == ["insert"]
    assert state(tap) == ("ok", None)


def test_discard_by_the_application(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t")
    for number, what in enumerate(("all", "sequences", "plans", "temp")):
        tap.write(
            f"insert into shop.t values ({number})", f"discard {what}", f"update shop.t set a = 1 where id = {number}"
        )
    rows = drain(tap.db)
    assert [row[3] for row in rows] == ["insert", "update"] * 4
    assert sorted(row[0] for row in rows) == [row[0] for row in rows]


def test_prepared_transaction_with_ddl(tap: Tap, history: History) -> None:
    with tap.db.connect("su") as su:
        if su.execute("show max_prepared_transactions").fetchone() == ("0",):
            pytest.skip("the server keeps no prepared transactions")
    tap.write(T)
    tap.add("shop.t")
    history.watch("t")
    tap.app.execute("begin")
    tap.write(
        "insert into t values (1)", "alter table t drop a", "insert into t values (2)", "prepare transaction 'ddl'"
    )
    maintain(tap)
    tap.write("commit prepared 'ddl'", "insert into t values (3)")
    exact(tap, history, drain(tap.db), "t")


def test_statement_that_took_the_old_columns_with_it(tap: Tap) -> None:
    """Prepared statements and cached plans of a writer go on after DDL of another session."""
    tap.write(T)
    tap.add("shop.t")
    with tap.db.connect("app") as writer:
        for number in range(8):
            writer.execute("insert into t (id) values (%s)", [number], prepare=True)
        tap.write("alter table t drop a, add c int")
        writer.execute("insert into t (id) values (8)", prepare=True)
        writer.execute("update t set c = 1 where id = %s", [8], prepare=True)
    rows = drain(tap.db)
    assert [row[3] for row in rows] == ["insert"] * 8 + ["ddl", "insert", "update"]
    assert rows[-1][7] == {"id": 8, "b": None, "c": 1}
    ddl: dict[str, Any] = rows[8][7]
    before, after = ([column["name"] for column in ddl[which]] for which in ("old_columns", "new_columns"))
    assert (ddl["tag"], before, after) == ("ALTER TABLE", ["id", "a", "b"], ["id", "b", "c"])
    assert ddl["statement"] == "alter table t drop a, add c int"


def test_writers_error_free_without_the_right_to_look(tap: Tap) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        tap.app.execute("select gdq.maintain()")


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
