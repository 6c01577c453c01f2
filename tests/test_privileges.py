"""What writers need, and what code that runs inside a capture function can do."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import errors

from tests.events import Tap
from tests.test_types import HOSTILE, pin

pytestmark = pytest.mark.server

SCHEMAS = "('gdq'::regnamespace, 'gdq_log'::regnamespace)"

# What a role that got hold of a capture function's rights might try.
ATTEMPTS = (
    "select count(*) from gdq.queue",
    "select count(*) from gdq_log.q1_s0",
    "delete from gdq_log.q1_s0",
    "truncate gdq_log.q1_s0",
    "drop table gdq_log.q1_s0",
    "create table gdq_log.mine (a int)",
    "create function gdq_log.mine() returns int language sql as 'select 1'",
    "create table public.mine (a int)",
    "select count(*) from hidden.secret",
    "select gdq.drop_queue('q', true)",
    "select gdq.create_queue('mine')",
    "grant gdq_capture to app",
    "grant gdq_owner to gdq_capture",
    "create role mine",
    "alter function gdq_log.q1_event(text, oid, jsonb) security invoker",
    "grant execute on function gdq_log.q1_event(text, oid, jsonb) to public",
    "drop function gdq_log.q1_event(text, oid, jsonb)",
    "drop owned by gdq_capture",
    "create temp table mine (a int)",
    "copy (select 1) to program 'true'",
    "set session authorization gdq_owner",
)


def test_writers_need_no_right_on_gdq(tap: Tap) -> None:
    tap.write("create table t (id int primary key, v int)")
    tap.add("shop.t")
    with tap.db.connect("su") as su:
        su.execute("create role writer login nosuperuser")
        try:
            su.execute("grant usage on schema shop to writer")
            su.execute("grant select, insert, update, delete, truncate on shop.t to writer")
            su.execute("set role writer")
            su.execute("insert into shop.t values (1, 1)")
            su.execute("update shop.t set v = 2")
            su.execute("delete from shop.t")
            su.execute("truncate shop.t")
        finally:
            su.execute("reset role")
            su.execute("drop owned by writer")
            su.execute("drop role writer")
    assert [e.op for e in tap.events()] == ["insert", "update", "delete", "truncate"]


def test_logs_are_closed_to_everyone_else(tap: Tap) -> None:
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    for role in ("app", "public"):
        tables = tap.owner.execute(
            f"select c.oid::regclass from pg_class c where c.relnamespace in {SCHEMAS} and c.relkind in ('r', 'S')"
            " and (has_table_privilege(%(role)s, c.oid, 'select, insert, update, delete, truncate, trigger')"
            "   or has_any_column_privilege(%(role)s, c.oid, 'select, insert, update'))".encode(),
            {"role": role},
        ).fetchall()
        schema = tap.owner.execute("select has_schema_privilege(%s, 'gdq_log', 'usage, create')", [role]).fetchone()
        # trigger functions cannot be called, and cannot be named without the schema
        functions = tap.owner.execute(
            f"select p.oid::regprocedure from pg_proc p where p.pronamespace in {SCHEMAS}"
            " and has_function_privilege(%s, p.oid, 'execute') and p.prorettype <> 'trigger'::regtype".encode(),
            [role],
        ).fetchall()
        assert (tables, schema, functions) == ([], (False,), [])
    tap.write("create table forged (id int)")
    (oid,) = tap.app.execute("select 'shop.t'::regclass::oid").fetchone() or (0,)
    for statement in (
        "select * from gdq_log.t1_v1_s0",
        "insert into gdq_log.t1_v1_s0 (ev_id) values (1)",
        "select gdq_log.q1_event('truncate', 1, null)",
        "select nextval('gdq_log.q1_ev')",
        f"create trigger x after insert on forged for each row execute function gdq_log.t{oid}_q1_i()",
    ):
        with pytest.raises(errors.InsufficientPrivilege, match="permission denied for schema gdq_log"):
            tap.write(statement)


def test_capture_role_may_insert_into_logs_and_nothing_else(tap: Tap) -> None:
    tap.write("create table t (id int primary key)", "create table p (id int) partition by list (id)")
    tap.add("shop.t")
    tap.add("shop.p")
    owners = tap.owner.execute(
        "select distinct p.proowner::regrole::text, p.prosecdef from pg_proc p"
        # those of messages run no code of the application's, and with the rights of gdq.insert_event()
        " where p.pronamespace = 'gdq_log'::regnamespace and p.proname !~ '^q[0-9]+_messages?$'"
    ).fetchall()
    assert owners == [("gdq_capture", True)]
    role = tap.owner.execute(
        "select rolcanlogin, rolsuper, rolcreaterole, rolcreatedb, rolreplication, rolbypassrls,"
        " (select count(*) from pg_auth_members m where m.member = r.oid) from pg_roles r where rolname = 'gdq_capture'"
    ).fetchone()
    assert role == (False, False, False, False, False, False, 0)
    rights: Any = tap.owner.execute(
        "select (aclexplode(c.relacl)).*, c.relkind from pg_class c where c.relacl is not null"
    ).fetchall()
    capture: Any = tap.owner.execute("select 'gdq_capture'::regrole::oid").fetchone()
    assert {(row[4], row[2]) for row in rights if row[1] == capture[0]} == {("r", "INSERT"), ("S", "USAGE")}
    for schema in ("gdq", "gdq_log", "shop", "public"):
        assert tap.owner.execute("select has_schema_privilege('gdq_capture', %s, 'create')", [schema]).fetchone() == (
            False,
        )
    assert tap.owner.execute(
        "select has_database_privilege('gdq_capture', current_database(), 'create')"
    ).fetchone() == (False,)


def test_assignment_cast_inside_a_capture_function_gains_nothing(tap: Tap) -> None:
    """ALTER ... USING a function that writes to the same table: the capture function of the old type still stands, and
    the owner's assignment cast runs inside it."""
    with tap.db.connect("su") as su:
        su.execute("create schema hidden authorization gdq_owner")
        su.execute("create table hidden.secret (a int)")
        su.execute("alter table hidden.secret owner to gdq_owner")
    attempts = "; ".join(
        f"begin execute $a${attempt}$a$; insert into shop.loot values (current_user, $a${attempt}$a$, null);"
        f" exception when others then insert into shop.loot values (current_user, $a${attempt}$a$, sqlstate); end"
        for attempt in ATTEMPTS
    )
    tap.write(
        "grant usage on schema shop to public",
        "create table loot (who text, attempt text, code text)",
        "grant insert on loot to public",
        "create table t (id int, a int)",
        "create type evil as (x int)",
        f"create function evil_cast(evil) returns int language plpgsql as $f$ begin {attempts}; return 1; end $f$",
        "create cast (evil as int) with function evil_cast(evil) as assignment",
        "create function convert_a(int) returns evil language plpgsql as"
        " $f$ begin insert into shop.t values (99, row(1)::evil); return row($1)::evil; end $f$",
        "insert into t values (1, 1)",
    )
    tap.add("shop.t")
    tap.write("alter table t alter a type evil using convert_a(a)")
    loot = tap.app.execute("select who, attempt, code from loot").fetchall()
    assert loot == [("gdq_capture", attempt, "42501") for attempt in ATTEMPTS]
    assert tap.owner.execute("select count(*) from gdq.queue").fetchone() == (1,)


