"""Messages of an application: what goes in, who gets them, and what may go wrong."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.types.json import Jsonb

import gdq
from gdq.errors import GdqError
from gdq.message import take_messages
from tests.capture.test_names import ODD
from tests.support.events import Tap, drain
from tests.support.programs import gdq as command
from tests.support.server import Database

INSERT_EVENT = "gdq.insert_event(text, text, jsonb, text, text, text, text)"
INSERT_EVENT_TEXT = INSERT_EVENT.replace("jsonb", "text")


def grant(tap: Tap, *functions: str) -> None:
    tap.owner.execute("grant usage on schema gdq to app")
    for function in functions:
        tap.owner.execute(f"grant execute on function {function} to app".encode())


def sent(tap: Tap) -> list[dict[str, Any] | None]:
    return [event.new for event in tap.events() if event.op == "message"]


def test_messages_come_in_order_with_the_changes(tap: Tap) -> None:
    """The application has EXECUTE on one function alone; rollbacks and savepoints take messages along."""
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    grant(tap, INSERT_EVENT, INSERT_EVENT_TEXT)
    with tap.app.transaction():
        tap.write("insert into t values (1)")
        (first,) = tap.app.execute(
            "select gdq.insert_event('q', 'paid', jsonb_build_object('order', 7))"
        ).fetchone() or (0,)
        tap.write("insert into t values (2)")
        with tap.app.transaction(force_rollback=True):
            tap.write("select gdq.insert_event('q', 'never', '1'::jsonb)")
        (last,) = tap.app.execute("select gdq.insert_event('q', null, 'any text', 'a', null, 'c')").fetchone() or (0,)
    with tap.app.transaction(force_rollback=True):
        tap.write("select gdq.insert_event('q', 'never', '1'::jsonb)")
    assert first < last
    assert [(e.op, e.tbl, e.key, e.old, e.new) for e in tap.events()] == [
        ("insert", "shop.t", {"id": 1}, None, {"id": 1}),
        ("message", None, None, None, {"type": "paid", "data": {"order": 7}}),
        ("insert", "shop.t", {"id": 2}, None, {"id": 2}),
        ("message", None, None, None, {"type": None, "data": "any text", "extra1": "a", "extra3": "c"}),
    ]


def test_many_in_one_statement(tap: Tap) -> None:
    grant(tap, "gdq.insert_events(text, text[], jsonb[], text[], text[], text[], text[])")
    tap.write("create table source as select i from generate_series(1, 2000) i")
    statement = """select gdq.insert_events('q', array_agg('t' || i order by i), array_agg(to_jsonb(i) order by i),
                     extra2 => array_agg(nullif(i, 2)::text order by i)) from source"""
    assert tap.app.execute(statement.encode()).fetchone() == (2000,)
    tap.owner.execute("select gdq.insert_events('q', array['a', null], array['x', null])")
    expected: list[Any] = [{"type": f"t{n}", "data": n, "extra2": str(n)} for n in range(1, 2001)]
    del expected[1]["extra2"]
    assert sent(tap) == [*expected, {"type": "a", "data": "x"}, {"type": None, "data": None}]
    assert tap.owner.execute("select gdq.insert_events('q', '{}'::text[], '{}'::jsonb[])").fetchone() == (0,)
    for arrays in (
        "array['a', 'b'], array['x']",
        "array['a'], array['x'], array['y', 'z']",
        "null::text[], array['x']",
        "array['a'], null::text[]",
    ):
        with pytest.raises(errors.ArraySubscriptError, match="not of one length"):
            tap.owner.execute(f"select gdq.insert_events('q', {arrays})".encode())
    assert sent(tap) == []


def test_from_a_trigger_with_a_hostile_search_path(tap: Tap) -> None:
    """The caller's own functions, operators and types do not get between."""
    tap.write(
        "create table t (id int primary key)",
        "create function tell() returns trigger language plpgsql as"
        " $f$ begin perform gdq.insert_event('q', 'new', pg_catalog.to_jsonb(new)); return null; end $f$",
        "create trigger tell after insert on t for each row execute function tell()",
        "create function to_jsonb(pg_catalog.text) returns jsonb language sql as 'select null::jsonb'",
        "create function nextval(regclass) returns bigint language sql as 'select 1::bigint'",
        "create function concat(variadic pg_catalog.text[]) returns pg_catalog.text language sql as $$ select 'x' $$",
        "create function same(pg_catalog.text, pg_catalog.text) returns boolean language sql as 'select true'",
        "create operator = (leftarg = pg_catalog.text, rightarg = pg_catalog.text, function = same)",
        "create domain text as pg_catalog.int4",
    )
    grant(tap, INSERT_EVENT, INSERT_EVENT_TEXT)
    tap.owner.execute("select gdq.create_queue('r')")
    with tap.db.connect("app") as writer:
        writer.execute("set search_path = pg_temp, shop, pg_catalog")
        writer.execute("insert into t values (7)")
        writer.execute("select gdq.insert_event('q', 'x', 'y')")
    assert sent(tap) == [{"type": "new", "data": {"id": 7}}, {"type": "x", "data": "y"}]


