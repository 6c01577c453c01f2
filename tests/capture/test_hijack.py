"""Code of an application or of a table's owner must never run with the rights of gdq."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors

from tests.support.capture_grammar import NotStaticError, check_capture
from tests.support.events import Tap
from tests.support.literals import hazardous_literals
from tests.support.server import Database
from tests.support.traps import set_traps

OURS = "('gdq'::regnamespace, 'gdq_log'::regnamespace)"

# These run for every write or every DDL, where a SET costs too much: their bodies name no object without its schema.
WITHOUT_PATH = re.compile(
    r"gdq_log\.t\d+_q\d+_[a-z_]+|gdq_log\.q\d+_messages?|gdq\.ddl_guard|gdq\.apply_ddl|gdq\.refresh(?:_group)?|gdq\.insert_events?"
)

# With the rights of the caller: they look at who that is, or make what takes the caller's own rights.
INVOKER = {
    "gdq.apply_ddl",
    "gdq.create_event_triggers",
    "gdq.capture_role_guard",
    "gdq.grant_roles",
    "gdq.pin_settings",
    # procedures that commit, which may have no other rights; the functions that they call check whose view it is
    "gdq.refresh",
    "gdq.refresh_group",
    "gdq.refresh_compiled",
    "gdq.target_position",
    "gdq.refuse_foreign",
    "gdq.target_locks",
    "gdq.hold_target",
    "gdq.why_load",
}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("id int primary key, v text, n numeric(10,2), t timestamptz, j jsonb, b bytea, a int[]", {}),
    "user types": ("id int primary key, m mood, p pair, ms mood[], ps pair[], s span, d feeling, q positive", {}),
    "keys": ("a int, b text, v text, w int, primary key (a, b)", {"mode": "pk", "include": ["v"]}),
    "user key": ("m mood primary key, v text", {"mode": "pk"}),
    "parted": ("id int, v text, primary key (id)) partition by range (id", {}),
    "no key": ("v text, w text", {}),
    "some columns": ('id int primary key, "a b" text, "select" int, "x""y" text, secret text', {"exclude": ["secret"]}),
    "names": ('"begin" int primary key, "if" int, "end" text, "o\'; drop table t; --" text, "%s %I $$" text', {}),
    "filtered": ("id int primary key, v text, m mood", {"where": "v = 'x' and (id > 3 or id is null)"}),
    "statement": ("id int primary key, v text, m mood", {"granularity": "statement"}),
    "json": ("id int primary key, v text, m mood, p pair", {"format": "json"}),
    "origin": ("id int primary key, v text", {"origin": True, "pin_search_path": True}),
    "wide": (", ".join(f"c{i} text" for i in range(250)), {}),
    "once": ('id int primary key, v text, "s p" jsonb, p pair, f feeling', {"unchanged": "once"}),
    "omit": ('"the id" int primary key, v text, "s p" jsonb, p pair, f feeling', {"unchanged": "omit"}),
    "one column": ("id bigint primary key", {"mode": "pk"}),
}


def make_shapes(tap: Tap) -> None:
    tap.write(
        "create type mood as enum ('sad', 'happy')",
        "create type pair as (a int, m mood)",
        "create type span as range (subtype = int)",
        "create domain feeling as mood",
        "create domain positive as int check (value > 0)",
        "grant usage on schema shop to public",
    )
    for number, (name, (columns, options)) in enumerate(SHAPES.items()):
        tap.write(f"create table s{number} ({columns})")
        if name == "parted":
            tap.write(f"create table s{number}_1 partition of s{number} default")
        tap.add(f"shop.s{number}", **options)


def test_every_capture_function_is_a_static_insert(tap: Tap) -> None:
    make_shapes(tap)
    query = r"""select proname, prosrc from pg_proc
                 where pronamespace = 'gdq_log'::regnamespace and proname ~ '^t\d+_q\d+_[iud]'"""

    def inserts() -> dict[int, int]:
        counts: dict[int, int] = {}
        for name, body in tap.owner.execute(query.encode()).fetchall():
            try:
                number = check_capture(body)
            except NotStaticError as error:
                raise AssertionError(f"{name}: {error}\n{body}") from error
            counts[number] = counts.get(number, 0) + 1
        return counts

    # an UPDATE is one INSERT of three where a filter applies, and two of granularity statement
    whole = {1: 3 * len(SHAPES) - 2, 2: 1, 3: 1}
    assert inserts() == whole
    # after the functions were written anew: by rotation, by DDL, by a disarm
    tap.write("insert into s0 (id) values (1)", "alter table s1 add extra mood", "alter table s2 drop w")
    tap.owner.execute("update gdq.queue set rotation_period = '0.000001 s'")
    for _ in range(5):
        tap.owner.execute("select gdq.maintain()")
    assert inserts() == whole
    # a quiet log: another INSERT announces each change
    tap.owner.execute("select gdq.set_activity(table_id, 'cooling') from gdq.captured_table")
    assert inserts() == {number + 1: count for number, count in whole.items()}
    tap.owner.execute("select gdq.set_activity(table_id, 'busy') from gdq.captured_table")
    tap.owner.execute("select gdq.disarm(1, 'shop.s3'::regclass)")
    assert inserts() == whole | {1: whole[1] - 3, 0: 3}


@pytest.mark.parametrize(
    "body",
    [
        "begin execute 'select 1'; return null; end",
        "begin insert into gdq_log.t1 (ev_id) values (nextval('x')); return null; end",
        "begin insert into public.t1 (ev_id) values (1); return null; end",
        'begin insert into gdq_log.t1 (ev_id) values (NEW."a"::shop.mood); return null; end',
        'begin if OLD."a" <> NEW."a" then return null; end if; return null; end',
        "begin perform shop.f(1); return null; end",
        "begin perform gdq.arm(1, 1); return null; end",
        "begin update gdq.queue set x = 1; return null; end",
        "begin delete from gdq_log.t1; return null; end",
        "declare x shop.mood; begin return null; end",
        "begin insert into gdq_log.t1 (ev_id) select a from shop.t; return null; end",
    ],
)
def test_the_grammar_refuses(body: str) -> None:
    with pytest.raises(NotStaticError):
        check_capture(body)


def test_the_search_path_of_every_function(tap: Tap) -> None:
    make_shapes(tap)
    rows = tap.owner.execute(
        f"select split_part(p.oid::regprocedure::text, '(', 1), p.prosecdef, p.proconfig from pg_proc p"
        f" where p.pronamespace in {OURS}".encode()
    ).fetchall()
    for name, definer, settings in rows:
        if not definer:
            assert name in INVOKER or re.fullmatch(r"gdq_log\.q\d+_messages?", name), name
        if "search_path=pg_catalog, pg_temp" not in (settings or []):
            assert not any(setting.startswith("search_path") for setting in settings or []), name
            assert WITHOUT_PATH.fullmatch(name), name


def test_nobody_else_may_create_in_our_schemas(db: Database) -> None:
    with db.connect() as owner:
        rows = owner.execute(
            f"select r.rolname from pg_roles r, pg_namespace n where n.oid in {OURS} and not r.rolsuper"
            " and not pg_has_role(r.oid, n.nspowner, 'usage')"
            " and has_schema_privilege(r.oid, n.oid, 'create')".encode()
        ).fetchall()
    assert rows == []


@contextmanager
def hostile(tap: Tap, role: Any) -> Iterator[psycopg.Connection[Any]]:
    """A session in which every name that could be looked up elsewhere is looked up in the traps first."""
    with tap.db.connect(role) as connection:
        names = connection.execute(
            f"select distinct relname from pg_class where relkind in ('r', 'v', 'S') and (relnamespace in {OURS}"
            " or relname in ('pg_class', 'pg_proc', 'pg_attribute', 'pg_trigger', 'pg_roles', 'pg_namespace'))".encode()
        ).fetchall()
        for (name,) in names:
            connection.execute(f'create temp table "{name}" (x int)'.encode())
        connection.execute("set search_path = evil, pg_temp, pg_catalog")
        yield connection


def test_traps_in_the_search_path_do_not_spring(tap: Tap) -> None:
    """Functions, operators and temporary tables of a hostile role, before pg_catalog in everybody's path."""
    make_shapes(tap)
    set_traps(tap.db)
    with tap.db.connect("su") as su:
        su.execute("grant gdq_admin to app")
    try:
        with hostile(tap, "app") as app:
            app.execute("insert into shop.s0 (id, v) values (1, 'a')")
            app.execute("insert into shop.s1 (id, m, p) values (1, 'sad', '(1,sad)')")
            app.execute("update shop.s0 set v = 'b'")
            app.execute("insert into shop.s4 values (1, 'x')")
            app.execute("truncate shop.s4")
            app.execute("alter table shop.s0 add extra pg_catalog.int4")
            app.execute("delete from shop.s0")
            app.execute("alter type shop.mood rename value 'sad' to 'glum'")
            app.execute("create table shop.s4_2 partition of shop.s4 for values from (5) to (6)")
            app.execute("select gdq.create_queue('q2')")
            app.execute("create table shop.late (id pg_catalog.int4 primary key)")
            app.execute("select gdq.add_table('q2', 'shop.late')")
            app.execute("insert into shop.late values (1)")
            app.execute("select gdq.register_consumer('q2', 'h')")
            for queue, consumer in (("q", "c"), ("q2", "h")):
                app.execute("select gdq.force_tick(%s)", [queue])
                found = app.execute("select batch_id, token from gdq.next_batch(%s, %s)", [queue, consumer]).fetchone()
                if found:
                    app.execute("select count(*) from gdq.get_batch(%s, %s)", found)
                    app.execute("select gdq.finish_batch(%s, %s)", found)
            for call in ("queue_info()", "table_info()", "consumer_info()", "view_info()", "maintain()", "ticker()"):
                app.execute(f"select * from gdq.{call}".encode())
            app.execute("select gdq.drop_queue('q2', true)")
    finally:
        with tap.db.connect("su") as su:
            su.execute("revoke gdq_admin from app")
    sprung = tap.app.execute("select distinct who, what from evil.trace where who <> 'app'").fetchall()
    assert sprung == []


