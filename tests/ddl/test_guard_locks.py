"""DDL and writes never fail by the guard: locks that others hold, settings of the session, many changes at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.support.events import Tap, drain
from tests.support.guarded import maintain, state
from tests.support.waiting import SECONDS, until

T = "create table t (id int primary key, a int, b text)"


def inserted(tap: Tap) -> list[Any]:
    return [row[7] for row in drain(tap.db) if row[3] == "insert"]


@contextmanager
def background(body: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run `body` in a thread; it must end without an error."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(SECONDS)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def wait_for_functions(tap: Tap, connection: psycopg.Connection[Any], thread: threading.Thread) -> None:
    """Wait until a guard has given up the capture lock and waits for the functions: their rows, or a lock on them.

    The guard waits for 10 seconds: a busy machine may look too late, when the DDL in `thread` has ended.
    """
    query = "select from pg_stat_activity where pid = %s and wait_event in ('transactionid', 'object')"
    with tap.db.connect("su") as su:
        until(lambda: not thread.is_alive() or su.execute(query, [connection.info.backend_pid]).rowcount)


@pytest.fixture
def t(tap: Tap) -> Tap:
    """`tap` with the captured table t."""
    tap.write(T)
    tap.add("shop.t")
    return tap


@pytest.mark.parametrize("statement_timeout", ["0", "400 ms", "20 s"])
def test_ddl_gives_up_a_capture_lock_that_another_holds(t: Tap, statement_timeout: str) -> None:
    with t.db.connect() as other, other.transaction():
        other.execute("select pg_advisory_xact_lock(gdq.lock_key('capture', 'shop.t'::regclass))")
        t.write(f"set statement_timeout = '{statement_timeout}'", "alter table t rename a to c")
        t.write("insert into t (id, c) values (1, 1)")
        assert state(t)[0] == "resync"
        maintain(t)
        t.write("insert into t (id, c) values (2, 1)")
        assert state(t)[0] == "resync"
    maintain(t)
    t.write("insert into t (id, c) values (3, 1)")
    assert inserted(t) == [{"id": 3, "c": 1, "b": None}]
    assert state(t) == ("ok", None)


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_ddl_while_a_rotation_is_open(t: Tap, isolation: str, end: str) -> None:
    """The rotation has replaced the functions already; the DDL outlasts it and replaces them again."""
    with t.db.connect() as rotation, t.db.connect("app") as app:
        rotation.execute("begin")
        rotation.execute("select pg_advisory_xact_lock(gdq.lock_key('capture', 'shop.t'::regclass))")
        rotation.execute("select gdq.arm(version, 1) from gdq.table_info()")
        app.execute(f"set default_transaction_isolation = '{isolation}'".encode())
        with background(lambda: app.execute("alter table t rename a to c")) as thread:
            wait_for_functions(t, app, thread)
            rotation.execute(end.encode())
    t.write("insert into t (id, c) values (1, 1)")
    assert state(t)[0] == "resync"
    maintain(t)
    t.write("insert into t (id, c) values (2, 1)")
    assert inserted(t) == [{"id": 2, "c": 1, "b": None}]


def test_rotation_gives_way_to_open_ddl(t: Tap) -> None:
    t.owner.execute("update gdq.queue set rotation_period = '1 us'")
    t.owner.execute("set lock_timeout = '10 min'")
    for isolation in ("read committed", "repeatable read"):
        with t.db.connect("app") as app, app.transaction():
            app.execute(f"set transaction isolation level {isolation}".encode())
            app.execute("insert into t values (1, 1)")
            app.execute("alter table t rename a to c")
            maintain(t)
            app.execute("alter table t rename c to a")
            app.execute("delete from t")
        maintain(t)
    assert state(t)[0] == "resync"
    assert [row[3] for row in drain(t.db)] == ["insert", "ddl", "ddl", "delete", "insert", "resync", "resync"]


def test_maintenance_does_not_wait_for_open_ddl(t: Tap) -> None:
    t.write("create table u (id int)", "insert into t values (1)")
    t.add("shop.u")
    t.owner.execute("set statement_timeout = '10 min'")
    with t.db.connect("app") as app, app.transaction():
        app.execute("alter table t add c int")
        app.execute("lock table u in access exclusive mode")
        maintain(t)
        t.owner.execute("select gdq.ticker()")
        t.owner.execute("select gdq.force_tick('q')")
        assert t.owner.execute("select from gdq.table_info(), gdq.queue_info(), gdq.consumer_info()").rowcount == 2


def test_rearming_leaves_a_busy_table_alone(t: Tap) -> None:
    t.write("alter table t disable trigger user")
    with t.db.connect("app") as writer:
        with writer.transaction():
            writer.execute("insert into t values (1)")
            maintain(t)
            assert state(t)[0] == "resync"
            t.write("insert into t values (2)")
        maintain(t)
    t.write("insert into t values (3)")
    assert inserted(t) == [{"id": 3, "a": None, "b": None}]


def test_old_snapshots_that_create_partitions_at_once(tap: Tap) -> None:
    """Both want to record it of the root; neither waits for the other's transaction."""
    tap.write(
        "create table t (id int) partition by list (id)",
        *(f"create table t{i} partition of t for values in ({i}) partition by list (id)" for i in (1, 2)),
    )
    tap.add("shop.t")
    with tap.db.connect("app") as one, tap.db.connect("app") as two:
        two.execute("set default_transaction_isolation = 'repeatable read'")
        two.execute("set statement_timeout = '10 min'")
        with one.transaction():
            one.execute("set transaction isolation level repeatable read")
            one.execute("create table t1x partition of t1 default")
            two.execute("create table t2x partition of t2 default")
    assert state(tap)[0] == "resync"
    maintain(tap)
    tap.write("insert into t values (1), (2)", "truncate t1x", "truncate t2x")
    assert [row[3] for row in drain(tap.db) if row[3] != "resync"] == ["insert", "insert", "truncate", "truncate"]