def test_every_queue_gets_its_own(tap: Tap) -> None:
    """Also by names that are odd, one the start of the other, made and dropped in any order."""
    names = [*ODD, "a", "aa", "ab", "b", "é", "z" * 63]
    for name in names:
        tap.owner.execute("select gdq.create_queue(%s)", [name])
        tap.owner.execute("select gdq.register_consumer(%s, 'c')", [name])
    for name in names[::3]:
        tap.owner.execute("select gdq.drop_queue(%s, true)", [name])
        with pytest.raises(errors.UndefinedObject, match="does not exist"):
            gdq.insert_event(tap.owner, name, "t", None)
    kept = [name for n, name in enumerate(names) if n % 3]
    for name in kept:
        gdq.insert_event(tap.owner, name, "t", name)
    for name in kept:
        assert [row[7] for row in drain(tap.db, name)] == [{"type": "t", "data": name}]
    for none in ("", "nothing", None):
        with pytest.raises(errors.UndefinedObject, match="does not exist"):
            tap.owner.execute("select gdq.insert_event(%s, 't', 'x')", [none])


def test_queues_made_at_once(db: Database) -> None:
    """One function leads to all queues: who makes a queue waits for who makes another."""
    with db.connect() as owner, db.connect() as other, db.connect(autocommit=True) as third:
        owner.execute("begin")
        owner.execute("select gdq.create_queue('a')")
        waiter = [other.info.backend_pid]
        thread = threading.Thread(target=lambda: other.execute("select gdq.create_queue('b')"))
        thread.start()
        while third.execute("select cardinality(pg_blocking_pids(%s)) > 0", waiter).fetchone() != (True,):
            pass
        owner.execute("commit")
        thread.join()
        for name in "ab":
            assert gdq.insert_event(third, name, "t", 1) == 1


def test_reaches_a_queue_younger_than_the_snapshot(tap: Tap) -> None:
    with tap.db.connect() as writer:
        writer.execute("begin isolation level repeatable read")
        writer.execute("select 1")
        tap.owner.execute("select gdq.create_queue('r')")
        tap.owner.execute("select gdq.register_consumer('r', 'c')")
        gdq.insert_event(writer, "r", "t", 1)
        writer.execute("commit")
    assert [row[7] for row in drain(tap.db, "r")] == [{"type": "t", "data": 1}]


def test_survives_rotation(tap: Tap) -> None:
    """A writer that has used the functions goes on while the log is switched and emptied."""
    tap.owner.execute("update gdq.queue set rotation_period = '1 microsecond'")
    seen = []
    with tap.db.connect() as writer:
        for number in range(7):
            gdq.insert_event(writer, "q", "t", number)
            gdq.insert_events(writer, "q", [gdq.Message("u", number)])
            seen += sent(tap)
            tap.owner.execute("select gdq.maintain()")
            tap.owner.execute("select gdq.maintain()")
    assert [(new["type"], new["data"]) for new in seen if new] == [(t, n) for n in range(7) for t in "tu"]
    assert tap.owner.execute(
        "select current_slot > 0 or switched_at > queue.created_at from gdq.event_ring join gdq.queue using (queue_id)"
    ).fetchone() == (True,)


