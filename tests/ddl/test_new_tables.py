"""Rules for tables that do not exist yet: captured by the DDL guard, by apply_ddl(), or by maintenance."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.support.events import Tap
from tests.support.guarded import maintain
from tests.support.programs import psql


def rule(tap: Tap, *patterns: str, excepted: tuple[str, ...] = (), **options: Any) -> bool:
    found = tap.owner.execute(
        "select gdq.add_new_tables('q', %s, %s, %s)", [list(patterns), list(excepted), Jsonb(options)]
    ).fetchone()
    assert found
    return bool(found[0])


def captured(tap: Tap) -> set[str]:
    return {name for (name,) in tap.owner.execute("select table_name from gdq.table_info('q')")}


def findings(tap: Tap) -> list[tuple[str, str, str]]:
    query = "select object, cause, cure from gdq.doctor('q') where code = %s"
    return tap.owner.execute(query, ["new_table_not_captured"]).fetchall()


def seen(tap: Tap) -> list[tuple[str, str | None, Any]]:
    """Operation, table and new values, or the reason of a resync."""
    return [(e.op, e.tbl, (e.new or {}).get("reason", e.new)) for e in tap.events()]


def test_rows_of_the_creating_transaction(tap: Tap) -> None:
    assert rule(tap, "shop.*", excepted=("shop.tmp_*",))
    with tap.app.transaction():
        tap.app.execute("create table t (id int primary key, note text); insert into t values (1, 'a')")
        tap.app.execute("update t set note = 'b'")
        tap.app.execute("create table tmp_1 (id int); create temp table t2 (id int)")
        tap.app.execute("create table if not exists t (x int)")
    tap.write('create table "T x" (id serial)', 'insert into "T x" default values', "delete from t")
    assert captured(tap) == {"shop.t", 'shop."T x"'}
    assert seen(tap) == [
        ("insert", "shop.t", {"id": 1, "note": "a"}),
        ("update", "shop.t", {"id": 1, "note": "b"}),
        ("insert", 'shop."T x"', {"id": 1}),
        ("delete", "shop.t", None),
    ]
    maintain(tap)
    assert (findings(tap), seen(tap)) == ([], [])


def test_rollbacks(tap: Tap) -> None:
    rule(tap, "shop.*")
    with tap.app.transaction():
        tap.app.execute("create table kept (id int)")
        with tap.app.transaction(force_rollback=True):
            tap.app.execute("create table lost (id int); insert into kept values (1); insert into lost values (1)")
        tap.app.execute("insert into kept values (2); create table lost (name text); insert into lost values ('x')")
    with tap.app.transaction(force_rollback=True):
        tap.app.execute("create table never (id int); insert into never values (1)")
    assert captured(tap) == {"shop.kept", "shop.lost"}
    assert [row[2] for row in seen(tap)] == [{"id": 2}, {"name": "x"}]


def test_tables_made_with_rows_are_a_resync(tap: Tap) -> None:
    rule(tap, "shop.*")
    tap.write(
        "create table made as select 1 as id",
        "select 2 as id into made_too",
        "create table empty as select 3 as id with no data",
        "insert into made values (4); insert into empty values (5)",
        "create table if not exists made as select 6 as id",
        "create materialized view passed as select 1 as id",
    )
    reason = "the table was made with rows, before capture began"
    assert seen(tap) == [
        ("resync", "shop.made", reason),
        ("resync", "shop.made_too", reason),
        ("insert", "shop.made", {"id": 4}),
        ("insert", "shop.empty", {"id": 5}),
    ]
    assert captured(tap) == {"shop.made", "shop.made_too", "shop.empty"}


def test_partitions_and_children(tap: Tap) -> None:
    rule(tap, "shop.*")
    tap.write(
        "create table root (id int) partition by range (id)",
        "create table low partition of root for values from (0) to (10)",
        "insert into root values (1); insert into low values (2)",
        "create table elder (id int)",
        "create table child () inherits (elder)",
        "insert into child values (3)",
        "alter table root detach partition low",
    )
    assert captured(tap) == {"shop.root", "shop.elder", "shop.child"}
    assert [(op, tbl) for op, tbl, _ in seen(tap) if op == "insert"] == [("insert", "shop.root")] * 2 + [
        ("insert", "shop.child")
    ]
    assert [row[0] for row in findings(tap)] == ["shop.low"]
    maintain(tap)
    assert "shop.low" in captured(tap)
    assert ("resync", "shop.low", "it was made or got its name before capture began") in seen(tap)
    assert findings(tap) == []


def test_schemas_that_come_later(tap: Tap) -> None:
    with tap.db.connect("su") as su:
        rule(tap, "gone*.*")
        su.execute("alter default privileges for role app grant usage on schemas to gdq_owner")
        su.execute(f"grant create on database {tap.db.name} to app".encode())
        tap.write("create schema gone create table a (id int) create table b (id int)", "insert into gone.b values (1)")
        su.execute("alter default privileges for role app revoke usage on schemas from gdq_owner")
    assert captured(tap) == {"gone.a", "gone.b"}
    assert seen(tap) == [("insert", "gone.b", {"id": 1})]
    tap.write("drop schema gone cascade")


def test_options_and_the_oldest_rule(tap: Tap) -> None:
    rule(tap, "shop.k*", mode="pk", include=["note"], operations=["insert", "delete"])
    rule(tap, "shop.*", exclude=["secret"])
    tap.write(
        "create table keyed (id int primary key, note text, more int)",
        "create table keyless (note text)",
        "create table open (id int, secret text)",
        "insert into keyed values (1, 'a', 2); update keyed set note = 'b'; insert into open values (3, 'x')",
    )
    info = "select table_name, mode, operations, columns from gdq.table_info('q') order by 1"
    assert tap.owner.execute(info).fetchall() == [
        ("shop.keyed", "pk", ["insert", "delete"], ["id", "note"]),
        ("shop.open", "full", ["insert", "update", "delete", "truncate"], ["id"]),
    ]
    assert [op for op, *_ in seen(tap)] == ["insert", "insert"]
    [(table, cause, cure)] = findings(tap)
    assert table == "shop.keyless"
    assert "matches shop.k*" in cause
    assert "has no primary key" in cause
    assert "Use mode full" in cure
    tap.write("alter table keyless add primary key (note)")
    tap.owner.execute("update gdq.passed_table set tried_at = now() - interval '2 min'")
    maintain(tap)
    assert findings(tap) == []
    assert ("resync", "shop.keyless") in [row[:2] for row in seen(tap)]


def test_what_cannot_be_captured_is_created(tap: Tap) -> None:
    rule(tap, "shop.*")
    tap.write("create unlogged table t (id int)", "insert into t values (1)")
    [(table, cause, _)] = findings(tap)
    assert table == "shop.t"
    assert "is unlogged" in cause
    info = "select missing, reason from gdq.new_table_info()"
    [(missing, reason)] = tap.owner.execute(info).fetchall()
    assert (missing, reason in cause) == (["shop.t"], True)
    tap.write("drop table t")
    assert tap.owner.execute(info).fetchone() == ([], None)


def test_without_a_right(tap: Tap) -> None:
    with tap.db.connect("su") as su:
        su.execute("alter default privileges for role app revoke trigger on tables from gdq_owner")
        rule(tap, "shop.*")
        tap.write("create table t (id int)", "insert into t values (1)")
        [(_, cause, cure)] = findings(tap)
        assert "no right to put triggers on shop.t" in cause
        assert "GRANT TRIGGER ON shop.t TO gdq_owner" in cure
        su.execute("grant trigger on shop.t to gdq_owner")
    maintain(tap)  # a failure is tried again after a minute
    assert captured(tap) == set()
    tap.owner.execute("update gdq.passed_table set tried_at = now() - interval '2 min'")
    maintain(tap)
    assert captured(tap) == {"shop.t"}
    assert [row[0] for row in seen(tap)] == ["resync"]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_old_snapshots(tap: Tap, level: str) -> None:
    rule(tap, "shop.*")
    with tap.app.transaction():
        tap.app.execute(f"set transaction isolation level {level}".encode())
        tap.app.execute("create table t (id int); insert into t values (1)")
    assert [row[0] for row in findings(tap)] == ["shop.t"]
    maintain(tap)
    tap.write("insert into t values (2)")
    assert [row[0] for row in seen(tap)] == ["resync", "insert"]
    assert findings(tap) == []


def test_two_transactions_at_once(tap: Tap) -> None:
    """The one that waits gives up before the application notices, and maintenance captures its table."""
    rule(tap, "shop.*")
    with tap.db.connect("app") as other:
        with tap.app.transaction():
            tap.app.execute("create table first (id int); insert into first values (1)")
            other.execute("create table second (id int); insert into second values (2)")
        other.execute("insert into second values (3)")
    assert [row[0] for row in findings(tap)] == ["shop.second"]
    assert "another transaction that captures a table is open" in findings(tap)[0][1]
    tap.owner.execute("update gdq.passed_table set tried_at = now() - interval '2 min'")
    maintain(tap)
    assert captured(tap) == {"shop.first", "shop.second"}
    assert [row[:2] for row in seen(tap)] == [("insert", "shop.first"), ("resync", "shop.second")]


def test_many_sessions(tap: Tap) -> None:
    rule(tap, "shop.*")

    def make(number: int) -> None:
        with tap.db.connect("app") as app:
            for i in range(4):
                app.execute(f"create table t{number}_{i} (id int)".encode())
                app.execute(f"insert into t{number}_{i} values ({i})".encode())

    threads = [threading.Thread(target=make, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tap.owner.execute("update gdq.passed_table set tried_at = now() - interval '2 min'")
    maintain(tap)
    assert len(captured(tap)) == 16
    rows = seen(tap)
    # a table that could not be captured at once is told
    assert {tbl for op, tbl, _ in rows} == captured(tap)
    assert findings(tap) == []


@pytest.mark.long
def test_a_script_with_many_tables(tap: Tap) -> None:
    """As pg_restore --single-transaction: tables, rows, then keys. Beyond half of the server's locks, it is told."""
    rule(tap, "shop.*")
    script = ["begin;"]
    script += [f"create table t{i} (id int, note text);" for i in range(30)]
    script += [f"copy t{i} from stdin;\n{i}\tx\n\\." for i in range(30)]
    script += [f"alter table only t{i} add constraint t{i}_pkey primary key (id);" for i in range(30)]
    done = psql(tap.db, "\n".join([*script, "commit;"]), dsn=tap.db.app_dsn)
    assert (done.returncode, done.stderr) == (0, "")
    maintain(tap)
    assert findings(tap) == []
    assert len(captured(tap)) == 30
    rows = seen(tap)
    assert sorted(row["id"] for op, _, row in rows if op == "insert") == list(range(30))
    assert "resync" not in {op for op, *_ in rows}


