"""Where event triggers are refused: DDL through gdq.apply_ddl(), and what is made of DDL that passed it by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import errors

from gdq import Consumer
from gdq.cli import main
from gdq.errors import ResyncRequired
from tests.support.events import Event, Tap
from tests.support.guarded import maintain
from tests.support.programs import gdq, start_gdq
from tests.support.unguarded import drop_guards
from tests.support.waiting import SECONDS, until

T = "create table t (id int primary key, a int)"


def apply(tap: Tap, ddl: str, *tables: str) -> int:
    found = tap.app.execute("select gdq.apply_ddl('q', %s, %s::regclass[])", [ddl, list(tables) or None]).fetchone()
    assert found
    return int(found[0])


def state(tap: Tap, table: str = "shop.t") -> tuple[Any, ...] | None:
    query = "select format, state, reason from gdq.table_info('q') where table_name = %s"
    return tap.owner.execute(query, [table]).fetchone()


def test_ddl_is_followed(bare: Tap) -> None:
    bare.write(T, "create table other (id int)")
    bare.add("shop.t")
    bare.add("shop.other")
    bare.write("insert into t values (1, 1)")
    assert apply(bare, "alter table t add b text; alter table t rename a to c", "shop.t") == 1
    bare.write("insert into t values (2, 2, 'x')")
    assert apply(bare, "alter table t drop c") == 1
    bare.write("insert into t values (3, 'y')", "delete from t where id = 3")
    assert apply(bare, "alter table t rename to u; create index on u (b); alter table u alter b set default ''") == 0
    bare.write("insert into u values (4, 'z')")
    events = bare.events()
    assert [e.op for e in events] == ["insert", "ddl", "insert", "ddl", "insert", "delete", "ddl", "insert"]
    assert [e.new or e.old for e in events if e.op in ("insert", "delete")] == [
        {"id": 1, "a": 1},
        {"id": 2, "c": 2, "b": "x"},
        {"id": 3, "b": "y"},
        {"id": 3, "b": "y"},
        {"id": 4, "b": "z"},
    ]
    first = events[1].new or {}
    assert (first["tag"], first["statement"]) == (
        "APPLY DDL",
        "alter table t add b text; alter table t rename a to c",
    )
    assert [column["name"] for column in first["new_columns"]] == ["id", "c", "b"]
    assert (events[6].new or {})["old_table"] == "shop.t"
    maintain(bare)
    assert state(bare, "shop.u") == ("json", "ok", None)


@pytest.mark.parametrize(
    ("ddl", "reason"),
    [
        ("alter table t add b int default 5", "added with a default"),
        ("alter table t alter a type int using a + 1", "was rewritten"),
        ("alter type mood rename value 'sad' to 'low'", "ALTER TYPE"),
        ("alter table t set unlogged", "is unlogged"),
        ("alter table pair add z int", "stored values read otherwise"),
    ],
)
def test_rows_that_change_without_events_ask_for_a_resync(bare: Tap, ddl: str, reason: str) -> None:
    bare.write("create type mood as enum ('sad', 'happy')", "create table pair (x int, y int)")
    bare.write("create table t (id int primary key, a int, m mood, p pair)")
    bare.add("shop.t")
    bare.write("insert into t values (1, 1, 'sad', '(1,2)')")
    apply(bare, ddl)
    assert any(reason in (e.new or {})["reason"] for e in bare.events() if e.op == "resync")


def test_rows_written_between_the_commands_are_a_resync(bare: Tap) -> None:
    """Capture follows when all commands are through."""
    bare.write(T)
    bare.add("shop.t")
    apply(bare, "alter table t drop a; insert into t values (1)")
    assert sorted(e.op for e in bare.events()) == ["ddl", "resync"]


def test_dropped_table_and_partitions(bare: Tap) -> None:
    bare.write(
        "create table t (id int primary key) partition by list (id)",
        "create table t1 partition of t for values in (1)",
        "create table gone (id int)",
    )
    bare.add("shop.t")
    bare.add("shop.gone")
    apply(bare, "create table t2 partition of t for values in (2); drop table gone; truncate t2")
    bare.write("insert into t values (2)", "truncate t2")
    seen = [(e.op, e.tbl) for e in bare.events() if e.op != "resync"]
    assert seen[-2:] == [("insert", "shop.t"), ("truncate", "shop.t")]
    assert ("ddl", "shop.gone") in seen
    maintain(bare)
    assert state(bare) == ("json", "ok", None)


def test_errors_leave_nothing_half_done(bare: Tap) -> None:
    bare.write(T)
    bare.add("shop.t", mode="pk")
    before = bare.owner.execute("select version from gdq.table_info('q')").fetchone()
    with pytest.raises(errors.UndefinedColumn):
        apply(bare, "alter table t add b int; alter table t drop nothing")
    with pytest.raises(errors.FeatureNotSupported, match="no primary key"):
        apply(bare, "alter table t add b int; alter table t drop constraint t_pkey")
    with pytest.raises(errors.UndefinedObject, match='queue "x" does not exist'):
        bare.app.execute("select gdq.apply_ddl('x', 'select 1')")
    with bare.db.connect("app") as writer, writer.transaction():
        writer.execute("insert into shop.t values (1)")
        with pytest.raises(errors.LockNotAvailable):
            apply(bare, "alter table t add b int", "shop.t")
    assert bare.owner.execute("select version from gdq.table_info('q')").fetchone() == before
    bare.write("insert into t values (2)")
    assert [e.key for e in bare.events()] == [{"id": 1}, {"id": 2}]
    bare.app.execute("set default_transaction_isolation = 'repeatable read'")
    with pytest.raises(psycopg.Error) as wrong:
        apply(bare, "alter table t add b int")
    assert wrong.value.sqlstate == "GDQ04"


def test_with_event_triggers_it_is_the_same(tap: Tap) -> None:
    tap.write(T)
    tap.add("shop.t")
    with tap.db.connect("su") as su:
        su.execute("set search_path = shop, pg_catalog")
        su.execute("select gdq.apply_ddl('q', 'alter table t add b int; alter table t add c int')")
    tap.write("insert into t values (1, 2, 3, 4)")
    assert [e.op for e in tap.events()] == ["ddl", "ddl", "insert"]


def test_command_tries_again_while_the_table_is_busy(bare: Tap, tmp_path: Path) -> None:
    bare.write(T)
    bare.add("shop.t")
    file = tmp_path / "add.sql"
    file.write_text("alter table shop.t add b int;\n")
    done = gdq("apply-ddl", "q", "-f", str(file), "--lock", "shop.t", dsn=bare.db.su_dsn)
    assert (done.returncode, done.stderr) == (0, "applied: 1 captured table(s) with new columns\n")
    assert gdq("apply-ddl", "q", "-f", str(file), dsn=bare.db.su_dsn).returncode == 1


def test_command_gives_way_to_a_session_that_holds_the_table(bare: Tap, tmp_path: Path) -> None:
    """It waits in short tries, between which others write, and follows once the table is free."""
    bare.write(T)
    bare.add("shop.t")
    file = tmp_path / "add.sql"
    file.write_text("alter table shop.t add b int")
    waits = "select from pg_locks where not granted and relation = 'shop.t'::regclass"
    with bare.db.connect("app", autocommit=False) as holder, bare.db.connect("su") as su:
        holder.execute("lock table shop.t in share update exclusive mode")
        applying = start_gdq("apply-ddl", "q", "-f", str(file), "--lock", "shop.t", dsn=bare.db.su_dsn)
        until(lambda: su.execute(waits).rowcount == 1)
        until(lambda: su.execute(waits).rowcount == 0)
        bare.write("insert into t values (1, 1)")
        holder.commit()
        assert applying.communicate(timeout=SECONDS) == ("", "applied: 1 captured table(s) with new columns\n")
    bare.write("insert into t values (2, 2, 2)")
    assert [(e.op, e.new) for e in bare.events() if e.op != "ddl"] == [
        ("insert", {"id": 1, "a": 1}),
        ("insert", {"id": 2, "a": 2, "b": 2}),
    ]


TICKING = {
    "tick": ["q"],
    "peek": ["q", "c"],
    "seek": ["q", "c", "--now"],
    "register-consumer": ["q", "d"],
    "create-view": ["v", "--queue", "q", "--sql", "-", "--target", "shop.v"],
}


@pytest.mark.parametrize("command", TICKING)
def test_commands_that_take_a_tick_look_for_a_forgotten_alter_first(bare: Tap, command: str) -> None:
    bare.write(T)
    bare.add("shop.t")
    bare.write("alter table t add b int")
    arguments = [command, *TICKING[command], "--dsn", bare.db.su_dsn]
    done = CliRunner().invoke(main, arguments, input="select id, a from shop.t")
    # the events that peek would show begin with the gap
    assert done.exit_code == (3 if command == "peek" else 0), done.stderr
    reason = "column b of shop.t was changed or its values were, and no event trigger saw it"
    assert state(bare) == ("json", "resync", reason)


FORGOTTEN = {
    "add": "alter table t add b int",
    "drop": "alter table t drop a",
    "swap": "alter table t drop a, add b int",
    "type": "alter table t alter a type text using 'x' || a",
    "values": "alter table t alter a type int using a + 1",
    "rename": "alter table t rename a to b",
    "trigger": "alter table t disable trigger user",
    "key": "alter table t drop constraint t_pkey",
}


@pytest.mark.parametrize("kind", FORGOTTEN)
def test_forgotten_alter_never_breaks_a_write_and_is_found(bare: Tap, kind: str) -> None:
    """No batch has rows of the altered table without the resync, and capture comes back."""
    bare.write(T)
    bare.add("shop.t")
    bare.write(
        "insert into t values (1, 1)",
        FORGOTTEN[kind],
        "insert into t (id) values (2)",
        "update t set id = 3 where id = 2",
    )
    bare.owner.execute("select gdq.force_tick('q')")
    with Consumer(bare.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            with pytest.raises(ResyncRequired):
                list(batch.events())
            break
    bare.write("insert into t (id) values (4)")
    maintain(bare)
    if kind != "trigger":
        assert state(bare) == ("json", "resync", "changes before this point were missed")
    bare.events()
    bare.write("insert into t (id) values (5)", "delete from t where id = 5")
    last = bare.events()
    assert [e.op for e in last] == ["insert", "delete"]
    names = [row[0] for row in bare.owner.execute("select unnest(columns) from gdq.table_info('q')")]
    assert names
    assert set(last[0].new or {}) == set(names)


def test_ticker_finds_a_forgotten_alter_by_itself(bare: Tap) -> None:
    bare.write(T)
    bare.add("shop.t")
    bare.write("alter table t add b int", "insert into t values (1, 2, 3)")
    assert gdq("ticker", "--once", dsn=bare.db.dsn).returncode == 0
    bare.write("insert into t values (2, 2, 3)")
    assert [(e.op, e.new) for e in bare.events() if e.op == "insert"][-1] == ("insert", {"id": 2, "a": 2, "b": 3})


def test_harmless_ddl_is_no_gap(bare: Tap) -> None:
    bare.write(T)
    bare.add("shop.t")
    bare.write(
        "alter table t alter a set statistics 5",
        "create index on t (a)",
        "create trigger x before update on t for each row execute function suppress_redundant_updates_trigger()",
        "insert into t values (1)",
        "analyze t",
    )
    maintain(bare)
    assert [e.op for e in bare.events()] == ["insert"]
    assert state(bare) == ("json", "ok", None)


def test_row_that_does_not_fit_is_a_resync_in_its_place(bare: Tap) -> None:
    bare.write(T)
    bare.add("shop.t")
    bare.write("insert into t values (1, 1)", "alter table t add b int", "insert into t values (2, 2, 2)")
    bare.owner.execute("select gdq.check_tables()")
    batch = bare.batch()
    assert [(e.op, (e.new or {}).get("kind")) for e in batch.events] == [
        ("insert", None),
        ("resync", "gap"),
        ("resync", "disarmed"),
    ]


def test_event_triggers_that_go_make_the_format_json(tap: Tap) -> None:
    tap.write(T, "create table partly (id int primary key, secret text)")
    tap.add("shop.t")
    tap.add("shop.partly", exclude=["secret"])
    tap.write("insert into t values (1, 1)")
    assert state(tap) == ("typed", "ok", None)
    drop_guards(tap)
    with tap.db.connect("app") as late, late.transaction():
        late.execute("insert into shop.t values (2, 2)")
        maintain(tap)  # the table is busy
        assert state(tap) == ("typed", "ok", None)
    maintain(tap)
    assert state(tap) == ("json", "ok", None)
    tap.write("insert into t values (3, 3)", "insert into partly values (1, 'x')")
    found = state(tap, "shop.partly")
    assert found
    assert found[:2] == ("typed", "resync")
    assert "columns, exclude or where need format typed" in found[2]
    seen: list[Event] = tap.events()
    assert [e.new for e in seen if e.op == "insert"] == [{"id": n, "a": n} for n in (1, 2, 3)]
    assert [(e.new or {})["tag"] for e in seen if e.op == "ddl"] == ["FORMAT JSON"]
    tap.write("alter table t drop a, add b text", "insert into t values (4, 'x')")  # would fail with a typed log
    with tap.db.connect("su") as su:
        su.execute("select gdq.create_event_triggers()")
    maintain(tap)
    tap.events()
    assert state(tap, "shop.partly") == ("typed", "ok", None)
    assert state(tap) == ("json", "ok", None)


def test_typed_table_altered_without_event_triggers_is_switched_off(tap: Tap) -> None:
    """Its writes fail until a ticker or maintain() looks, as docs/guarantees.md says; not longer."""
    tap.write(T)
    tap.add("shop.t")
    drop_guards(tap)
    tap.write("alter table t drop a")
    with pytest.raises(errors.UndefinedColumn):
        tap.write("insert into t values (1)")
    maintain(tap)
    tap.write("insert into t values (2)")
    seen = tap.events()
    assert [(e.op, (e.new or {}).get("kind")) for e in seen][:1] == [("resync", "disarmed")]
    assert seen[-1].new == {"id": 2}
    assert state(tap) == ("json", "ok", None)


def test_typed_log_takes_what_a_widened_column_holds(tap: Tap) -> None:
    """The length of a type is no part of the log, or writes would fail until somebody looks."""
    tap.write("create table t (id int primary key, v varchar(3), n numeric(4, 1), b varbit(2), c char(2))")
    tap.add("shop.t")
    drop_guards(tap)
    tap.write(
        "alter table t alter v type varchar(9), alter n type numeric(9, 3), alter b type varbit(5)",
        "alter table t alter c type char(4)",
        "insert into t values (1, 'longer', 12345.678, '10110', 'abcd')",
    )
    maintain(tap)
    (first, *others) = tap.events()
    assert first.new == {"id": 1, "v": "longer", "n": "12345.678", "b": "10110", "c": "abcd"}
    assert [e.op for e in others] == ["resync", "resync"]
