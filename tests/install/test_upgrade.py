"""An install over an older gdq: functions that changed, went or are used by others, and what goes on meanwhile."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from sqlalchemy import NullPool, create_engine
from sqlalchemy.exc import ProgrammingError

from gdq.conninfo import connect
from gdq.embedded.server import EmbeddedServer
from gdq.errors import InstallError
from gdq.installer import install
from gdq.installer import version as schema_version
from tests.support.events import Tap
from tests.support.programs import dump, gdq
from tests.support.server import Database

HEAD = max(path.name for path in Path("migrations/versions").glob("0*.sql"))[:4]
OLDER = "comment on schema gdq is 'as an older gdq left it'"


def upgrade(db: Database, *older: str) -> install.InstallResult:
    """Make the schema what an older gdq would have left, and install over it."""
    with db.connect() as owner:
        for statement in (*older, OLDER):
            owner.execute(statement.encode())
    result = install.install(db.dsn)
    assert result.changed
    return result


@contextmanager
def background(work: Any) -> Iterator[list[Exception]]:
    """Call `work` again and again in a thread; the errors that it raised, for the end."""
    stop = threading.Event()
    ready = threading.Event()
    errors: list[Exception] = []

    def run() -> None:
        while not stop.is_set():
            try:
                work()
            except Exception as error:
                errors.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ready.wait()
        yield errors
    finally:
        stop.set()
        thread.join()


def test_upgrade_equals_a_fresh_install(db: Database) -> None:
    """Whatever functions an older gdq had: none, others, the same with other arguments, results or kinds."""
    fresh = dump(db, "-s")
    upgrade(
        db,
        "create function gdq.gone() returns integer language sql as 'select 1'",
        "create function gdq.gone_too(a integer default gdq.gone()) returns integer language sql as 'select 1'",
        "create procedure gdq.gone_three() language sql as ''",
        "create function gdq.find_queue(queue text, extra integer default 0) returns text language sql as 'select 1'",
        "drop function gdq.queue_info(text)",
        "create function gdq.queue_info(q text default null) returns table (a integer) language sql as 'select 1'",
        "drop function gdq.maintain()",
        "create procedure gdq.maintain() language sql as ''",
        "create or replace function gdq.lock_key(class text, id oid) returns bigint language sql as 'select 1'",
        "drop function gdq.tick_nonce(bigint)",
    )
    assert dump(db, "-s") == fresh


def test_upgrade_without_any_function_equals_a_fresh_install(db: Database) -> None:
    fresh = dump(db, "-s")
    drop = """do $$ declare f regprocedure; begin
      for f in select oid from pg_proc where pronamespace = 'gdq'::regnamespace
                  and prorettype <> 'event_trigger'::regtype loop
        execute format('drop routine %s', f); end loop; end $$"""
    stub = "create or replace function gdq.ddl_guard() returns event_trigger language plpgsql as 'begin end'"
    upgrade(db, stub, drop)
    assert dump(db, "-s") == fresh


def test_grants_of_users_survive(db: Database) -> None:
    with db.connect("su") as su:
        su.execute("create role deployer")
    try:
        result = upgrade(
            db,
            "grant execute on function gdq.add_table to deployer with grant option",
            "grant execute on function gdq.queue_info to public",
            "create function gdq.create_queue(queue text) returns void language sql as ''",
            "grant execute on function gdq.create_queue(text) to deployer",
        )
        (lost,) = (notice for notice in result.notices if "deployer" in notice)
        assert lost.startswith("WARNING: function gdq.create_queue(text) has other arguments now or is gone: deployer")
        with db.connect() as owner:
            rows = owner.execute(
                """select p.proname, pg_get_userbyid(nullif(a.grantee, 0)), a.is_grantable
                     from pg_proc p, aclexplode(p.proacl) a
                    where p.pronamespace = 'gdq'::regnamespace and a.grantee <> p.proowner
                      and (a.grantee = 0 or a.grantee = 'deployer'::regrole) order by 1"""
            ).fetchall()
            assert rows == [("add_table", "deployer", True), ("queue_info", None, False)]
    finally:
        with db.connect("su") as su:
            su.execute("drop owned by deployer")
            su.execute("drop role deployer")


@pytest.mark.long
def test_what_users_built_on_a_function_stays(db: Database) -> None:
    view = "create view public.lags as select queue_name, tick_age from gdq.queue_info()"
    upgrade(db, view)
    with db.connect() as owner:
        owner.execute("select gdq.create_queue('q')")
        assert owner.execute("select queue_name from lags").fetchall() == [("q",)]


def test_what_users_built_on_a_function_that_changes_is_named(db: Database) -> None:
    older = (
        "create function gdq.queue_info(queue text default null) returns table (a integer) language sql as 'select 1'"
    )
    statements = ("drop function gdq.queue_info", older, "create view public.lags as select a from gdq.queue_info()")
    with pytest.raises(
        InstallError, match=r"function gdq\.queue_info\(text\) changes, and is used by view public\.lags"
    ):
        upgrade(db, *statements)
    with db.connect() as owner:
        assert owner.execute("select a from lags").fetchall() == [(1,)]
        owner.execute("drop view lags")
    assert install.install(db.dsn).changed


def test_a_function_that_is_gone_but_used_is_reported(db: Database) -> None:
    result = upgrade(
        db,
        "create function gdq.gone() returns integer language sql as 'select 1'",
        "create view public.used as select gdq.gone()",
    )
    (notice,) = (notice for notice in result.notices if "gone" in notice)
    assert notice.startswith("WARNING: function gdq.gone() is no longer part of gdq, but is used by view public.used")
    assert notice.endswith("(Drop what uses it, then: drop function gdq.gone())")


def test_event_triggers_fire_on(tap: Tap) -> None:
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    upgrade(tap.db)
    tap.write("alter table t add v int", "insert into t values (1, 2)")
    assert [(e.op, (e.new or {}).get("v")) for e in tap.events()] == [("ddl", None), ("insert", 2)]
    assert tap.owner.execute("select gdq.event_triggers_on()").fetchone() == (True,)


@pytest.mark.long
def test_six_upgrades_at_once(db: Database) -> None:
    fresh = dump(db, "-s")
    with db.connect() as owner:
        owner.execute("create function gdq.gone() returns integer language sql as 'select 1'")
        owner.execute(OLDER)
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: install.install(db.dsn), range(6)))
    assert sorted(result.changed for result in results) == [False] * 5 + [True]
    assert dump(db, "-s") == fresh


def install_at(db: Database, revision: str) -> int:
    """Tables as of an older revision with a few rows, and as many of today's functions as fit them; how many."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: connect(db.dsn), poolclass=NullPool)
    made = 0
    with engine.begin() as connection:
        connection.exec_driver_sql("create schema gdq")
        config = install._config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        connection.exec_driver_sql("set local check_function_bodies = off; set local search_path = pg_catalog, pg_temp")
        for text in schema_version.function_texts():
            for function in re.split(r"(?m)^(?=create or replace function)", text)[1:]:
                try:
                    with connection.begin_nested():
                        connection.exec_driver_sql(function, execution_options={"no_parameters": True})
                        made += 1
                except ProgrammingError:
                    pass  # a row type that this revision does not have
        owned = ("owner_role", "current_user") if revision >= "0007" else ("created_at", "now()")
        connection.exec_driver_sql(
            f"""insert into gdq.queue (queue_name, ticker_max_count, ticker_max_lag, ticker_idle_period,
                  rotation_period, rotation_bytes, retention) values ('old', 1, '1 s', '1 s', '1 s', 1000, '1 s');
                insert into gdq.consumer (consumer_name) values ('old');
                insert into gdq.subscription (queue_id, consumer_id, all_tables, {owned[0]})
                  values (1, 1, true, {owned[1]})"""
        )
    return made