def test_traps_do_spring(tap: Tap) -> None:
    """The test above can fail: a function without a search_path of its own falls into them."""
    set_traps(tap.db)
    tap.owner.execute("grant usage on schema gdq to app; grant execute on function gdq.find_queue to app")
    with hostile(tap, "app") as app:
        assert app.execute("select gdq.find_queue('q')").fetchone() == (1,)
    tap.owner.execute("alter function gdq.find_queue(text) reset search_path")
    with hostile(tap, "app") as app, pytest.raises(errors.UndefinedObject):
        app.execute("select gdq.find_queue('q')")


def test_maintenance_by_a_superuser_lends_nobody_its_consumers(tap: Tap) -> None:
    """ANALYZE, REINDEX and REFRESH run code of a table's owner in the session of whoever does that."""
    with tap.db.connect("su") as su:
        su.execute("grant gdq_consumer to app")
        try:
            attempt = "perform gdq.next_batch('q', 'c'); insert into shop.loot values (session_user, 'taken')"
            tap.write(
                "create table bait (id int)",
                "insert into bait values (1), (2)",
                "create table loot (who name, what text)",
                f"create function try() returns void language plpgsql as $f$ begin {attempt};"
                " exception when others then insert into shop.loot values (session_user, sqlerrm); end $f$",
                "create function steal(int) returns int immutable language plpgsql as"
                " $f$ begin perform shop.try(); return $1; end $f$",
                "create materialized view stolen as select steal(id) from bait",
                "create index on bait (steal(id))",
                "truncate loot",
            )
            tap.owner.execute("select gdq.force_tick('q')")
            for command in ("analyze shop.bait", "reindex table shop.bait", "refresh materialized view shop.stolen"):
                su.execute("truncate shop.loot")
                su.execute(command.encode())
                loot = su.execute("select distinct who, what from shop.loot").fetchall()
                refusal = "gdq cannot tell for whom this runs: maintenance of a table runs code of its owner"
                assert loot == [("postgres", refusal)], command
            # the owner's own consumer is the owner's, called as usual
            tap.write("truncate loot")
            tap.app.execute("select steal(1)")
            assert tap.app.execute("select who, what from loot").fetchall() == [
                ("app", 'consumer "c" of queue "q" belongs to role gdq_owner')
            ]
        finally:
            su.execute("revoke gdq_consumer from app")


@pytest.mark.long
def test_no_text_follows_standard_conforming_strings(tap: Tap) -> None:
    """Neither that of functions, generated ones too, nor the SQL in Python's strings."""
    make_shapes(tap)
    rows = tap.owner.execute(
        "select p.proname, p.prosrc from pg_proc p"
        " where p.pronamespace in ('gdq'::regnamespace, 'gdq_log'::regnamespace)"
    ).fetchall()
    found = [(name, literal) for name, text in rows for _, literal in hazardous_literals(text)]
    sql_text = re.compile(r"\s*(?i:select|insert|update|delete|create|alter|drop|with|set|do|lock|grant)\b")
    for path in [*Path("gdq").rglob("*.py"), *Path("consumers").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and sql_text.match(node.value):
                found += [(str(path), literal) for _, literal in hazardous_literals(node.value)]
    assert found == []