SETTINGS = (
    "default_tablespace = away",
    "search_path = evil, pg_catalog, shop",
    "search_path = ''",
    "quote_all_identifiers = on",
    "standard_conforming_strings = off",
    "check_function_bodies = on",
    "plpgsql.extra_errors = 'all'",
    "plpgsql.variable_conflict = use_column",
    "row_security = off",
    "lock_timeout = '1 ms'",
    "client_min_messages = debug1",
    "default_toast_compression = pglz",
    "transform_null_equals = on",
    "enable_seqscan = off",
    "max_parallel_workers_per_gather = 0",
    "datestyle = 'SQL, DMY'",
    "intervalstyle = 'sql_standard'",
    "extra_float_digits = -15",
    "timezone = 'Asia/Kathmandu'",
    "bytea_output = escape",
    "jit_above_cost = 0",
    "work_mem = '64kB'",
    "synchronous_commit = off",
    "role = app",
)


@pytest.mark.long
def test_settings_of_the_session_of_the_ddl(t: Tap) -> None:
    with t.db.connect("su") as su:
        su.execute("set allow_in_place_tablespaces = on")
        su.execute("create tablespace away location ''")
        su.execute("create schema evil")
        for name, args in (
            ("format", "text, text"),
            ("to_regprocedure", "text"),
            ("txid_current", ""),
            ("nextval", "regclass"),
        ):
            su.execute(
                f"create function evil.{name}({args}) returns text language plpgsql as "
                "$$ begin raise exception 'evil'; end $$".encode()
            )
        su.execute(
            "create function evil.no(text, text) returns boolean language plpgsql as "
            "$$ begin raise exception 'evil'; end $$"
        )
        su.execute("create operator evil.= (leftarg = text, rightarg = text, function = evil.no)")
        su.execute("grant usage on schema evil to public")
    try:
        t.owner.execute("select gdq.force_tick('q')")
        number = 0
        for setting in SETTINGS:
            with t.db.connect("su" if "variable_conflict" in setting else "app") as app:
                app.execute(f"set {setting}".encode())
                for ddl in (
                    "alter table shop.t add c int",
                    "alter table shop.t rename c to d",
                    "alter table shop.t drop d",
                ):
                    number += 1
                    app.execute(ddl.encode())
                    app.execute(f"insert into shop.t (id) values ({number})".encode())
            assert state(t) == ("ok", None), setting
        assert len(inserted(t)) == number == 3 * len(SETTINGS)
        maintain(t)
        assert not t.owner.execute(
            "select relname from pg_class where relnamespace = 'gdq_log'::regnamespace and reltablespace <> 0"
        ).fetchall()
    finally:
        with t.db.connect("su") as su:
            su.execute("drop schema evil cascade")
            su.execute("drop tablespace away")


def test_identifiers_that_are_quoted_are_no_new_columns(t: Tap) -> None:
    t.write("create type mood as enum ('x')", "create table m (id int, m mood, p point)")
    t.add("shop.m")
    t.write("set quote_all_identifiers = on", "alter table m add check (id > 0)", "create index on m (id)")
    assert [row[3] for row in drain(t.db)] == []