def test_consumers_of_certain_tables(tap: Tap) -> None:
    """They get no messages unless they ask; nobody loses one by that."""
    tap.write("create table t (id int primary key)", "create table u (id int primary key)")
    tap.add("shop.t")
    tap.add("shop.u")
    for name in ("plain", "asks"):
        tap.owner.execute("select gdq.register_consumer('q', %s, tables => array['shop.t']::regclass[])", [name])
    assert take_messages(tap.owner, "q", "asks") is True
    assert take_messages(tap.owner, "q", "asks") is False
    assert take_messages(tap.owner, "q", "c") is False
    tap.write("insert into t values (1)", "insert into u values (1)")
    gdq.insert_event(tap.owner, "q", "t", 1)
    assert [row[3:5] for row in drain(tap.db, "q", "plain")] == [("insert", "shop.t")]
    assert [row[3:5] for row in drain(tap.db, "q", "asks")] == [("insert", "shop.t"), ("message", None)]
    assert [row[3:5] for row in drain(tap.db)] == [("insert", "shop.t"), ("insert", "shop.u"), ("message", None)]


def test_open_batch_never_changes(tap: Tap) -> None:
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    tap.owner.execute("select gdq.register_consumer('q', 'd', tables => array['shop.t']::regclass[])")
    tap.owner.execute("select gdq.force_tick('q')")
    tap.owner.execute("select gdq.next_batch('q', 'd')")
    with pytest.raises(errors.ObjectInUse, match="has a batch open"):
        take_messages(tap.owner, "q", "d")


def test_python(tap: Tap) -> None:
    """What was sent comes back, numbers to their last digit."""
    with pytest.raises(GdqError, match="at most 4 extras"):
        gdq.insert_event(tap.owner, "q", "t", 1, "1", "2", "3", "4", "5")
    sent_ = [
        gdq.Message("t", {"n": 12345678901234567890123, "f": 1.5, "l": [None, True, "é→😀"]}, ("a", None, "c")),
        gdq.Message("t", '{"not": "parsed"}'),
        gdq.Message(None, None),
        gdq.Message("", "", ("", "", "", "d")),
        gdq.Message("t", 9007199254740993),
    ]
    for message in sent_:
        assert gdq.insert_event(tap.owner, "q", message.type, message.data, *message.extra) > 0
    assert gdq.insert_events(tap.owner, "q", iter(sent_)) == len(sent_)
    assert gdq.insert_events(tap.owner, "q", []) == 0
    with tap.db.connect() as connection, gdq.Consumer(connection, "q", "c") as consumer:
        events = [event for batch in consumer.batches(once=True) for event in batch.events()]
    assert [gdq.Message.of(event) for event in events] == sent_ * 2
    with pytest.raises(GdqError, match="is not a message"):
        gdq.Message.of(gdq.Event(1, 1, events[0].time, "insert", "t", None, None, {}))


def test_retry_of_a_message(tap: Tap) -> None:
    """It comes again as it was, numbers included."""
    message = gdq.Message("t", {"n": 12345678901234567890123}, ("a", None, None, "d"))
    gdq.insert_event(tap.owner, "q", message.type, message.data, *message.extra)
    seen = []
    with tap.db.connect() as connection, gdq.Consumer(connection, "q", "c") as consumer:
        for _ in range(2):
            for batch in consumer.batches(once=True):
                for event in batch.events():
                    seen.append((event.retries, gdq.Message.of(event)))
                    if not event.retries:
                        batch.retry(event, timedelta(0))
    assert seen == [(0, message), (1, message)]


def test_command(tap: Tap) -> None:
    done = command("insert-event", "q", "paid", '{"amount": 12.50}', "--extra", "eur", dsn=tap.db.dsn)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert command("insert-event", "q", "note", "-", "--text", dsn=tap.db.dsn, stdin="{no json").returncode == 0
    refused = command("insert-event", "q", "paid", "{no json", dsn=tap.db.dsn)
    assert refused.returncode == 2
    assert "for other text give --text" in refused.stderr
    assert command("insert-event", "nothing", "paid", "1", dsn=tap.db.dsn).returncode == 1
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    asks = ("register-consumer", "q", "asks", "--tables", "shop.t", "--messages")
    assert command(*asks, dsn=tap.db.dsn).returncode == 0
    gdq.insert_event(tap.owner, "q", "later", None)
    printed = {name: command("consume", "q", name, "--once", dsn=tap.db.dsn) for name in ("c", "asks")}
    lines = {name: [json.loads(line) for line in done.stdout.splitlines()] for name, done in printed.items()}
    later = {"type": "later", "data": None}
    note = {"type": "note", "data": "{no json"}
    assert [line["new"] for line in lines["c"]] == [
        {"type": "paid", "data": {"amount": 12.5}, "extra1": "eur"},
        note,
        later,
    ]
    assert {line["op"] for line in lines["c"]} == {"message"}
    assert [line["new"] for line in lines["asks"]] == [later]


