"""Capture functions belong to a role for the owner of their table, which may write into the logs of his tables only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from psycopg import errors

from tests.support.events import Tap, drain
from tests.support.server import PASSWORD

pytestmark = pytest.mark.server

OWNERS = """select distinct pg_get_userbyid(proowner) from pg_proc
             where pronamespace = 'gdq_log'::regnamespace and proname ~ %s order by 1"""

# The assignment cast runs as the owner of the capture function of the column's old type, while ALTER converts a column.
ATTACK = (
    "create table t (id int, a int)",
    "create type evil as (x int)",
    "create table loot (who text, code text)",
    "grant insert on loot to public",
    (
        "create function evil_cast(evil) returns int language plpgsql as $f$ begin"
        " begin {attempt}; insert into {schema}.loot values (current_user, 'done');"
        " exception when others then insert into {schema}.loot values (current_user, sqlstate); end; return 1; end $f$"
    ),
    "create cast (evil as int) with function evil_cast(evil) as assignment",
    (
        "create function convert_a(int) returns evil language plpgsql as"
        " $f$ begin insert into {schema}.t values (99, row(1)::{schema}.evil); return row($1)::{schema}.evil; end $f$"
    ),
    "grant usage on schema {schema} to public",
    "insert into t values (1, 1)",
)


@contextmanager
def other_owner(tap: Tap, name: str = "mallory") -> Iterator[Any]:
    """A session of another role that owns tables, in a schema of its own name."""
    with tap.db.connect("su") as su:
        su.execute(f"create role {name} login password '{PASSWORD}'".encode())
        try:
            su.execute(f"create schema {name} authorization {name}; grant usage on schema {name} to gdq_owner".encode())
            su.execute(f"alter default privileges for role {name} grant trigger on tables to gdq_owner".encode())
            with tap.db.connect("su") as session:
                session.execute(f"set session authorization {name}; set search_path = {name}".encode())
                yield session
        finally:
            tap.owner.execute("select gdq.drop_queue(queue_name, true) from gdq.queue")
            su.execute(f"drop owned by {name} cascade; drop role {name}".encode())


def oid(tap: Tap, role: str) -> int:
    found = tap.owner.execute("select oid::int from pg_roles where rolname = %s", [role]).fetchone()
    assert found
    return int(found[0])


def owners(tap: Tap, pattern: str) -> list[str]:
    return [name for (name,) in tap.owner.execute(OWNERS, [pattern]).fetchall()]


def maintain(tap: Tap) -> None:
    """What maintenance does of this within a minute."""
    for part in range(60):
        tap.owner.execute("select gdq.check_owners(%s)", [part])


def test_each_owner_has_a_role_of_its_own(tap: Tap) -> None:
    with other_owner(tap) as mallory:
        tap.write("create table t (id int primary key)")
        mallory.execute("create table m (id int primary key)")
        tap.add("shop.t")
        tap.add("mallory.m")
        ours, theirs = f"gdq_capture_{oid(tap, 'app')}", f"gdq_capture_{oid(tap, 'mallory')}"
        assert owners(tap, r"^t\d+_q\d+_[iud]$") == sorted([ours, theirs])
        assert owners(tap, r"^(t\d+_q\d+_t|q\d+_event|q\d+_truncate)$") == ["gdq_capture"]
        rows = tap.owner.execute(
            "select ct.table_name, r.rolname from gdq.log_segment s join gdq.table_version v using (version_id)"
            " join gdq.captured_table ct using (table_id), pg_roles r where r.rolname ~ '^gdq_capture'"
            " and has_table_privilege(r.oid, s.segment, 'insert') group by 1, 2 order by 1"
        ).fetchall()
        assert rows == [("mallory.m", theirs), ("shop.t", ours)]
        tap.write("insert into t values (1)")
        mallory.execute("insert into m values (2); truncate m")
        assert [(e.op, e.tbl) for e in tap.events()] == [
            ("insert", "shop.t"),
            ("insert", "mallory.m"),
            ("truncate", "mallory.m"),
        ]


@pytest.mark.parametrize(
    "attempt",
    [
        "insert into gdq_log.{log} (ev_id, ev_txid, ev_op, row_1) values (1, txid_current(), 'I', 666)",
        "perform gdq_log.q1_event('truncate', {victim}, null)",
        "insert into gdq_log.q1_s0 (ev_id, ev_kind, ev_table) values (1, 'truncate', {victim})",
        "insert into gdq_log.q1_s0 (ev_txid, ev_kind, ev_table) values (txid_current(), 'truncate', {victim})",
        "insert into gdq_log.q1_s0 (ev_txid, ev_kind) values (txid_current(), 'message')",
        "perform gdq_log.q1_truncate({victim}, 'AFTER', {victim}, 'shop', 'victim', null)",
        "insert into gdq_log.q1_truncation values (txid_current(), {victim}, 1)",
        (
            "execute 'create trigger x after insert on mallory.forged"
            " for each row execute function gdq_log.t{victim}_q1_i()'; insert into mallory.forged values (666)"
        ),
    ],
)
def test_code_in_a_capture_function_forges_no_change_of_others(tap: Tap, attempt: str) -> None:
    with other_owner(tap) as mallory:
        tap.write("create table victim (id int primary key)")
        tap.add("shop.victim")
        victim = tap.app.execute("select 'shop.victim'::regclass::oid").fetchone()
        log = tap.owner.execute("select segment::text from gdq.log_segment where not pair limit 1").fetchone()
        assert victim
        assert log
        mallory.execute("create table forged (id int); grant all on forged to public")
        text = attempt.format(victim=victim[0], log=log[0].removeprefix("gdq_log."))
        for statement in ATTACK:
            mallory.execute(statement.format(attempt=text, schema="mallory").encode())
        tap.owner.execute("select gdq.create_queue('other')")
        tap.owner.execute("select gdq.add_table('other', 'mallory.t')")
        mallory.execute("alter table t alter a type evil using convert_a(a)")
        (found,) = mallory.execute("select distinct who, code from loot").fetchall()
        assert found[0] == f"gdq_capture_{oid(tap, 'mallory')}"
        assert [(e.op, e.tbl) for e in tap.events()] == []


def test_two_queues_and_the_role_of_an_owner_without_captured_tables(tap: Tap) -> None:
    tap.write("create table t (id int primary key)", "create table u (id int primary key)")
    with Tap(tap.db, "second", "other") as second:
        tap.add("shop.t")
        second.add("shop.t")
        second.add("shop.u")
        tap.write("insert into t values (1)", "insert into u values (1)")
        assert [e.tbl for e in tap.events()] == ["shop.t"]
        assert [e.tbl for e in second.events()] == ["shop.t", "shop.u"]
        role = f"gdq_capture_{oid(tap, 'app')}"
        assert owners(tap, r"^t\d+_q\d+_[iud]$") == [role]
        for queue, table in (("q", "t"), ("second", "t"), ("second", "u")):
            assert tap.owner.execute("select from pg_roles where rolname = %s", [role]).rowcount == 1
            tap.owner.execute("select gdq.remove_table(%s, %s::regclass, true)", [queue, f"shop.{table}"])
        rights = (
            "select from pg_shdepend where refobjid = %s and dbid = (select oid from pg_database where datname = %s)"
        )
        left = tap.owner.execute("select oid from pg_roles where rolname = %s", [role]).fetchone()
        # the role itself stays while other databases of the cluster use it
        assert left is None or tap.owner.execute(rights, [left[0], tap.db.name]).rowcount == 0


@pytest.mark.parametrize("change", ["alter table shop.t owner to mallory", "reassign owned by app to mallory"])
def test_another_owner(tap: Tap, change: str) -> None:
    """ALTER TABLE moves the functions at once; REASSIGN OWNED, for which no event trigger fires, maintenance does."""
    with other_owner(tap) as mallory:
        tap.write("create table t (id int primary key, a int)", "insert into t values (0)")
        tap.add("shop.t")
        before, after = f"gdq_capture_{oid(tap, 'app')}", f"gdq_capture_{oid(tap, 'mallory')}"
        with tap.db.connect("su") as su:
            if change.startswith("reassign"):
                su.execute("create role app_tables; grant app_tables to app")
                su.execute("alter table shop.t owner to app_tables")
                before = f"gdq_capture_{oid(tap, 'app_tables')}"
                change = change.replace("app", "app_tables")
            assert owners(tap, r"^t\d+_q\d+_[iud]$") == [before]
            su.execute("insert into shop.t values (1)")
            su.execute(change.encode())
            su.execute("insert into shop.t values (2)")
            maintain(tap)
            assert owners(tap, r"^t\d+_q\d+_[iud]$") == [after]
            su.execute("insert into shop.t values (3)")
            su.execute("drop role if exists app_tables")
        maintain(tap)
        tap.write("grant usage on schema shop to mallory")
        for statement in ("alter table shop.t add b int", "insert into shop.t values (4)", "update shop.t set a = 1"):
            mallory.execute(statement.encode())
        mallory.execute("truncate shop.t")
        writers = tap.owner.execute(
            "select distinct r.rolname from gdq.log_segment s, pg_roles r"
            " where r.rolname ~ '^gdq_capture' and has_table_privilege(r.oid, s.segment, 'insert')"
        ).fetchall()
        assert writers == [(after,)]
        seen = [e for e in tap.events() if e.op != "ddl"]
        assert [e.op for e in seen] == ["insert"] * 4 + ["update"] * 5 + ["truncate"]
        assert tap.owner.execute("select * from gdq.function_faults(1)").fetchall() == []


def test_owner_changed_unseen_runs_no_code_as_the_earlier_owners_role(tap: Tap) -> None:
    with other_owner(tap) as mallory, tap.db.connect("su") as su:
        su.execute("create role before_mallory; grant create on schema mallory to before_mallory")
        for statement in ATTACK:
            mallory.execute(statement.format(attempt="null", schema="mallory").encode())
        su.execute("alter table mallory.t owner to before_mallory")
        tap.add("mallory.t")
        su.execute("reassign owned by before_mallory to mallory")
        mallory.execute("alter table t alter a type evil using convert_a(a)")
        assert mallory.execute("select distinct who from loot").fetchall() == [(f"gdq_capture_{oid(tap, 'mallory')}",)]
        su.execute("drop owned by before_mallory; drop role before_mallory")


def test_without_the_right_to_make_roles_owners_share_a_role_and_doctor_says_so(tap: Tap) -> None:
    with other_owner(tap) as mallory, other_owner(tap, "eve") as eve:
        with tap.db.connect("su") as su:
            su.execute("alter role gdq_owner nocreaterole")
        try:
            mallory.execute("create table m (id int)")
            eve.execute("create table e (id int)")
            tap.add("mallory.m")
            tap.add("eve.e")
            mallory.execute("insert into m values (1)")
            assert [e.tbl for e in tap.events()] == ["mallory.m"]
            findings = "select severity, code from gdq.doctor('q') where code = 'shared_capture_role'"
            assert tap.owner.execute(findings).fetchall() == [("warning", "shared_capture_role")]
        finally:
            with tap.db.connect("su") as su:
                su.execute("alter role gdq_owner createrole")
        maintain(tap)
        maintain(tap)
        assert tap.owner.execute(findings).fetchall() == []
        mallory.execute("insert into m values (2)")
        assert [e.tbl for e in tap.events()] == ["mallory.m"]


def test_nobody_can_take_a_capture_role(tap: Tap) -> None:
    tap.write("create table t (id int)")
    tap.add("shop.t")
    with pytest.raises(errors.InsufficientPrivilege):
        tap.app.execute(f"set role gdq_capture_{oid(tap, 'app')}".encode())
    assert drain(tap.db) == []
