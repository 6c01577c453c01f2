"""What add_table() refuses, why, and that it then changes nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import errors

from tests.capture.test_types import HOSTILE, pin
from tests.support.events import Tap
from tests.support.waiting import until


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is tried, and the line that says why not."""

    table: str
    state: str
    says: str
    options: dict[str, Any] = field(default_factory=dict)


OBJECTS = (
    "create table t (id int primary key, v int, w int unique, x int not null, y int not null, z int not null)",
    "create unique index on t (x) where v > 0",
    "alter table t add constraint later unique (y) deferrable",
    "create view v as select * from t",
    "create materialized view m as select * from t",
    "create sequence s",
    "create unlogged table u (id int)",
    "create table parent (id int)",
    "create table child () inherits (parent)",
    "create table rls (id int)",
    "alter table rls enable row level security",
    "create table taken (id int)",
    "create table closed (id int)",
    "revoke trigger on closed from gdq_owner",
)
WRONG_TYPE, UNSUPPORTED, INVALID, NO_COLUMN = "42809", "0A000", "22023", "42703"
REFUSALS = (
    Refusal("shop.v", WRONG_TYPE, "shop.v is a view, only tables can be captured"),
    Refusal("shop.m", WRONG_TYPE, "shop.m is a materialized view, only tables can be captured"),
    Refusal("shop.f", WRONG_TYPE, "shop.f is a foreign table, only tables can be captured"),
    Refusal("shop.s", WRONG_TYPE, "shop.s is a sequence, only tables can be captured"),
    Refusal("shop.t_pkey", WRONG_TYPE, "shop.t_pkey is no table, only tables can be captured"),
    Refusal("mine", UNSUPPORTED, "mine is a temporary table: its rows end with its session"),
    Refusal("shop.u", UNSUPPORTED, "shop.u is unlogged: a crash empties it without any event"),
    Refusal("pg_class", UNSUPPORTED, "pg_catalog.pg_class is a system table"),
    Refusal("information_schema.sql_features", UNSUPPORTED, "information_schema.sql_features is a system table"),
    Refusal("gdq.queue", UNSUPPORTED, "gdq.queue is a system table"),
    Refusal("gdq_log.q1_s0", UNSUPPORTED, "gdq_log.q1_s0 is a system table"),
    Refusal("shop.parent", UNSUPPORTED, "shop.parent has the inheritance child shop.child"),
    Refusal("shop.rls", UNSUPPORTED, "shop.rls has row level security"),
    Refusal("shop.taken", "42710", "table shop.taken is already captured by this queue"),
    Refusal("shop.closed", "42501", "no right to put triggers on shop.closed"),
    Refusal("shop.t", INVALID, 'unknown mode "rows"', {"mode": "rows"}),
    Refusal("shop.t", INVALID, "unknown mode", {"mode": None}),
    Refusal("shop.t", INVALID, "include goes with mode pk", {"include": ["v"]}),
    Refusal("shop.t", INVALID, "columns and exclude go with mode full", {"mode": "pk", "columns": ["v"]}),
    Refusal("shop.t", INVALID, "columns and exclude go with mode full", {"mode": "pk", "exclude": ["v"]}),
    Refusal("shop.t", INVALID, "give columns or exclude, not both", {"columns": ["id"], "exclude": ["v"]}),
    Refusal("shop.t", NO_COLUMN, 'key: table shop.t has no column "no"', {"key": ["no"]}),
    Refusal("shop.t", NO_COLUMN, 'include: table shop.t has no column "no"', {"mode": "pk", "include": ["no"]}),
    Refusal("shop.t", NO_COLUMN, 'columns: table shop.t has no column "ctid"', {"columns": ["ctid"]}),
    Refusal("shop.t", NO_COLUMN, 'exclude: table shop.t has no column "V"', {"exclude": ["V"]}),
    Refusal("shop.t", INVALID, "key column w of shop.t may be null", {"key": ["w"]}),
    Refusal("shop.t", INVALID, "no unique index of shop.t has exactly the key columns", {"key": ["x"]}),
    Refusal("shop.t", INVALID, "no unique index of shop.t has exactly the key columns", {"key": ["y"]}),
    Refusal("shop.t", INVALID, "no unique index of shop.t has exactly the key columns", {"key": ["z"]}),
    Refusal("shop.t", INVALID, "no unique index of shop.t has exactly the key columns", {"key": ["id", "x"]}),
    Refusal("shop.t", INVALID, "key column id of shop.t must be logged", {"exclude": ["id"]}),
    Refusal("shop.t", INVALID, "key column id of shop.t must be logged", {"columns": ["v"]}),
    Refusal("shop.t", INVALID, "columns: name at least one column", {"columns": []}),
)