@pytest.mark.parametrize("mode", ["full", "pk"])
def test_hostile_search_path_cannot_hijack(tap: Tap, mode: str) -> None:
    """Functions, operators, types and temporary tables of the writer's that shadow all names that capture uses."""
    tap.write(
        "create type mood as enum ('sad', 'happy')",
        "create table r (id int, k numeric, m mood, v text, primary key (id, k)) partition by list (id)",
        "create table r1 partition of r default",
    )
    tap.add("shop.r", mode=mode, **({"include": ["m", "v"]} if mode == "pk" else {}))
    tap.write(
        "create table trace (what text)", "grant insert on trace to public", "grant usage on schema shop to public"
    )
    with tap.db.connect("su") as su:
        su.execute("create schema evil authorization app")
        su.execute("grant usage on schema evil to public")
    body = "begin insert into shop.trace values ('{0}'); {1} end"
    functions = {
        "nextval(regclass) returns bigint": "return 1;",
        "txid_current() returns bigint": "return 1;",
        "clock_timestamp() returns timestamptz": "return null;",
        "num_nulls(variadic pg_catalog.text[]) returns int": "return 0;",
        "format(pg_catalog.text, pg_catalog.text) returns pg_catalog.text": "return '';",
        "current_setting(pg_catalog.text, boolean) returns pg_catalog.text": "return '';",
        "set_config(pg_catalog.text, pg_catalog.text, boolean) returns pg_catalog.text": "return '';",
        "pg_partition_ancestors(regclass) returns setof regclass": "return;",
        "same(pg_catalog.int4, pg_catalog.int4) returns boolean": "return true;",
        "same(pg_catalog.oid, pg_catalog.oid) returns boolean": "return true;",
        "same(pg_catalog.text, pg_catalog.text) returns boolean": "return true;",
        "checked(pg_catalog.text) returns boolean": "return true;",
    }
    with tap.db.connect("app") as writer:
        writer.execute("set search_path = evil, pg_catalog")
        for signature, result in functions.items():
            text = body.format(signature.partition("(")[0], result)
            writer.execute(f"create function evil.{signature} language plpgsql as $f$ {text} $f$".encode())
        for type_ in ("int4", "oid", "text"):
            for operator in ("=", "<>", ">"):
                writer.execute(
                    f"create operator evil.{operator} (leftarg = pg_catalog.{type_}, rightarg = pg_catalog.{type_},"
                    " function = evil.same)".encode()
                )
        for type_ in ("text", "oid", "regclass", "jsonb", "int8"):
            writer.execute(f"create domain evil.{type_} as pg_catalog.{type_} check (evil.checked('{type_}'))".encode())
        writer.execute("create temp table pg_class (oid int)")
        writer.execute("create temp table t1_v1_s0 (ev_id int)")
        writer.execute("set search_path = pg_temp, evil, pg_catalog")
        for statement in (
            "insert into shop.r values (1, 1.0, 'sad', 'x')",
            "update shop.r set v = 'y'",
            "update shop.r set k = 1.00",
            "delete from shop.r",
            "truncate shop.r, shop.r1",
        ):
            writer.execute(statement)
    expected = ["insert", "update", "update", "delete", "truncate"]
    if mode == "pk":
        expected[2:3] = ["delete", "insert"]
    assert [e.op for e in tap.events()] == expected
    assert tap.app.execute("select distinct what from trace").fetchall() == []


