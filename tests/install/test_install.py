"""Install, upgrade and uninstall."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from gdq.embedded.server import EmbeddedServer
from gdq.errors import InstallError
from gdq.installer import install
from tests.support.programs import dump, gdq, psql
from tests.support.server import Database, chosen_binaries

pytestmark = pytest.mark.server

HEAD = max(path.name for path in Path("migrations/versions").glob("0*.sql"))[:4]


def test_install_is_the_script_in_psql(empty_db: Database) -> None:
    done = psql(empty_db, install.install_script())
    assert done.returncode == 0, done.stderr
    scripted = dump(empty_db, "-s")
    done = psql(empty_db, install.uninstall_script())
    assert done.returncode == 0, done.stderr
    install.install(empty_db.dsn)
    assert dump(empty_db, "-s") == scripted


def test_install_after_the_script_has_nothing_to_do(empty_db: Database) -> None:
    assert psql(empty_db, install.install_script()).returncode == 0
    assert install.install(empty_db.dsn).changed is False


def test_script_refuses_an_installed_database(db: Database) -> None:
    done = psql(db, install.install_script())
    assert done.returncode == 3
    assert f"gdq is installed here already, at revision {HEAD}" in done.stderr


def test_script_is_the_same_every_time_and_one_transaction() -> None:
    script = install.install_script()
    assert script == install.install_script()
    assert script.startswith("begin ")
    assert script.endswith("commit;\n")
    assert len(re.findall(r"(?im)^(begin|commit)\b[^;\n]*;$", script)) == 2


def test_six_installs_at_once(empty_db: Database) -> None:
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: install.install(empty_db.dsn), range(6)))
    assert sorted(result.changed for result in results) == [False] * 5 + [True]
    assert {result.revision for result in results} == {HEAD}


def test_installs_in_two_databases_at_once(empty_db: Database, db: Database) -> None:
    """They meet in the role of the cluster, and in Alembic's globals when one process runs both."""
    with db.connect() as connection, connection.transaction():
        install.uninstall(connection)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(install.install, [empty_db.dsn, db.dsn]))
    assert [result.changed for result in results] == [True, True]


def test_changed_functions_alone_are_applied_again(db: Database) -> None:
    with db.connect() as connection:
        connection.execute(
            "create or replace function gdq.find_queue(queue text) returns integer language sql as 'select 1'"
        )
        assert install.install(db.dsn).changed is False
        connection.execute("comment on schema gdq is 'as an older gdq left it'")
        assert install.install(db.dsn).changed is True
        with pytest.raises(psycopg.errors.UndefinedObject):
            connection.execute("select gdq.find_queue('none')")


def test_schema_of_a_newer_gdq_is_refused(db: Database) -> None:
    with db.connect() as connection:
        connection.execute("update gdq.schema_version set version_num = '9999'")
    with pytest.raises(InstallError, match="9999"):
        install.install(db.dsn)


@pytest.mark.parametrize("name", ["gdq", "gdq_log"])
def test_schema_of_another_owner_is_refused(empty_db: Database, name: str) -> None:
    with empty_db.connect("su") as su:
        su.execute(f"create schema {name}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f"schema {name} belongs to role postgres"):
        install.install(empty_db.dsn)
    done = psql(empty_db, install.install_script())
    assert done.returncode == 3
    assert f"schema {name} belongs to role postgres" in done.stderr


def test_old_server_is_refused(empty_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_PREFLIGHT", install._PREFLIGHT.replace("150000", "990000"))
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="gdq needs PostgreSQL 15 or later, this server is "):
        install.install(empty_db.dsn)


def test_standby_is_refused(pytestconfig: pytest.Config) -> None:
    with EmbeddedServer(binaries=chosen_binaries(pytestconfig.getoption("--pg"))) as server:
        server.crash()
        server.account.write(server.data / "standby.signal", "")
        server.start()
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction, match="this server is a standby"):
            install.install(server.conninfo())
        server.account.run("rm", server.data / "standby.signal")