def captured(tap: Tap) -> list[Any]:
    """Everything that capture leaves in the database."""
    return tap.owner.execute(
        "select 'trigger', tgname::text from pg_trigger where tgname like '!gdq%%'"
        " union all select 'function', proname from pg_proc where pronamespace = 'gdq_log'::regnamespace"
        " union all select 'table', relname from pg_class where relnamespace = 'gdq_log'::regnamespace"
        " union all select 'captured', table_name from gdq.table_info() order by 1, 2"
    ).fetchall()


def test_refusals_are_one_line_with_a_cure(tap: Tap) -> None:
    tap.write(*OBJECTS)
    with tap.db.connect("su") as su:
        su.execute("create foreign data wrapper nowhere")
        su.execute("create server nowhere foreign data wrapper nowhere")
        su.execute("create foreign table shop.f (id int) server nowhere")
    tap.owner.execute("create temp table mine (id int)")
    tap.add("shop.taken")
    before = captured(tap)
    for case in REFUSALS:
        with pytest.raises(psycopg.Error) as e:
            tap.add(case.table, **case.options)
        said = e.value.diag
        assert case.says in (said.message_primary or ""), case
        assert said.sqlstate == case.state, case
        assert said.message_hint, case
        assert "\n" not in f"{said.message_primary}{said.message_hint}", case
    assert captured(tap) == before


def test_queue_table_and_caller_must_be_right(tap: Tap) -> None:
    tap.write("create table t (id int)")
    with pytest.raises(errors.UndefinedObject, match='queue "none" does not exist'):
        tap.owner.execute("select gdq.add_table('none', 'shop.t')")
    with pytest.raises(errors.UndefinedTable):
        tap.add("shop.none")
    with pytest.raises(errors.UndefinedTable, match="table 4294967295 does not exist"):
        tap.add("4294967295")
    with pytest.raises(errors.UndefinedObject, match=r'table shop\.t is not captured by queue "q"'):
        tap.owner.execute("select gdq.remove_table('q', 'shop.t')")
    with pytest.raises(errors.InsufficientPrivilege, match="permission denied for schema gdq"):
        tap.app.execute("select gdq.add_table('q', 'shop.t')")
    tap.owner.execute("set default_transaction_isolation = 'repeatable read'")
    with pytest.raises(psycopg.Error, match="needs READ COMMITTED") as e:
        tap.add("shop.t")
    assert e.value.diag.sqlstate == "GDQ04"


def test_without_event_triggers_nothing_is_captured_by_type(tap: Tap) -> None:
    tap.write("create table t (id int)")
    with tap.db.connect("su") as su:
        for spoil, mend in (
            ('alter event trigger "!gdq_ddl" disable', 'alter event trigger "!gdq_ddl" enable always'),
            ('drop event trigger "!gdq_rewrite"', "select gdq.create_event_triggers()"),
            ('alter event trigger "!gdq_ddl" enable', "select gdq.create_event_triggers()"),
        ):
            su.execute(spoil)
            with pytest.raises(
                errors.ObjectNotInPrerequisiteState, match="event triggers of gdq are missing or off"
            ) as e:
                tap.add("shop.t", format="typed")
            assert "gdq create-event-triggers" in (e.value.diag.message_hint or "")
            su.execute(mend)
    tap.add("shop.t")


def test_row_level_security_when_allowed(tap: Tap) -> None:
    tap.write(
        "create table t (id int)",
        "alter table t enable row level security",
        "alter table t force row level security",
        "create policy p on t using (id > 0)",
    )
    tap.add("shop.t", allow_rls=True)
    tap.write("insert into t values (1)", "delete from t")
    assert tap.images() == [("insert", None, None, {"id": 1}), ("delete", None, {"id": 1}, None)]


def test_inheritance_parent_after_its_children(tap: Tap) -> None:
    tap.write("create table parent (id int)", "create table child (x int) inherits (parent)")
    tap.add("shop.child")
    tap.add("shop.parent")
    tap.write("insert into parent values (1)", "insert into child values (2, 3)", "update parent set id = id + 10")
    tap.write("truncate parent")
    seen = tap.events()
    assert [(e.op, e.tbl, e.new) for e in seen[:4]] == [
        ("insert", "shop.parent", {"id": 1}),
        ("insert", "shop.child", {"id": 2, "x": 3}),
        ("update", "shop.parent", {"id": 11}),
        ("update", "shop.child", {"id": 12, "x": 3}),
    ]
    assert {(e.op, e.tbl) for e in seen[4:]} == {("truncate", "shop.parent"), ("truncate", "shop.child")}


