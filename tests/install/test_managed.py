"""Hosted PostgreSQL, where nobody is superuser: all of gdq as the service's admin role, by the command."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.managed import ADMIN, ManagedDatabase, superuser_for_a_moment
from tests.support.programs import gdq

pytestmark = pytest.mark.server


def run(db: ManagedDatabase, *arguments: str, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
    done = gdq(*arguments, dsn=db.dsn, stdin=stdin)
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    return done


def open_shop(db: ManagedDatabase) -> None:
    """A captured table `t` with a consumer, as the page has it."""
    db.run("create table t (id int primary key, a int)")
    run(db, "create-queue", "shop")
    run(db, "add-table", "shop", "public.t")
    run(db, "register-consumer", "shop", "c")


def consumed(db: ManagedDatabase, *, code: int = 0) -> list[tuple[str, object]]:
    """(op, new) of what the consumer reads; a ddl event has its tag and its new columns."""
    lines = map(json.loads, run(db, "consume", "shop", "c", "--once", code=code).stdout.splitlines())
    return [(e["op"], [c["name"] for c in e["new"]["new_columns"]] if e["op"] == "ddl" else e["new"]) for e in lines]


def findings(db: ManagedDatabase) -> list[tuple[str, str]]:
    """Code and cure of each finding of gdq doctor on which something is to be done."""
    lines = json.loads(gdq("doctor", "--json", dsn=db.dsn).stdout)
    return [(f["code"], f["cure"]) for f in lines if f["severity"] != "note"]


@pytest.mark.long
def test_admin_without_event_triggers(managed_db: ManagedDatabase) -> None:
    db = managed_db
    warned, cost, done = run(db, "install").stderr.splitlines()
    assert f"the event triggers that follow DDL are missing: {ADMIN} may not make them" in warned
    assert "Run DDL of captured tables with gdq apply-ddl, or" in warned
    assert cost.startswith("format of captured tables: json, as no event triggers follow DDL: capture takes 1.3 to 1.4")
    assert done.startswith("installed ")
    open_shop(db)
    assert findings(db) == []
    db.run("insert into t values (1, 1)")
    applied = run(db, "apply-ddl", "shop", "-f", "-", stdin="alter table t add b text; alter table t drop a")
    assert applied.stderr == "applied: 1 captured table(s) with new columns\n"
    db.run("insert into t values (2, 'x')")
    assert consumed(db) == [
        ("insert", {"id": 1, "a": 1}),
        ("ddl", ["id", "b"]),
        ("insert", {"id": 2, "b": "x"}),
    ]
    assert run(db, "create-event-triggers", code=1).stderr.count("\n") <= 2
    assert run(db, "install").stderr.splitlines()[-1].startswith("already at ")
    run(db, "uninstall", "--yes")
    assert db.run("table t") == [(1, None), (2, "x")]


@pytest.mark.long
def test_doctor_names_the_cure_of_ddl_that_passed_by(managed_db: ManagedDatabase) -> None:
    db = managed_db
    run(db, "install")
    open_shop(db)
    db.run("insert into t values (1, 1)", "alter table t add b text", "insert into t values (2, 2, 'x')")
    (unseen,) = findings(db)
    assert unseen[0] == "columns_changed"
    cure = "Run DDL with gdq apply-ddl: without event triggers gdq follows no other."
    assert unseen[1].endswith(cure)
    run(db, "tick", "shop")
    ((code, off),) = findings(db)
    assert (code, off.endswith(cure)) == ("capture_off", True)
    run(db, "ticker", "--once")
    ((code, missed),) = findings(db)
    assert (code, missed.endswith(cure)) == ("resync", True)
    assert run(db, "consume", "shop", "c", "--once", code=3).stderr


@pytest.mark.long
def test_admin_who_may_make_event_triggers(managed_db: ManagedDatabase) -> None:
    db = managed_db
    run(db, "install")
    with superuser_for_a_moment(db):
        assert run(db, "create-event-triggers").stderr == "created event triggers\n"
    assert "typed, as the event triggers follow DDL" in run(db, "install").stderr
    open_shop(db)
    db.run("insert into t values (1, 1)", "alter table t add b text", "insert into t values (2, 2, 'x')")
    assert consumed(db) == [
        ("insert", {"id": 1, "a": 1}),
        ("ddl", ["id", "a", "b"]),
        ("insert", {"id": 2, "a": 2, "b": "x"}),
    ]
    assert findings(db) == []
    # the service leaves its own superuser's DDL out of event triggers that customers have made
    with db.real_su() as su:
        su.execute("begin")
        names = ["!gdq_ddl", "!gdq_drop", "!gdq_rewrite", "!gdq_capture_role"]
        for state in ("disable", "enable always"):
            for name in names:
                su.execute(f'alter event trigger "{name}" {state}'.encode())
            if state == "disable":
                su.execute("alter table t add c int")
        su.execute("commit")
    db.run("insert into t (id) values (3)")
    run(db, "ticker", "--once")
    ((code, cure),) = findings(db)
    assert code == "resync"
    assert "apply-ddl" not in cure
    consumed(db, code=3)
    # the admin owns the event triggers: they go with gdq
    run(db, "uninstall", "--yes")
    assert db.run("select evtname from pg_event_trigger") == []


def test_extensions_in_a_schema_of_their_own(managed_db: ManagedDatabase) -> None:
    """Types of an extension that lies in another schema, on the search_path or not."""
    db = managed_db
    with db.real_su() as su:
        if su.execute("select from pg_available_extensions where name in ('citext', 'hstore')").rowcount != 2:
            pytest.skip("this server has no citext and hstore")
        su.execute(f"create schema extensions authorization {ADMIN}")
        su.execute("create extension citext schema extensions")
        su.execute("create extension hstore schema extensions")
    run(db, "install")
    db.run(
        "create table t (id int primary key, name extensions.citext, tags extensions.hstore)",
        "select gdq.create_queue('shop'), gdq.add_table('shop', 't')",
        "select gdq.register_consumer('shop', 'c')",
        "set search_path = public",
        "insert into t values (1, 'Ann', 'a=>1')",
    )
    run(db, "apply-ddl", "shop", "-f", "-", stdin="alter table t add other extensions.citext")
    db.run("update t set other = 'B', name = 'ann'")
    assert [new for op, new in consumed(db) if op != "ddl"] == [
        {"id": 1, "name": "Ann", "tags": '"a"=>"1"'},
        {"id": 1, "name": "ann", "tags": '"a"=>"1"', "other": "B"},
    ]
    assert findings(db) == []
    query = "select name, count(*) from public.t group by name"
    made = run(db, "create-view", "v", "--queue", "shop", "--sql", "-", "--target", "public.v", stdin=query)
    assert made.stderr
    run(db, "refresh", "v")
    db.run("insert into t (id, name) values (2, 'ANN')")
    run(db, "refresh", "v")
    run(db, "verify-view", "v")
    assert db.run("select count from v") == [(2,)]