@pytest.mark.long
def test_install_without_the_right_to_make_event_triggers_says_what_to_do(empty_db: Database) -> None:
    done = gdq("install", dsn=empty_db.dsn)
    assert done.returncode == 0
    assert done.stdout == ""
    assert "gdq create-event-triggers" in done.stderr
    assert "format of captured tables: json" in done.stderr
    assert done.stderr.endswith(f"installed {HEAD}\n")
    assert gdq("create-event-triggers", dsn=empty_db.dsn).returncode == 1
    assert gdq("create-event-triggers", dsn=empty_db.su_dsn).stderr == "created event triggers\n"
    assert gdq("install", dsn=empty_db.dsn).stderr == (
        f"format of captured tables: typed, as the event triggers follow DDL\nalready at {HEAD}\n"
    )


def test_superuser_gets_event_triggers_by_install(empty_db: Database) -> None:
    assert install.install(empty_db.su_dsn).event_triggers is True


def test_public_may_execute_nothing(db: Database) -> None:
    with db.connect() as connection:
        rows = connection.execute(
            """select p.oid::regprocedure::text from pg_proc p
                where p.pronamespace in ('gdq'::regnamespace, 'gdq_log'::regnamespace)
                  and has_function_privilege('app', p.oid, 'execute')"""
        ).fetchall()
    assert rows == []


def test_every_function_and_table_has_a_comment(db: Database) -> None:
    with db.connect() as connection:
        rows = connection.execute(
            """select p.oid::regprocedure::text from pg_proc p
                where p.pronamespace = 'gdq'::regnamespace and obj_description(p.oid, 'pg_proc') is null
               union all
               select c.oid::regclass::text from pg_class c
                where c.relnamespace = 'gdq'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
                      and c.relname <> 'schema_version'
                  and obj_description(c.oid, 'pg_class') is null"""
        ).fetchall()
    assert rows == []


def test_uninstall_leaves_the_tables_as_they_were(db: Database) -> None:
    with db.connect() as connection:
        connection.execute(
            """create table kept (id int primary key, note text);
               create table parted (id int primary key) partition by range (id);
               create table parted_1 partition of parted for values from (0) to (100)"""
        )
        before = dump(db, "-n", "public")
        connection.execute("select gdq.create_queue('q')")
        for table in ("kept", "parted"):
            connection.execute("select gdq.add_table('q', %s::regclass)", [table])
        connection.execute("insert into kept values (1, 'one'); delete from kept; insert into parted values (1)")
        connection.execute("truncate parted")
        assert dump(db, "-n", "public") != before
        assert gdq("uninstall", "--yes", dsn=db.dsn).stderr == "uninstalled\n"
        assert dump(db, "-n", "public") == before
        for catalog, column in (("pg_namespace", "nspname"), ("pg_event_trigger", "evtname")):
            assert connection.execute(f"select from {catalog} where {column} like 'gdq%%'").rowcount == 0
        assert gdq("uninstall", "--yes", dsn=db.dsn).stderr.startswith("already gone")
        assert install.install(db.dsn).changed is True


def test_uninstall_asks(db: Database) -> None:
    done = gdq("uninstall", dsn=db.dsn, stdin="n\n")
    assert done.returncode == 1
    with db.connect() as connection:
        connection.execute("select gdq.queue_info()")


def test_uninstall_script_keeps_the_role_that_others_use(db: Database, empty_db: Database) -> None:
    install.install(empty_db.dsn)
    done = psql(db, install.uninstall_script())
    assert done.returncode == 0, done.stderr
    with db.connect() as connection:
        assert connection.execute("select from pg_roles where rolname = 'gdq_capture'").rowcount == 1
        assert connection.execute("select from pg_namespace where nspname like 'gdq%%'").rowcount == 0


def test_uninstall_does_not_queue_behind_a_writer(db: Database) -> None:
    with db.connect() as connection, db.connect(autocommit=False) as writer:
        connection.execute("create table t (id int primary key); select gdq.create_queue('q')")
        connection.execute("select gdq.add_table('q', 't')")
        writer.execute("insert into t values (1)")
        with pytest.raises(psycopg.errors.LockNotAvailable), connection.transaction():
            install.uninstall(connection)
        writer.commit()
        with connection.transaction():
            assert install.uninstall(connection) is True