def test_types_in_a_closed_schema_do_not_break_writes(tap: Tap) -> None:
    with tap.db.connect("su") as su:
        su.execute("create schema closed authorization app")
    tap.write(
        "create type closed.mood as enum ('sad', 'happy')",
        "create domain closed.feeling as closed.mood",
        "create type closed.pair as (a int, m closed.mood)",
        "create type closed.span as range (subtype = int)",
        "create table closed.t (id int primary key, m closed.mood, f closed.feeling, p closed.pair, s closed.span)",
        "grant usage on schema closed to gdq_owner",
    )
    tap.add("closed.t")
    tap.write("revoke usage on schema closed from gdq_owner")
    with tap.db.connect("app") as writer:
        pin(writer, HOSTILE)
        writer.execute("insert into closed.t values (1, 'sad', 'happy', '(1,sad)', '[1,2)')")
        writer.execute("update closed.t set m = null")
        writer.execute("truncate closed.t")
    row = {"id": 1, "m": "sad", "f": "happy", "p": "(1,sad)", "s": "[1,2)"}
    assert tap.images() == [
        ("insert", {"id": 1}, None, row),
        ("update", {"id": 1}, row, row | {"m": None}),
        ("truncate", None, None, None),
    ]


@pytest.mark.parametrize("extension", ["citext", "hstore"])
def test_extension_in_a_closed_schema_does_not_break_writes(tap: Tap, extension: str) -> None:
    if not tap.app.execute("select from pg_available_extensions where name = %s", [extension]).rowcount:
        pytest.skip(f"this PostgreSQL comes without {extension}")
    value = {"citext": "Ab", "hstore": '"a"=>"b"'}[extension]
    with tap.db.connect("su") as su:
        su.execute(f"drop extension {extension}".encode())
        su.execute("create schema ext")
        su.execute("grant usage on schema ext to app")
        su.execute(f"create extension {extension} schema ext".encode())
        su.execute("revoke execute on all functions in schema ext from public")
        su.execute("grant execute on all functions in schema ext to app")
    tap.write(f"create table t (id int primary key, x ext.{extension}, xs ext.{extension}[])")
    tap.add("shop.t")
    tap.write(f"insert into t values (1, '{value}', array['{value}'::ext.{extension}])", "update t set x = null")
    assert [e.new["x"] for e in tap.events() if e.new] == [value, None]