def test_too_many_locks(tap: Tap) -> None:
    """A transaction with half of the server's locks: its later commands need them more."""
    rule(tap, "shop.*")
    most = tap.owner.execute(
        "select current_setting('max_locks_per_transaction')::int"
        " * (current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int)"
    ).fetchone()
    assert most
    with tap.app.transaction():
        tap.app.execute("select pg_advisory_xact_lock(n) from generate_series(1, %s) n", [most[0] // 2 + 1])
        tap.app.execute("create table t (id int primary key)")
    assert "locks are taken" in findings(tap)[0][1]


def test_names_that_change(tap: Tap) -> None:
    tap.write("create table old_one (id int)")
    rule(tap, "shop.*", excepted=("shop.tmp_*",))
    tap.write("create table tmp_t (id int)", "create table public_t (id int)", "insert into tmp_t values (1)")
    maintain(tap)
    assert captured(tap) == {"shop.public_t"}
    tap.write("alter table tmp_t rename to t", "alter table old_one rename to older_one", "insert into t values (2)")
    assert [row[0] for row in findings(tap)] == ["shop.t"]
    maintain(tap)
    assert captured(tap) == {"shop.public_t", "shop.t"}
    assert ("resync", "shop.t") in [row[:2] for row in seen(tap)]


def test_removed_tables_stay_removed(tap: Tap) -> None:
    rule(tap, "shop.*")
    tap.write("create table t (id int)")
    tap.owner.execute("select gdq.remove_table('q', 'shop.t')")
    maintain(tap)
    assert (captured(tap), findings(tap)) == (set(), [])
    tap.write("drop table t", "create table t (id int)")
    assert captured(tap) == {"shop.t"}
    assert tap.owner.execute("select gdq.remove_new_tables('q')").fetchone() == (1,)
    tap.write("create table u (id int)")
    maintain(tap)
    assert (captured(tap), findings(tap)) == ({"shop.t"}, [])
    assert tap.owner.execute("select count(*) from gdq.passed_table").fetchone() == (0,)


def passed(tap: Tap) -> set[str]:
    return {name for (name,) in tap.owner.execute("select relid::text from gdq.passed_table")}


def test_dropped_tables_are_forgotten_at_once(tap: Tap) -> None:
    """A DROP waits for nobody who has the row locked; what it leaves so, maintenance removes."""
    tap.write(*(f"create table {name} (id int)" for name in "abc"), "create table d (id int) partition by list (id)")
    rule(tap, "shop.*")
    assert passed(tap) == {"shop.a", "shop.b", "shop.c", "shop.d"}
    with tap.app.transaction(force_rollback=True):
        tap.app.execute("drop table a")
    tap.write("drop table a, d")
    assert passed(tap) == {"shop.b", "shop.c"}
    with tap.owner.transaction():
        tap.owner.execute("select from gdq.passed_table for update")
        tap.write("drop table b")
    with tap.app.transaction():
        tap.app.execute("set transaction isolation level serializable")
        tap.app.execute("drop table c")
    assert all(name.isdigit() for name in passed(tap)), passed(tap)
    maintain(tap)
    assert passed(tap) == set()


def test_rules_that_are_refused(tap: Tap) -> None:
    for patterns, excepted, options, message in (
        (["t*"], [], {}, "pattern t\\* is not of the form SCHEMA.TABLE"),
        (["a.b.c"], [], {}, "not of the form"),
        (['shop."t'], [], {}, "a quote that does not end"),
        (["shop.*"], ["t"], {}, "pattern t is not of the form"),
        ([], [], {}, "no pattern is given"),
        (["shop.*"], [], {"colour": 1}, "unknown option colour"),
        (["shop.*"], [], {"mode": "half"}, 'unknown mode "half"'),
        (["shop.*"], [], {"include": ["a"]}, "include goes with mode pk"),
    ):
        with pytest.raises(psycopg.Error, match=message):
            tap.owner.execute("select gdq.add_new_tables('q', %s, %s, %s)", [patterns, excepted, Jsonb(options)])
    with pytest.raises(psycopg.errors.UndefinedObject, match=r'queue "q" has no rule for new tables shop\.x'):
        tap.owner.execute("select gdq.remove_new_tables('q', '{shop.x}')")
    with tap.db.connect("app") as app, pytest.raises(psycopg.errors.InsufficientPrivilege):
        app.execute("select gdq.add_new_tables('q', '{shop.*}')")


def test_patterns_are_psqls(tap: Tap) -> None:
    rule(tap, 'SHOP.a?_"%\\"', 'shop."B*"')
    tap.write(
        'create table "ab_%\\" (id int)', 'create table "ab_xx" (id int)', 'create table "B*" (id int)',
        'create table "Bx" (id int)',
    )  # fmt: skip
    assert captured(tap) == {'shop."ab_%\\"', 'shop."B*"'}


def test_targets_of_views_and_extensions_are_left_out(tap: Tap) -> None:
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    rule(tap, "*.*")
    tap.owner.execute(
        "select gdq.create_view('v', 'q', 'select id from shop.t', %s, '{shop.t}', '{}')", ['"shop"."target"']
    )
    tap.write("create table target (id int)", "create table gdq_state_0123456789ab (id int)")
    maintain(tap)
    assert captured(tap) == {"shop.t"}
    tap.owner.execute("select gdq.drop_view('v')")


def test_without_event_triggers(bare: Tap) -> None:
    rule(bare, "shop.*")
    bare.app.execute("select gdq.apply_ddl('q', 'create table t (id int); create table made as select 1 as id')")
    assert captured(bare) == {"shop.t", "shop.made"}
    bare.write("insert into t values (1)", "create table unseen (id int)", "insert into unseen values (2)")
    assert [row[0] for row in findings(bare)] == ["shop.unseen"]
    maintain(bare)
    bare.write("insert into unseen values (3)")
    rows = seen(bare)
    assert [row[:2] for row in rows] == [
        ("resync", "shop.made"),
        ("insert", "shop.t"),
        ("resync", "shop.unseen"),
        ("insert", "shop.unseen"),
    ]
    assert {row[0] for row in bare.owner.execute("select format from gdq.table_info()")} == {"json"}