def test_large_data(tap: Tap) -> None:
    """What is taken can be read; what could not is refused, also out of a compressed column."""
    tap.owner.execute("select gdq.insert_event('q', 'large', repeat(chr(1), 2000000), repeat('x', 3000000))")
    lengths = "select length(new->>'data'), length(new->>'extra1') from gdq.get_batch(%s, %s)"
    tap.owner.execute("select gdq.force_tick('q')")
    found = tap.owner.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
    assert found
    assert tap.owner.execute(lengths, found).fetchall() == [(2_000_000, 3_000_000)]
    tap.owner.execute("select gdq.finish_batch(%s, %s)", found)
    with tap.db.connect("su") as su:
        (limit,) = su.execute("select pg_get_functiondef('gdq.message_limit'::regproc)").fetchone() or ("",)
        su.execute(limit.replace("104857600", "20000000").encode())
    tap.owner.execute("create table kept as select to_jsonb(repeat('x', 20000000)) as data")
    for statement in (
        "select gdq.insert_event('q', 't', data) from kept",
        "select gdq.insert_event('q', 't', repeat('x', 20000000))",
        "select gdq.insert_event('q', 't', null::text, repeat('x', 15000000), repeat('x', 15000000))",
        "select gdq.insert_events('q', array['a', 't'], array[null, data]) from kept",
    ):
        with pytest.raises(errors.ProgramLimitExceeded, match="more than the 20000000 that a queue takes"):
            tap.owner.execute(statement.encode())
    assert sent(tap) == []


def test_jsonb_stays_as_it_was(tap: Tap) -> None:
    for text in ("null", "1.500", "1e3", '""', "[]", '{"a": {"b": [1, {}]}}', str(2**70)):
        tap.owner.execute("select gdq.insert_event('q', 't', %s)", [Jsonb(text, dumps=str)])
        (row,) = drain(tap.db)
        with tap.db.connect() as owner:
            assert owner.execute(
                "select %s::jsonb->'data' = %s", [Jsonb(row[7]), Jsonb(text, dumps=str)]
            ).fetchone() == (True,)


def test_nobody_else_may_write(tap: Tap) -> None:
    """EXECUTE on the bulk form gives no right to the single one, and gdq_log stays closed."""
    grant(tap, "gdq.insert_events(text, text[], text[], text[], text[], text[], text[])")
    tap.write("select gdq.insert_events('q', array['t'], array['x'])")
    for statement in (
        "select gdq.insert_event('q', 't', 'x')",
        "select gdq.insert_event('q', 't', '1'::jsonb)",
        "select gdq_log.q1_message('t', '1', null, null, null, null)",
        "select gdq.create_producers()",
        "insert into gdq_log.q1_s0 (ev_id) values (1)",
    ):
        with pytest.raises(errors.InsufficientPrivilege):
            tap.write(statement)
    names = tap.owner.execute(
        "select p.oid::regprocedure::text from pg_proc p where proname ~ '^(insert_event|q1_message)'"
        " and has_function_privilege('public', p.oid, 'execute')"
    ).fetchall()
    assert names == []


def test_dropped_queue_leaves_nothing(tap: Tap) -> None:
    with tap.db.connect() as writer:
        gdq.insert_event(writer, "q", "t", 1)
        tap.owner.execute("select gdq.drop_queue('q', true)")
        with pytest.raises(psycopg.errors.UndefinedObject, match='queue "q" does not exist'):
            gdq.insert_event(writer, "q", "t", 1)
    left = tap.owner.execute(
        sql.SQL("select proname from pg_proc where pronamespace = 'gdq_log'::regnamespace")
    ).fetchall()
    assert left == []
