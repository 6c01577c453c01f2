"""Copies as events: a consumer begins with the rows that are there, and goes on with every change after them, once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from gdq import AsyncConsumer, Consumer, Event, ResyncRequired, register_consumer, require_copy
from tests.capture.test_types import VALUES, create_user_table
from tests.support.events import Tap
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import until

GAP = "select gdq.note_resync(1, 'shop.t'::regclass, 'gap', 'rows without events')"

# Keeps shop.t in public.mirror, of the same columns, and notes each truncate.
APPLY = """
def apply(connection, events):
    for event in events:
        one(connection, event)

def one(connection, event):
    execute = connection.execute
    if event.op == "truncate":
        execute("insert into copies values (%s)", [event.table])
    if event.table != "shop.t":
        return
    if event.op == "truncate":
        execute("delete from mirror")
    elif event.op == "delete":
        execute("delete from mirror where id = %s", [event.key["id"]])
    elif event.op == "update":
        execute("update mirror set id = %s, v = %s where id = %s",
                [event.new["id"], event.new["v"], event.old["id"]])
    else:
        execute("insert into mirror values (%s, %s)", [event.new["id"], event.new["v"]])

def aside(connection, events):
    from gdq import Retry
    return [Retry("later", event=event) for event in events]

def raising(connection, event):
    from gdq import Retry
    raise Retry("later")
"""


@pytest.fixture
def shop(tap: Tap) -> Tap:
    """The tables t and u, both captured, and a mirror of t, which the owner of gdq may read and write."""
    with tap.db.connect("su") as su:
        su.execute("alter default privileges for role app grant select on tables to gdq_owner")
        su.execute("create table public.mirror (id int primary key, v int); create table public.copies (tbl text)")
        su.execute("grant all on public.mirror, public.copies to gdq_owner")
    tap.write("create table t (id int primary key, v int)", "create table u (id int primary key)")
    tap.add("shop.t")
    tap.add("shop.u")
    tap.write("insert into t select n, 1 from generate_series(1, 2000) n", "insert into u values (7)")
    return tap


def copied(consumer: Consumer) -> list[Event]:
    return [event for copy in consumer.copies() for event in copy.events()]


def changed(consumer: Consumer) -> list[Event]:
    return [event for batch in consumer.batches(once=True) for event in batch.events()]


def shown(events: list[Event]) -> list[tuple[str, str | None, Any, Any]]:
    told = [event.in_json() for event in events]
    return sorted((e.op, e.table, json.dumps(e.key), json.dumps(e.new)) for e in told)


def test_rows_first_then_each_change_after_them(shop: Tap) -> None:
    register_consumer(shop.owner, "q", "new", tables=["shop.t", "shop.u"])
    shop.write("insert into t values (2001, 1)")
    assert require_copy(shop.owner, "q", "new") == 2
    assert require_copy(shop.owner, "q", "new", ["shop.u"]) == 0
    with Consumer(shop.db.dsn, "q", "new") as consumer:
        with pytest.raises(ResyncRequired, match=r"must copy anew shop.t, shop.u: a copy is asked for"):
            changed(consumer)
        for copy in consumer.copies():
            assert next(copy.events()).op == "truncate"
            break
        found: dict[str, list[Event]] = {}
        for copy in consumer.copies():
            found[copy.table] = list(copy.events())
            if copy.table == "shop.t":
                shop.write("insert into t values (2002, 1)", "truncate u")
        assert [(e.op, e.new) for e in found["shop.t"]][:2] == [("truncate", None), ("read", {"id": 1, "v": 1})]
        assert (len(found["shop.t"]), found["shop.t"][1].key, found["shop.t"][1].id) == (2002, {"id": 1}, 0)
        # t is copied first: the row of u was gone by then
        assert [(e.op, e.key) for e in found["shop.u"]] == [("truncate", None)]
        assert [(e.op, e.table, e.key) for e in changed(consumer)][:1] == [("insert", "shop.t", {"id": 2002})]
        assert (copied(consumer), changed(consumer)) == ([], [])
    with pytest.raises(psycopg.errors.UndefinedObject, match="does not take table"):
        shop.owner.execute("select gdq.require_copy('q', 'new', array['pg_class'::regclass])")


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "pk"}, {"mode": "pk", "include": ["e", "v"]}, {"format": "json"}, {"where": "id > 5"}],
    ids=["full", "pk", "pk-include", "json", "where"],
)
def test_read_events_have_the_images_of_inserts(tap: Tap, options: dict[str, Any]) -> None:
    """Types that encoders lose, types of one's own, domains, generated columns; also under a hostile role."""
    columns = create_user_table(tap)
    with tap.db.connect("su") as su:
        su.execute("grant select on shop.t to gdq_owner")
    types = {f"b{n}": (type_, values) for n, (type_, values) in enumerate(VALUES.items())}
    tap.write("alter table t add v int, add twice int generated always as (v * 2) stored")
    tap.write("alter table t " + ", ".join(f"add {name} {type_}" for name, (type_, _) in types.items()))
    tap.add("shop.t", **options)
    names = [*columns, *types]
    for number in range(9):
        values = [v for _, v, _ in columns.values()] + [values[number % len(values)] for _, values in types.values()]
        listed = sql.SQL(", ").join(map(sql.Identifier, names))
        tap.app.execute(
            sql.SQL("insert into t (id, v, {}) values ({}, {}, {})").format(
                listed, number, -number, sql.SQL(", ").join(map(sql.Literal, values))
            )
        )
    tap.write("insert into t (id, nn) values (100, '')")
    with tap.db.connect("su") as su:
        for setting in ("datestyle = 'german'", "timezone = 'Asia/Tokyo'", "bytea_output = 'escape'"):
            su.execute(f"alter role gdq_owner in database {tap.db.name} set {setting}".encode())
    with Consumer(tap.db.dsn, "q", "c") as consumer:
        inserted = changed(consumer)
        require_copy(consumer.connection, "q", "c")
        read = copied(consumer)
    assert len(inserted) == (4 if "where" in options else 10)
    assert read.pop(0).op == "truncate"
    assert [row[1:] for row in shown(read)] == [row[1:] for row in shown(inserted)]