@pytest.mark.parametrize(
    "isolation", [pytest.param("read committed", marks=pytest.mark.long), "repeatable read", "serializable"]
)
def test_many_changes_in_one_transaction_do_not_fill_the_lock_table(t: Tap, isolation: str) -> None:
    with t.db.connect("su") as su:
        found = su.execute("select count(*), current_setting('max_connections')::int * 64 from pg_locks").fetchone()
        assert found
        with t.db.connect("app") as app:
            with app.transaction():
                app.execute(f"set transaction isolation level {isolation}".encode())
                for number in range(250):
                    app.execute(f"alter table t add c{number} int".encode())
                    app.execute(f"alter table t drop c{number}".encode())
                app.execute("insert into t values (1)")
                held = su.execute("select count(*) from pg_locks").fetchone()
                assert held
                assert held[0] < found[1] / 3
            app.execute("insert into t values (2)")
    off = state(t)[0] == "resync"
    maintain(t)
    t.write("insert into t values (3)")
    assert [row["id"] for row in inserted(t)] == ([3] if off else [1, 2, 3])
    assert off or isolation == "read committed"
    assert state(t) == ("ok", None)


@pytest.mark.long
def test_many_tables_in_one_transaction(tap: Tap) -> None:
    tables = [f"t{i}" for i in range(60)]
    tap.write(*(f"create table {name} (id int)" for name in tables))
    for name in tables:
        tap.add(f"shop.{name}")
    with tap.app.transaction():
        tap.write(
            *(f"alter table {name} add c int" for name in tables),
            *(f"insert into {name} values (1, 2)" for name in tables),
        )
    assert maintain(tap) > 2  # a few at a time
    assert inserted(tap) == [{"id": 1, "c": 2}] * 60
    segments = tap.owner.execute(
        "select count(distinct slot) from gdq.log_segment group by version_id having version_id > 60"
    ).fetchall()
    assert segments == [(3,)] * 60


def test_capturing_many_tables_looks_at_each_alone(tap: Tap) -> None:
    tables = [f"shop.m{i}" for i in range(25)]
    tap.write(*(f"create table {name} (id int primary key)" for name in tables))
    with tap.db.connect("su") as su:
        su.execute("set track_functions = 'all'")
        with su.transaction():
            for name in tables:
                su.execute("select gdq.add_table('q', %s::regclass)", [name])
        su.execute("select pg_stat_force_next_flush()")
        su.execute("select")  # whose end writes the counters
        counted = "select funcname, calls from pg_stat_user_functions where funcname in ('guard_table', 'add_table')"
        calls = dict(su.execute(counted).fetchall())
    assert calls["add_table"] == 25
    assert calls.get("guard_table", 0) <= 25 * 6


@pytest.mark.parametrize("event", ["ddl_command_end", "sql_drop"])
def test_event_triggers_of_the_application_that_write_to_the_table(t: Tap, event: str) -> None:
    """They fire after gdq's, by their names; on ddl_command_end also for what the guard itself creates."""
    t.write(
        "create function audit() returns event_trigger language plpgsql security definer as "
        "$$ begin insert into shop.t (id) select coalesce(max(id), 0) + 1 from shop.t; end $$"
    )
    with t.db.connect("su") as su:
        su.execute(f"create event trigger a_audit on {event} execute function shop.audit()".encode())
    t.write("insert into t values (1, 1, 'x')", "alter table t drop a", "alter table t drop b")
    if event == "sql_drop":
        assert inserted(t) == [{"id": 1, "a": 1, "b": "x"}, {"id": 2, "b": None}, {"id": 3}]
    else:
        assert state(t)[0] == "resync"


def test_serializable_ddl_of_two_sessions(tap: Tap) -> None:
    """The guard reads nothing that the other's guard writes: PostgreSQL would fail one of them."""
    tap.write(
        "create table t (id int)", "create table u (id int)", "create type k as enum ('x')", "alter table t add v k"
    )
    tap.add("shop.t")
    tap.add("shop.u")
    with tap.db.connect("app") as one, tap.db.connect("app") as two:
        for app in (one, two):
            app.execute("begin isolation level serializable")
            app.execute("select 1")
        for app, name in ((one, "t"), (two, "u")):
            app.execute(f"alter table {name} add c float default random()".encode())
            app.execute(f"insert into {name} values (1)".encode())
            app.execute(f"alter table {name} alter c type numeric".encode())
        for app in (one, two):
            app.execute("commit")
    assert state(tap, "shop.t")[0] == state(tap, "shop.u")[0] == "resync"


def test_ddl_of_tables_that_are_not_captured_writes_nothing(t: Tap) -> None:
    with t.app.transaction():
        t.write(
            "create temp table x (id int)",
            "create index on x (id)",
            "create table u (id int)",
            "alter table u add c int",
            "create view v as select * from u",
            "grant select on u to public",
            "comment on table u is 'u'",
            "drop view v",
        )
        held = t.app.execute(
            "select count(*) from pg_locks l join pg_class c on c.oid = l.relation "
            "join pg_namespace n on n.oid = c.relnamespace "
            "where l.pid = pg_backend_pid() and n.nspname in ('gdq', 'gdq_log') and l.mode <> 'AccessShareLock'"
        ).fetchone()
        assert held == (0,)
