"""Other options of a captured table: rows on either side are read with the options of their time, none is missed."""

from __future__ import annotations

import json
import threading
from typing import Any

import psycopg
import pytest
from psycopg import errors

from gdq import queue as queues
from gdq.batch import Batch
from gdq.errors import ResyncRequired
from gdq.monitor.doctor import doctor
from tests.support.events import Event, Tap
from tests.support.programs import gdq

TABLE = "create table t (id int primary key, v text, w text, code int not null unique)"


def alter(tap: Tap, **options: Any) -> bool:
    return queues.alter_table_options(tap.owner, "q", "shop.t", **options)


def events(tap: Tap) -> list[Event]:
    """What the consumer gets next; capture is found in order."""
    assert [finding for finding in doctor(tap.owner) if finding.severity == "error"] == []
    return tap.events()


def images(found: list[Event]) -> list[tuple[Any, ...]]:
    return [(e.op, e.old, e.new) for e in found if e.op in {"insert", "update", "delete"}]


def gaps(found: list[Event]) -> list[str]:
    return [e.new["reason"] for e in found if e.op == "resync" and e.new]


@pytest.mark.parametrize("added", [{}, {"format": "json"}, {"granularity": "statement"}], ids=str)
def test_columns(tap: Tap, added: dict[str, Any]) -> None:
    """Fewer columns need no copy, more do; an unread change from before keeps what it had."""
    tap.write(TABLE)
    tap.add("shop.t", **added)
    tap.write("insert into t values (1, 'a', 'b', 1)")
    fewer = {"mode": "pk", "include": ["v"]} if added.get("format") else {"exclude": ["w", "code"]}
    assert alter(tap, **fewer)
    tap.write("insert into t values (2, 'c', 'd', 2)")
    found = events(tap)
    assert [e.op for e in found] == ["insert", "ddl", "insert"]
    assert (found[0].new or {}).keys() == {"id", "v", "w", "code"}
    assert {"v": "c"}.items() <= (found[2].new or {}).items()
    assert "w" not in (found[2].new or {})
    assert found[1].new
    assert found[1].new["tag"] == "alter_table_options"
    assert found[1].new["options"] == fewer
    assert [c["name"] for c in found[1].new["old_columns"]] == ["id", "v", "w", "code"]
    assert alter(tap, **dict.fromkeys(fewer))
    tap.write("insert into t values (3, 'e', 'f', 3)")
    found = events(tap)
    assert [e.op for e in found] == ["ddl", "resync", "insert"]
    assert (found[2].new or {})["w"] == "f"
    assert gaps(found)[0].startswith("other options of capture: logged from now on: ")


def test_mode(tap: Tap) -> None:
    """A change of the key is one update in mode full, a delete and an insert in mode pk, in one batch."""
    tap.write(TABLE)
    tap.add("shop.t")
    tap.write("insert into t values (1, 'a', 'b', 1)", "update t set id = 2")
    assert alter(tap, mode="pk", include=["v"])
    tap.write("update t set id = 3", "update t set v = 'z'")
    tap.owner.execute("select gdq.force_tick('q')")
    with tap.owner.transaction(force_rollback=True):
        batch = Batch.open(tap.owner, "q", "c", 1000)
        assert batch
        full, pk = batch.versions("shop.t")
        with (
            pytest.raises(errors.ObjectNotInPrerequisiteState, match="another mode"),
            tap.owner.transaction(force_rollback=True),
        ):
            batch.arrow("shop.t")
        old = batch.arrow("shop.t", version=full.id).sort_by("ev_id").to_pylist()
        assert [(row["ev_op"], row["old_id"], row["new_id"]) for row in old] == [("I", None, 1), ("U", 1, 2)]
        new = batch.arrow("shop.t", version=pk.id).sort_by([("ev_id", "ascending"), ("ev_op", "ascending")]).to_pylist()
        assert [(row["ev_op"], row["key_id"], row["new_v"]) for row in new] == [
            ("D", 2, None),
            ("I", 3, "a"),
            ("U", 3, "z"),
        ]
    found = events(tap)
    assert [(e.op, (e.key or {}).get("id")) for e in found] == [
        ("insert", 1),
        ("update", 2),
        ("ddl", None),
        ("delete", 2),
        ("insert", 3),
        ("update", 3),
    ]
    assert alter(tap, mode="full", include=None)
    tap.write("update t set id = 4")
    found = events(tap)
    assert [e.op for e in found] == ["ddl", "resync", "update"]
    assert found[2].old == {"id": 3, "v": "z", "w": "b", "code": 1}