def handler(shop: Tap, tmp_path: Path) -> tuple[Callable[..., Any], list[str]]:
    (tmp_path / "mine.py").write_text(APPLY)
    command = ["consume", "q", "new", "mine:apply", "--register", "--copy"]
    return lambda *options: gdq(*command, *options, dsn=shop.db.dsn, cwd=tmp_path), command


def mirrored(database: Database) -> Iterator[list[tuple[Any, ...]]]:
    with database.connect("su") as su:
        yield su.execute("select id, v from shop.t order by id").fetchall()
        yield su.execute("select id, v from public.mirror order by id").fetchall()


def test_one_handler_under_writers_and_a_kill(shop: Tap, tmp_path: Path) -> None:
    """What a killed command has copied is rolled back; the next one copies that table again from its start."""
    run, command = handler(shop, tmp_path)
    stop = threading.Event()

    def write() -> None:
        with shop.db.connect("app") as writer:
            for number in range(3000, 100_000):
                if stop.is_set():
                    return
                writer.execute("insert into shop.t values (%s, 0)", [number])
                writer.execute("update shop.t set v = v + 1 where id = %s", [number % 2000])
                writer.execute("delete from shop.t where id = %s", [number - 7])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with shop.db.connect("su") as holder:
            holder.execute("begin; insert into public.mirror values (1500, 0)")
            running = start_gdq(*command, dsn=shop.db.dsn, cwd=tmp_path)
            waiting = "select count(*) from pg_locks where locktype = 'transactionid' and not granted"
            until(lambda: running.poll() is not None or holder.execute(waiting).fetchone() == (1,), "row 1500")
            running.kill()
            running.communicate()
            holder.execute("rollback")
        done = run("--once")
    finally:
        stop.set()
        writer.join()
    assert done.returncode == 0, done.stderr
    assert run("--once").returncode == 0
    rows, mirror = mirrored(shop.db)
    assert mirror == rows
    with shop.db.connect("su") as su:
        assert sorted(su.execute("select tbl from public.copies").fetchall()) == [("shop.t",), ("shop.u",)]


