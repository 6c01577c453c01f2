"""Upgrades from every older revision while writers go on, with unread rows, an open batch and old transactions."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import psycopg
import pytest

from gdq.errors import InstallError
from gdq.installer import install
from gdq.monitor.doctor import doctor
from tests.support.concurrency import Scene, Stream, maintain, next_batch, read_events
from tests.support.events import Tap
from tests.support.older import REVISIONS, Column, Writers, catalogs, downgrade, locked_by_revisions
from tests.support.programs import dump
from tests.support.server import Database
from tests.support.waiting import until

# What writers call is looked up while they run: an upgrade must find it as it was, or fail some write.
CALLED_BY_WRITERS = {
    "gdq.check_message(text,jsonb,text) boolean",
    "gdq.check_messages(text[],jsonb[],text[],text[],text[],text[]) void",
    "gdq.insert_event(text,text,jsonb,text,text,text,text) bigint",
    "gdq.insert_event(text,text,text,text,text,text,text) bigint",
    "gdq.insert_events(text,text[],jsonb[],text[],text[],text[],text[]) bigint",
    "gdq.insert_events(text,text[],text[],text[],text[],text[],text[]) bigint",
}


@pytest.fixture(scope="module")
def left_by(server: Any, template: str) -> dict[str, list[Column]]:
    """The control tables of each revision."""
    database = Database(server, "gdq_revisions")
    with psycopg.connect(server.conninfo(), autocommit=True) as su:
        su.execute("create database gdq_revisions owner gdq_owner template template0")
        try:
            return catalogs(database)
        finally:
            su.execute("drop database gdq_revisions with (force)")


def consume(owner: psycopg.Connection[Any], consumer: str, stream: Stream, messages: list[str]) -> None:
    """Apply all that there is."""
    while batch := next_batch(owner, consumer):
        batch_id, token, applied = batch
        changes = read_events(owner, batch_id, token)
        stream.note_read(batch_id, changes)
        query = "select new ->> 'data' from gdq.get_batch(%s, %s) where op = 'message'"
        messages += [row[0] for row in owner.execute(query, [batch_id, token])]
        owner.execute("select gdq.finish_batch(%s, %s)", [batch_id, token])
        stream.applied.append(applied._replace(changes=changes))


# the first and the last one of the past are shown on every server each time
LONG = [pytest.param(revision, marks=pytest.mark.long) for revision in REVISIONS[1:-1]]


@pytest.mark.parametrize("revision", [REVISIONS[0], *LONG])
def test_exactly_once_over_an_upgrade(db: Database, left_by: dict[str, list[Column]], revision: str) -> None:
    scene = Scene(db)
    got: dict[str, list[str]] = {"c": [], "late": []}
    with db.connect() as owner:
        streams = {consumer: scene.register(owner, consumer) for consumer in got}
    with db.connect() as owner, db.connect() as old, Writers(db) as writers:
        writers.more(10)
        owner.execute("select gdq.force_tick('q')")
        consume(owner, "c", streams["c"], got["c"])
        whole = dump(db, "-s")
        writers.more(5)
        owner.execute("select gdq.force_tick('q')")
        batch = next_batch(owner, "c")
        assert batch
        batch_id, token, applied = batch
        changes = read_events(owner, batch_id, token)
        # a snapshot and a write from before, and a write after
        old.execute("begin isolation level repeatable read; insert into acct values (-1, nextval('label'))")
        downgrade(owner, revision, left_by[revision])
        writers.more(5)
        assert install.install(db.dsn).changed
        writers.more(5)
        old.execute(
            "update acct set label = nextval('label') where id = -1; insert into item values (-1, nextval('label'))"
        )
        old.execute("commit")
        assert dump(db, "-s") == whole
        assert read_events(owner, batch_id, token) == changes
        query = "select new ->> 'data' from gdq.get_batch(%s, %s) where op = 'message'"
        got["c"] += [row[0] for row in owner.execute(query, [batch_id, token])]
        owner.execute("select gdq.finish_batch(%s, %s)", [batch_id, token])
        streams["c"].applied.append(applied._replace(changes=changes))
        while maintain(owner)[0]:
            pass
        writers.more(5)
    with db.connect() as owner:
        owner.execute("select gdq.force_tick('q')")
        for consumer, stream in streams.items():
            consume(owner, consumer, stream, got[consumer])
            assert sorted(got[consumer]) == sorted(writers.messages)
        scene.check(owner)
        assert [finding for finding in doctor(owner) if finding.severity == "error"] == []


def test_ddl_while_an_upgrade_holds_its_tables(tap: Tap) -> None:
    """The guard can read no control table. The DDL and later writes go on, and the gap is told."""
    tap.write("create table t (id int primary key, gone int, v int)", "insert into t values (0, 0, 0)")
    began = time.monotonic()
    tap.write("create table p (id int primary key) partition by list (id)")
    tap.write("create table p_1 partition of p for values in (1)", "create table p_2 partition of p for values in (2)")
    free = time.monotonic() - began
    for table in ("t", "p"):
        tap.add(f"shop.{table}")
    with locked_by_revisions(tap.db):
        began = time.monotonic()
        tap.write("insert into t values (1, 1, 1)", "alter table t drop gone", "insert into t values (2, 2)")
        tap.write("alter table p detach partition p_1", "insert into p values (2)", "insert into p_1 values (1)")
        assert time.monotonic() - began < 10 + 20 * free
    with tap.db.connect() as owner:
        until(lambda: not maintain(owner)[0])
    tap.write("update t set v = 3 where id = 2", "delete from p")
    events = tap.events()
    assert [(e.tbl, e.op) for e in events if e.op not in {"ddl", "resync"}] == [
        ("shop.t", "insert"),
        ("shop.t", "update"),
        ("shop.p", "delete"),
    ]
    gaps = [(e.tbl, e.new["kind"]) for e in events if e.op == "resync" and e.new]
    assert [kind for tbl, kind in gaps if tbl == "shop.t"] == ["disarmed", "armed"]
    assert [kind for tbl, kind in gaps if tbl == "shop.p"] == ["disarmed", "gap", "armed"]


@pytest.mark.long
def test_an_upgrade_waits_for_nobody_while_it_holds_others_up(tap: Tap, left_by: dict[str, list[Column]]) -> None:
    """While a transaction keeps a table that a revision alters, DDL and writers go on; the upgrade comes after it."""
    tap.write("create table t (id serial primary key)")
    tap.add("shop.t")
    began = time.monotonic()
    tap.write("insert into t default values")
    free = time.monotonic() - began
    downgrade(tap.owner, "0002", left_by["0002"])
    results: list[install.InstallResult] = []
    with (
        tap.db.connect(application_name="a long refresh") as reader,
        tap.db.connect() as watcher,
        tap.db.connect() as owner,
    ):
        reader.execute("begin isolation level repeatable read; select from gdq.queue")
        with pytest.raises(InstallError, match=r"gdq is busy: pid \d+ \(a long refresh\) holds what the upgrade"):
            install.install(tap.db.dsn, patience=0.2)
        thread = threading.Thread(target=lambda: results.append(install.install(tap.db.dsn)))
        thread.start()
        waits = "select count(*) from pg_locks where relation = 'gdq.queue'::regclass and not granted"
        seen, written = 0, 1
        while seen < 3:
            assert not results
            row = owner.execute(waits).fetchone()
            seen += bool(row and row[0])
            began = time.monotonic()
            watcher.execute("select from gdq.queue")
            tap.write("insert into t default values")
            written += 1
            assert time.monotonic() - began < 1 + 20 * free
        reader.execute("commit")
        thread.join()
    assert results[0].changed
    assert [e.op for e in tap.events()] == ["insert"] * written


def test_functions_of_an_older_gdq_become_those_of_this_one(tap: Tap) -> None:
    """They are no fault, whose mending would cost every consumer a copy. What is a fault stays one."""
    tap.write("create table t (id int primary key)", "create table spoilt (id int primary key)")
    tap.write("create table parts (id int primary key) partition by list (id)")
    for table in ("t", "parts", "spoilt"):
        tap.add(f"shop.{table}")
    older = {
        "gdq.capture_body(bigint, integer, text, integer)": ("E'begin", "E'begin\\n  null;"),
        "gdq.truncate_body(integer, oid, boolean)": ("$sql$begin\n", "$sql$begin\n  null;\n"),
    }
    for name, (old, new) in older.items():
        row = tap.owner.execute("select pg_get_functiondef(%s::regprocedure)", [name]).fetchone()
        assert row
        assert row[0].count(old) == 1
        tap.owner.execute(row[0].replace(old, new).encode())
    tap.owner.execute(
        """select gdq.arm(gdq.current_version(table_id), 0),
                  gdq.replace_capture(queue_id, relid, 't', gdq.truncate_body(queue_id, relid, origin))
             from gdq.captured_table"""
    )
    tap.owner.execute("select gdq.replace_capture(1, 'shop.spoilt'::regclass, 'd', 'begin return null; end')")
    tap.write("insert into t values (1)")
    tap.owner.execute("comment on schema gdq is 'as an older gdq left it'")
    assert install.install(tap.db.dsn).changed
    found = {finding.object for finding in doctor(tap.owner) if finding.severity == "error"}
    assert found == {"shop.spoilt"}
    tap.write("insert into t values (2)", "truncate t")
    assert [e.op for e in tap.events()] == ["insert", "insert", "truncate"]


def test_writers_call_nothing_that_an_upgrade_may_drop(tap: Tap) -> None:
    """Trigger functions call no function of schema gdq, and what writers of messages call keeps its signature."""
    tap.write("create type mood as enum ('sad'); create table plain (id int primary key, m mood, at timestamptz)")
    tap.write("create table quiet (id int primary key)", "create table wide (id int primary key)")
    tap.write("create table parts (id int primary key) partition by list (id)", "create table bulk (id int)")
    tap.add("shop.plain", where="id > 1 and at is not null", origin=True, pin_search_path=True)
    tap.add("shop.wide", format="json")
    tap.add("shop.parts", mode="pk", origin=True)
    tap.add("shop.bulk", granularity="statement")
    tap.add("shop.quiet")
    tap.owner.execute(
        "select gdq.set_activity(table_id, 'cooling') from gdq.captured_table where table_name = 'shop.quiet'"
    )
    functions = tap.owner.execute(
        "select prorettype = 'trigger'::regtype, prosrc from pg_proc where pronamespace = 'gdq_log'::regnamespace"
    ).fetchall()
    assert len(functions) > 20
    called = {(trigger, name) for trigger, body in functions for name in re.findall(r"\bgdq\.(\w+) *\(", body)}
    assert called == {(False, "check_message"), (False, "check_messages")}
    rows = tap.owner.execute(
        """select format('%s %s', oid::regprocedure, pg_get_function_result(oid)) from pg_proc
            where pronamespace = 'gdq'::regnamespace and proname ~ '^(insert_event|check_message)s?$'"""
    ).fetchall()
    assert {row[0] for row in rows} == CALLED_BY_WRITERS