def test_split_updates_in_another_mode(tap: Tap) -> None:
    """The halves of an update are put together by the mode that the table had when it was logged."""
    wide = ", ".join(f"c{i} text" for i in range(250))
    tap.write(f"create table t (id int primary key, {wide})")
    tap.add("shop.t")
    tap.write("insert into t values (1)", "update t set id = 2")
    assert alter(tap, mode="pk")
    tap.write("update t set id = 3")
    assert [e.op for e in events(tap)] == ["insert", "update", "ddl", "delete", "insert"]


def test_row_filter_and_key(tap: Tap) -> None:
    tap.write(TABLE)
    tap.add("shop.t", where="code > 0", mode="pk")
    tap.write("insert into t values (1, null, null, 1), (-1, null, null, -1)")
    assert alter(tap, where="code < 0", key=["code"])
    tap.write("insert into t values (2, null, null, 2), (-2, null, null, -2)")
    found = events(tap)
    assert [(e.op, e.key) for e in found] == [
        ("insert", {"id": 1}),
        ("ddl", None),
        ("resync", None),
        ("insert", {"code": -2}),
    ]
    assert gaps(found) == ["other options of capture: another row filter; another key"]
    tap.write("alter table t rename code to kode")
    assert alter(tap, include=["v"])
    tap.write("update t set v = 'x' where id < 0")
    assert [(e.key or {}).get("kode") for e in events(tap) if e.op == "update"] == [-1, -2]
    assert not alter(tap, include=["v"])


@pytest.mark.parametrize("partitioned", [False, True])
def test_operations_granularity_and_always(tap: Tap, partitioned: bool) -> None:
    tap.write(f"create table t (id int primary key, v int){' partition by range (id)' if partitioned else ''}")
    if partitioned:
        tap.write("create table t_1 partition of t for values from (0) to (100)")
    tap.add("shop.t")
    every = ("insert into t values (1, 1), (2, 2)", "update t set v = 5", "delete from t where id = 1", "truncate t")
    tap.write(*every)
    assert alter(tap, operations=["delete", "insert"])
    tap.write(*every)
    assert alter(tap, granularity="statement", operations=None)
    tap.write(*every)
    assert alter(tap, granularity="row")
    tap.write(*every)
    found = events(tap)
    assert gaps(found) == ["other options of capture: captured from now on: update, truncate"]
    by_row = ["insert", "insert", "update", "update", "delete", "truncate"]
    by_statement = ["insert", "insert", "delete", "delete", "insert", "insert", "delete", "truncate"]
    assert [e.op for e in found] == [
        *by_row,
        "ddl",
        *["insert", "insert", "delete"],
        "ddl",
        "resync",
        *by_statement,
        "ddl",
        *by_row,
    ]
    with pytest.raises(errors.InsufficientPrivilege, match="only the owner of shop"):
        alter(tap, always=True)
    if partitioned:
        tap.write("create table t_2 partition of t for values from (100) to (200)", "insert into t values (150, 1)")
        assert [e.op for e in events(tap) if e.op != "ddl"] == ["insert"]


def test_always_origin_format_and_search_path(tap: Tap) -> None:
    tap.owner.execute("create table t (id int primary key)")
    tap.owner.execute("select gdq.add_table('q', 't')")
    steps: list[dict[str, Any]] = [{"origin": True}, {"always": True}, {"format": "json"}, {"pin_search_path": True}]
    for step, options in enumerate(steps):
        assert queues.alter_table_options(tap.owner, "q", "public.t", **options)
        tap.owner.execute(f"set gdq.origin = 'o{step}'; insert into t values ({step})".encode())
        enabled = tap.owner.execute("select distinct tgenabled from pg_trigger where tgname ~ '^!gdq_'").fetchall()
        assert enabled == [("A" if step > 0 else "O",)]
    assert queues.alter_table_options(tap.owner, "q", "public.t", format="typed", always=None)
    tap.owner.execute("insert into t values (9)")
    tap.owner.execute("select gdq.force_tick('q')")
    found = tap.owner.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
    assert found
    rows = tap.owner.execute(
        "select op, new ->> 'id', origin from gdq.get_batch(%s, %s) where op <> 'ddl'", found
    ).fetchall()
    assert rows == [("insert", str(id_), f"o{min(id_, 3)}") for id_ in (0, 1, 2, 3, 9)]