def test_a_resync_is_copied_again(shop: Tap, tmp_path: Path) -> None:
    run, _ = handler(shop, tmp_path)
    assert run("--once").returncode == 0
    shop.owner.execute(GAP)
    shop.write("update t set v = 2 where id = 1")
    with shop.db.connect("su") as su:
        su.execute("delete from shop.t where id = 2; update public.mirror set v = 9 where id = 3")
    refused = gdq("consume", "q", "new", "mine:apply", "--once", dsn=shop.db.dsn, cwd=tmp_path)
    assert (refused.returncode, "rows without events" in refused.stderr) == (3, True)
    done = run("--once")
    assert done.returncode == 0, done.stderr
    rows, mirror = mirrored(shop.db)
    assert mirror == rows


def test_lines_of_json_and_of_debezium(shop: Tap) -> None:
    shop.write("truncate t", "insert into t values (1, 2)")
    command = ["consume", "q", "new", "--register", "--copy", "--once"]
    lines = [json.loads(line) for line in gdq(*command, dsn=shop.db.dsn).stdout.splitlines()]
    assert [(line["op"], line["table"], line["new"]) for line in lines] == [
        ("truncate", "shop.t", None), ("read", "shop.t", {"id": 1, "v": 2}),
        ("truncate", "shop.u", None), ("read", "shop.u", {"id": 7}),
    ]  # fmt: skip
    require_copy(shop.owner, "q", "new", ["shop.u"])
    lines = [json.loads(line) for line in gdq(*command, "--format", "debezium", dsn=shop.db.dsn).stdout.splitlines()]
    assert [(one["value"]["op"], one["value"]["source"]["snapshot"], one["key"]) for one in lines] == [
        ("t", "false", None), ("r", "true", {"id": 7}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["mine:aside"], 1, "handler mine:aside puts events aside: a copy has no retries"),
        (["mine:raising", "--each"], 1, "handler mine:raising puts events aside: a copy has no retries"),
        (["--member", "m"], 2, "--copy is for one reader of the queue"),
    ],
)
def test_what_is_refused(shop: Tap, tmp_path: Path, options: list[str], code: int, message: str) -> None:
    handler(shop, tmp_path)
    done = gdq("consume", "q", "new", *options, "--register", "--copy", "--once", dsn=shop.db.dsn, cwd=tmp_path)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_each_event_and_async(shop: Tap, tmp_path: Path) -> None:
    handler(shop, tmp_path)
    command = ["consume", "q", "new", "mine:one", "--each", "--register", "--copy", "--once"]
    assert gdq(*command, dsn=shop.db.dsn, cwd=tmp_path).returncode == 0
    rows, mirror = mirrored(shop.db)
    assert mirror == rows
    require_copy(shop.owner, "q", "new", ["shop.u"])

    async def read() -> list[tuple[str, Any]]:
        async with AsyncConsumer(shop.db.dsn, "q", "new") as consumer:
            found: list[tuple[str, Any]] = [
                (event.op, event.new) async for copy in consumer.copies() async for event in copy.events()
            ]
            shop.write("insert into u values (8)")
            async for batch in consumer.batches(once=True):
                found += [(event.op, event.new) async for event in batch.events()]
            return found

    assert asyncio.run(read()) == [("truncate", None), ("read", {"id": 7}), ("insert", {"id": 8})]

    async def leave() -> None:
        async with AsyncConsumer(shop.db.dsn, "q", "new") as consumer, aclosing(consumer.copies()) as copies:
            async for copy in copies:
                async for event in copy.events():
                    if event.op == "read":
                        raise ZeroDivisionError

    require_copy(shop.owner, "q", "new", ["shop.t"])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(leave())
    with Consumer(shop.db.dsn, "q", "new") as consumer:
        for copy in consumer.copies():
            [copy.table for _, _ in zip(range(2), copy.events(), strict=False)]  # what is not read is passed over
        assert copied(consumer) == []