@pytest.mark.long
def test_upgrade_from_every_revision_equals_a_fresh_install(server: EmbeddedServer, db: Database) -> None:
    fresh = dump(db, "-s", "-n", "gdq")
    older = sorted(path.name[:4] for path in Path("migrations/versions").glob("0*.sql"))[:-1]
    assert len(older) > 6
    for revision in older:
        database = Database(server, f"{db.name}_{revision}")
        with psycopg.connect(server.conninfo(), autocommit=True) as su:
            su.execute(f"create database {database.name} owner gdq_owner template template0".encode())
            try:
                assert install_at(database, revision) > 50
                assert install.install(database.dsn).changed
                # what is generated for the queues that there are
                assert without_producers(dump(database, "-s", "-n", "gdq")) == without_producers(fresh)
                with database.connect() as owner:
                    rows = owner.execute("select owner_role from gdq.subscription").fetchall()
                    assert rows == [("gdq_owner",)]
            finally:
                su.execute(f"drop database {database.name} with (force)".encode())


def without_producers(lines: list[str]) -> list[str]:
    """A schema dump without the bodies of insert_event() and insert_events(), which name the queues."""
    return re.sub(r"(?s)(CREATE FUNCTION gdq\.insert_events?\(.*?AS )\$\$.*?\$\$", r"\1", "\n".join(lines)).splitlines()