def test_settings_of_the_caller_change_nothing(tap: Tap) -> None:
    tap.write("create table t (id int primary key)", "create table gone (id int primary key)")
    pin(tap.owner, HOSTILE | {"default_transaction_isolation": "read committed", "plpgsql.extra_errors": "all"})
    with pytest.raises(errors.FeatureNotSupported, match=r"gdq\.queue is a system table"):
        tap.add("gdq.queue")
    tap.add("shop.t")
    tap.add("shop.gone", mode="pk")
    tap.write("insert into t values (1)", "insert into gone values (1)")
    assert [e.tbl for e in tap.events()] == ["shop.t", "shop.gone"]
    assert [r[0] for r in tap.owner.execute("select table_name from gdq.table_info('q')")] == ["shop.gone", "shop.t"]
    tap.owner.execute("select gdq.remove_table('q', 'shop.gone')")


def test_wide_values_are_warned_about(tap: Tap) -> None:
    said: list[str] = []
    tap.owner.add_notice_handler(lambda d: said.append(f"{d.severity}: {d.message_primary} {d.message_hint}"))
    tap.write(
        "create table t (id int primary key, narrow text, wide text)", "alter table t alter wide set storage external"
    )
    for options, warned in (({}, False), ({}, True), ({"exclude": ["wide", "narrow"]}, False), ({"mode": "pk"}, False)):
        tap.add("shop.t", **options)
        tap.owner.execute("select gdq.remove_table('q', 'shop.t')")
        assert bool(said) is warned, options
        if warned:
            assert said[0].startswith("WARNING: table shop.t holds large out-of-line values (narrow, wide)")
            assert said[0].endswith("leave them out with exclude, or capture in pk mode.")
            said.clear()
        tap.write("insert into t values (1, 'a', repeat('x', 10000)) on conflict do nothing")


@pytest.mark.parametrize("partitioned", [False, True])
def test_busy_table(tap: Tap, partitioned: bool) -> None:
    """While a writer holds the table neither add_table() nor remove_table() waits long, makes others wait long, or
    changes anything."""
    if partitioned:
        tap.write("create table t (id int) partition by list (id)", "create table l partition of t default")
    else:
        tap.write("create table t (id int)")
    for call in ("gdq.add_table('q', 'shop.t')", "gdq.remove_table('q', 'shop.t', force => true)"):
        before = captured(tap)
        with tap.db.connect("app", autocommit=False) as holder, tap.db.connect("app") as other:
            holder.execute(f"insert into {'l' if partitioned else 't'} values (1)".encode())
            result: list[Any] = []
            thread = threading.Thread(target=timed, args=(tap, call, result))
            thread.start()
            wait_for_a_waiter(tap)
            started = time.monotonic()
            other.execute("insert into shop.t values (2)")
            waited = time.monotonic() - started
            thread.join()
        error, took = result
        assert isinstance(error, errors.LockNotAvailable), error
        assert "busy: no lock within 500 ms" in (error.diag.message_primary or "")
        assert "Nothing was changed" in (error.diag.message_hint or "")
        assert captured(tap) == before
        started = time.monotonic()
        tap.owner.execute(f"select {call}".encode())
        free = time.monotonic() - started
        assert max(took, waited) < 2 + 20 * free
    assert not [row for row in captured(tap) if row[0] == "captured"]


@pytest.mark.server
@pytest.mark.parametrize("same", [True, False])
def test_two_transactions_that_capture_tables_take_turns(tap: Tap, same: bool) -> None:
    """The second waits for the first to end, however long it is open, and meanwhile holds up no writer."""
    tap.write("create table t (id int)", "create table u (id int)")
    call = f"gdq.add_table('q', 'shop.{'t' if same else 'u'}')"
    with tap.db.connect(autocommit=False) as first:
        first.execute("select gdq.add_table('q', 'shop.t')")
        result: list[Any] = []
        thread = threading.Thread(target=timed, args=(tap, call, result))
        thread.start()
        waiting = "select clock_timestamp() - waitstart > interval '0.7 s' from pg_locks where locktype = 'advisory'"
        until(lambda: (True,) in tap.app.execute(waiting).fetchall())
        tap.write("set lock_timeout = '10 s'", "insert into u values (1)")
        first.commit()
    thread.join()
    if same:
        assert isinstance(result[0], errors.DuplicateObject), result
    else:
        assert result[0] is None
    tap.write("insert into t values (1)", "insert into u values (2)")
    assert [e.tbl for e in tap.events()] == (["shop.t"] if same else ["shop.t", "shop.u"])


def timed(tap: Tap, call: str, result: list[Any]) -> None:
    """Leaves in `result` the error of a call, or None, and the seconds that it took."""
    started = time.monotonic()
    with tap.db.connect() as owner:
        try:
            owner.execute(f"select {call}".encode())
        except psycopg.Error as error:
            result.append(error)
        else:
            result.append(None)
    result.append(time.monotonic() - started)


def wait_for_a_waiter(tap: Tap) -> None:
    query = "select from pg_locks where not granted and locktype = 'relation'"
    until(lambda: tap.app.execute(query).rowcount, "somebody who waits for the table")