REFUSED: list[tuple[dict[str, Any], type[psycopg.Error], str]] = [
    ({"colour": 1}, errors.InvalidParameterValue, "unknown option colour"),
    ({"exclude": "w"}, errors.InvalidParameterValue, "exclude: not a list"),
    ({"exclude": ["nope"]}, errors.UndefinedColumn, 'no column "nope"'),
    ({"exclude": ["id"]}, errors.InvalidParameterValue, "must be logged"),
    ({"include": ["v"]}, errors.InvalidParameterValue, "include goes with mode pk"),
    ({"mode": "half"}, errors.InvalidParameterValue, 'unknown mode "half"'),
    ({"operations": []}, errors.InvalidParameterValue, "no list of operations"),
    ({"operations": ["merge"]}, errors.InvalidParameterValue, "no list of operations"),
    ({"where": "v ~ 'x'"}, errors.InvalidParameterValue, "row filter"),
    ({"key": ["v"]}, errors.InvalidParameterValue, "may be null"),
    ({"origin": False}, errors.FeatureNotSupported, "origin cannot be switched off"),
    ({"format": "json", "where": "code = 1"}, errors.InvalidParameterValue, "go with format typed"),
]


def test_what_is_refused_changes_nothing(tap: Tap) -> None:
    tap.write(TABLE)
    tap.add("shop.t", origin=True)
    before = tap.owner.execute("select * from gdq.table_info('q')").fetchall()
    for options, error, message in REFUSED:
        with pytest.raises(error, match=message):
            alter(tap, **options)
    assert not alter(tap)
    assert not alter(tap, origin=True, mode=None, operations=["truncate", "delete", "update", "insert"])
    assert tap.owner.execute("select * from gdq.table_info('q')").fetchall() == before
    tap.owner.execute(
        "insert into gdq.view (view_name, queue_id, consumer_name, definition, target) values ('w', 1, 'c', '', '')"
    )
    with pytest.raises(errors.ObjectInUse, match='read by the view "w"'):
        alter(tap, exclude=["w"])
    tap.write("alter table t enable row level security")
    assert alter(tap, pin_search_path=True, allow_rls=True)
    with pytest.raises(errors.FeatureNotSupported, match="has row level security"):
        alter(tap, allow_rls=None)
    tap.write("begin isolation level repeatable read; alter table t add x int; commit")
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match=r"capture of table shop\.t is off"):
        alter(tap, pin_search_path=False)


def test_busy_tables_and_old_snapshots(tap: Tap) -> None:
    """Rows of a writer that is waited for come before the ddl event; one with an old snapshot has the new options."""
    tap.write(TABLE)
    tap.add("shop.t")
    with tap.db.connect("app") as writer, tap.db.connect("app") as old:
        old.execute("begin isolation level repeatable read; select from pg_class limit 1")
        writer.execute("begin; insert into t values (1, 'a', 'b', 1)")
        with pytest.raises(errors.LockNotAvailable, match="is busy"):
            alter(tap, exclude=["w"])
        done: list[Any] = []
        command = threading.Thread(
            target=lambda: done.append(gdq("alter-table", "q", "shop.t", "--exclude", "w", dsn=tap.db.dsn))
        )
        command.start()
        writer.execute("insert into t values (2, 'a', 'b', 2); commit")
        command.join()
        assert (done[0].returncode, done[0].stderr) == (0, "altered capture of shop.t in q\n")
        old.execute("insert into t values (3, 'a', 'b', 3); commit")
    assert [(e.op, "w" in (e.new or {})) for e in events(tap)] == [
        ("insert", True),
        ("insert", True),
        ("ddl", False),
        ("insert", False),
    ]