@pytest.mark.long
@pytest.mark.parametrize(
    ("mark", "program", "code", "message"),
    [
        ("Revision 0001, functions 0123456789abcdef.", "queues", 1, "the database has an older gdq, revision 0001"),
        ("as an older gdq left it", "ticker", 1, "the database has an older gdq, revision unknown"),
        ("Revision 9999, functions 0123456789abcdef.", "queues", 0, "the database has a newer gdq, revision 9999"),
        (f"Revision {HEAD}, functions 0123456789abcdef.", "queues", 0, "not those of this gdq: run gdq install"),
        ("Revision 0001, functions 0123456789abcdef.", "uninstall", 0, None),
        (None, "queues", 0, None),
    ],
)
def test_another_version_is_told(db: Database, mark: str | None, program: str, code: int, message: str | None) -> None:
    if mark:
        with db.connect() as owner:
            owner.execute(f"comment on schema gdq is '{mark}'".encode())
    options = {"ticker": ["--once"], "uninstall": ["--yes"]}.get(program, [])
    done = gdq(program, *options, dsn=db.dsn)
    assert done.returncode == code, done.stderr
    if message is None:
        assert "older" not in done.stderr
        assert "newer" not in done.stderr
        return
    assert sum(message in line for line in done.stderr.splitlines()) == 1
    assert code == 0 or "Hint: gdq install upgrades it." in done.stderr


@pytest.mark.parametrize(
    ("columns", "code", "message"),
    [
        ("queue_name text, consumer_name text, member_name text, batch_id bigint, held_for interval, more text", 0, ""),
        ("queue_name text, member_name text, batch_id bigint", 1, "of another gdq: no consumer_name, held_for"),
    ],
)
def test_listing_with_other_columns_is_read_or_told(db: Database, columns: str, code: int, message: str) -> None:
    """A newer gdq's listings have more columns; fewer are one line, not a traceback."""
    with db.connect() as owner:
        owner.execute("drop function gdq.member_info")
        nulls = ", ".join(f"null::{column.split()[1]}" for column in columns.split(", "))
        owner.execute(
            "create function gdq.member_info(text default null, text default null)"
            f" returns table ({columns}) language sql as 'select {nulls}'".encode()
        )
    done = gdq("members", dsn=db.dsn)
    assert "Traceback" not in done.stderr
    assert (done.returncode, message in done.stderr) == (code, True)


@pytest.mark.long
def test_upgrade_of_the_schema_beneath_a_command_mends_it(db: Database) -> None:
    with db.connect() as owner:
        owner.execute("comment on schema gdq is 'Revision 0001, functions 0.'")
    assert gdq("queues", dsn=db.dsn).returncode == 1
    assert gdq("install", dsn=db.dsn).returncode == 0
    done = gdq("queues", dsn=db.dsn)
    assert (done.returncode, done.stderr) == (0, "")


def test_writers_and_ddl_during_upgrades(tap: Tap) -> None:
    """Neither fails, and no change is missing: a table that DDL alters all the while, and one that is only written."""
    tap.write("create table t (id serial primary key)", "create table d (id serial primary key)")
    tap.add("shop.t")
    tap.add("shop.d")
    written = 0
    altered = 0
    with tap.db.connect("app") as writer, tap.db.connect("app") as alterer:

        def write() -> None:
            nonlocal written
            writer.execute("insert into t default values")
            written += 1

        def alter() -> None:
            nonlocal altered
            with alterer.transaction():
                alterer.execute(f"alter table d add c{altered % 50} int".encode())
                alterer.execute("insert into d default values")
                alterer.execute(f"alter table d drop c{altered % 50}".encode())
            altered += 1

        with background(write) as write_errors, background(alter) as alter_errors:
            for _ in range(4):
                upgrade(tap.db)
    assert (write_errors, alter_errors) == ([], [])
    events = tap.events()
    assert [e.op for e in events if e.tbl == "shop.t"] == ["insert"] * written
    # where DDL met the very moment of the swap, capture went off, said so, and writes went on
    gaps = [e for e in events if e.op == "resync"]
    assert len([e for e in events if e.tbl == "shop.d" and e.op == "insert"]) == altered or gaps
    assert tap.owner.execute("select state from gdq.table_info('q') where table_name = 'shop.t'").fetchall() == [
        ("ok",)
    ]


@pytest.mark.long
def test_consumers_during_upgrades(tap: Tap) -> None:
    """A worker may meet a function that is just being replaced: it fails, tries again, and has every change once."""
    tap.write("create table t (id serial primary key)")
    tap.add("shop.t")
    seen: list[int] = []
    with tap.db.connect("app") as writer, tap.db.connect() as worker:

        def write() -> None:
            writer.execute("insert into t default values")

        def consume() -> None:
            with worker.transaction():
                worker.execute("select gdq.force_tick('q')")
            with worker.transaction():
                found = worker.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
                if found:
                    rows = worker.execute("select new ->> 'id' from gdq.get_batch(%s, %s)", found).fetchall()
                    worker.execute("select gdq.finish_batch(%s, %s)", found)
            if found:
                seen.extend(int(row[0]) for row in rows)

        with background(write) as write_errors, background(consume) as errors:
            for _ in range(4):
                upgrade(tap.db)
    assert write_errors == []
    assert {type(error) for error in errors} <= {psycopg.errors.UndefinedFunction, psycopg.errors.InternalError_}
    seen += [int((e.new or {})["id"]) for e in tap.events()]
    (total,) = tap.app.execute("select count(*) from shop.t").fetchone() or (0,)
    assert sorted(seen) == list(range(1, total + 1))