def test_without_event_triggers(tap: Tap) -> None:
    """What the command does to triggers is not taken for DDL that nobody followed."""
    with tap.db.connect("su") as su:
        for (name,) in su.execute("select evtname from pg_event_trigger").fetchall():
            su.execute(f'drop event trigger "{name}"'.encode())
    tap.write(TABLE)
    tap.add("shop.t", mode="pk")
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="format typed needs the event triggers"):
        alter(tap, format="typed")
    for options in ({"include": ["v"]}, {"operations": ["insert"]}, {"granularity": "statement"}):
        assert alter(tap, **options)
        assert queues.check_tables(tap.owner) == 0
        tap.write(
            "insert into t select n, 'a', 'b', n from (select 1 + count(*) as n from t) r", "update t set v = 'c'"
        )
    assert [e.op for e in tap.events()] == ["ddl", "resync", "insert", "update", "ddl", "insert", "ddl", "insert"]


def test_no_change_is_missed_beside_writers(tap: Tap) -> None:
    """Writers go on while options change again and again: every row once, and none of them fails."""
    tap.write("create table t (id serial primary key, v text)")
    tap.add("shop.t")
    stop = threading.Event()
    failed: list[Exception] = []
    written = [0, 0]

    def write(number: int) -> None:
        isolation = ("read committed", "repeatable read")[number]
        try:
            with tap.db.connect("app") as writer:
                while not stop.wait(0.002):
                    writer.execute(
                        f"begin isolation level {isolation}; insert into t (v) values ('a'); commit".encode()
                    )
                    written[number] += 1
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=[number]) for number in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        steps: list[dict[str, Any]] = [
            {"exclude": ["v"], "format": None},
            {"exclude": None, "mode": "pk"},
            {"granularity": "statement"},
            {"mode": "full", "granularity": "row"},
            {"format": "json"},
        ]
        for step in steps * 2:
            changed = False
            while not changed:
                try:
                    changed = alter(tap, **step)
                    break
                except errors.LockNotAvailable:
                    continue
            tap.owner.execute("select gdq.maintain()")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failed == []
    found = events(tap)
    keys = [(e.key or {})["id"] for e in found if e.op == "insert"]
    assert sorted(keys) == list(range(1, sum(written) + 1))


def test_the_command(tap: Tap) -> None:
    tap.write(TABLE)
    tap.add("shop.t", where="code > 0")
    done = gdq("alter-table", "q", "shop.t", "--reset", "where", "--operations", "insert,update", dsn=tap.db.dsn)
    assert (done.returncode, done.stderr) == (0, "altered capture of shop.t in q\n")
    again = gdq("alter-table", "q", "shop.t", "--operations", "update,insert", dsn=tap.db.dsn)
    assert (again.returncode, again.stderr) == (0, "unchanged: shop.t in q has these options\n")
    (table,) = json.loads(gdq("tables", "q", "--json", dsn=tap.db.dsn).stdout)
    assert (table["where"], table["operations"]) == (None, ["insert", "update"])
    for arguments in ([], ["--reset", "mode", "--mode", "pk"]):
        assert gdq("alter-table", "q", "shop.t", *arguments, dsn=tap.db.dsn).returncode == 2


def test_a_copy_closes_the_gap(tap: Tap) -> None:
    tap.write(TABLE)
    tap.add("shop.t", exclude=["w"])
    tap.write("insert into t values (1, 'a', 'b', 1)")
    assert alter(tap, exclude=None)
    tap.owner.execute("select gdq.force_tick('q')")
    with tap.owner.transaction(force_rollback=True):
        batch = Batch.open(tap.owner, "q", "c", 1000)
        assert batch
        with pytest.raises(ResyncRequired, match="logged from now on: w"):
            list(batch.events())
    row = tap.owner.execute("select pg_current_snapshot()::text").fetchone()
    assert row
    tap.owner.execute("select gdq.resynced('q', 'c', 'shop.t', %s)", [row[0]])
    tap.write("update t set w = 'c'")
    assert images(events(tap)) == [
        ("update", {"id": 1, "v": "a", "w": "b", "code": 1}, {"id": 1, "v": "a", "w": "c", "code": 1})
    ]
