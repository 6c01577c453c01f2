"""Partitioned tables, captured at their root."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import errors

from tests.support.events import Event, Tap

pytestmark = pytest.mark.server

ROOT = (
    "create table r (id int, part text, v int, primary key (id, part)) partition by list (part)",
    "create table a partition of r for values in ('a')",
    "create table b partition of r for values in ('b')",
)


@pytest.fixture
def root(tap: Tap) -> Tap:
    """`tap` with the captured root r and its partitions a and b."""
    tap.write(*ROOT)
    tap.add("shop.r")
    return tap


def row(number: int, part: str, v: int | None = None) -> dict[str, Any]:
    return {"id": number, "part": part, "v": v}


def truncate(leaf: str | None = None, root: str = "shop.r") -> Event:
    return Event("truncate", root, None, None, {"partition": f"shop.{leaf}"} if leaf else None)


def changes(tap: Tap) -> list[tuple[Any, ...]]:
    """(op, old, new) of the row events, all of the root."""
    events = [e for e in tap.events() if e.op in ("insert", "update", "delete")]
    assert {e.tbl for e in events} <= {"shop.r"}
    return [(e.op, e.old, e.new) for e in events]


def without_ddl(seen: list[Event]) -> list[Event]:
    return [event for event in seen if event.op != "ddl"]


def resyncs(events: list[Event]) -> list[str]:
    return [e.new["reason"] for e in events if e.op == "resync" and e.new]


def test_writes_to_root_and_leaf(root: Tap) -> None:
    root.write(
        "insert into r values (1, 'a', 1)", "insert into b values (2, 'b', 2)", "update a set v = 3", "delete from r"
    )
    assert changes(root) == [
        ("insert", None, row(1, "a", 1)),
        ("insert", None, row(2, "b", 2)),
        ("update", row(1, "a", 1), row(1, "a", 3)),
        ("delete", row(1, "a", 3), None),
        ("delete", row(2, "b", 2), None),
    ]


@pytest.mark.parametrize("mode", ["full", "pk"])
def test_row_that_moves_between_partitions(tap: Tap, mode: str) -> None:
    tap.write(*ROOT)
    tap.add("shop.r", mode=mode)
    tap.write("insert into r values (1, 'a', 1)")
    tap.events()
    tap.write("update r set part = 'b', v = 2")
    assert [(e.op, e.key) for e in tap.events()] == [
        ("delete", {"id": 1, "part": "a"}),
        ("insert", {"id": 1, "part": "b"}),
    ]


def test_partition_with_another_column_order(root: Tap) -> None:
    root.write(
        "create table c (gone int, v int, part text not null, also_gone text, id int not null)",
        "alter table c drop gone, drop also_gone",
        "alter table r attach partition c for values in ('c')",
        "insert into r values (1, 'c', 7)",
        "update r set v = 8",
    )
    assert changes(root) == [("insert", None, row(1, "c", 7)), ("update", row(1, "c", 7), row(1, "c", 8))]


def test_partition_created_later(root: Tap) -> None:
    root.write("create table c partition of r for values in ('c')", "insert into r values (1, 'c')", "truncate c")
    assert without_ddl(root.events()) == [
        Event("insert", "shop.r", {"id": 1, "part": "c"}, None, row(1, "c")),
        truncate("c"),
    ]
    root.write("truncate r")
    assert root.events() == [truncate()]


def test_partition_of_another_owner_created_later(root: Tap) -> None:
    """Without the right to put TRUNCATE triggers on it a leaf is captured but for TRUNCATE, and that is recorded."""
    root.write(
        "alter default privileges revoke trigger on tables from gdq_owner",
        "create table c partition of r for values in ('c')",
        "insert into r values (1, 'c')",
    )
    seen = root.events()
    assert resyncs(seen) == ["no right to put TRUNCATE triggers on partition shop.c: GRANT TRIGGER on it to gdq_owner"]
    assert [e.new for e in seen if e.op == "insert"] == [row(1, "c")]


def test_truncate_of_one_partition(root: Tap) -> None:
    root.write("truncate a")
    assert root.events() == [truncate("a")]


def test_truncate_is_one_event(root: Tap) -> None:
    root.write(
        "create table y partition of r for values in ('y', 'z') partition by list (part)",
        "create table z partition of y for values in ('z')",
    )
    root.events()
    for tables, expected in {
        "r": [truncate()],
        "a, r": [truncate()],
        "r, a, b": [truncate()],
        "a, b": [truncate("a"), truncate("b")],
        "only a": [truncate("a")],
        "z": [truncate("z")],
        "y": [truncate("y")],
        "z, y": [truncate("y")],
        "y, a": [truncate("y"), truncate("a")],
        "a, r, z": [truncate()],
    }.items():
        root.write(f"truncate {tables}")
        assert sorted(root.events(), key=str) == sorted(expected, key=str), tables


def test_several_truncates_in_one_transaction(root: Tap) -> None:
    with root.app.transaction():
        root.write("truncate a")
        with root.app.transaction(force_rollback=True):
            root.write("truncate r")
        root.write("truncate a", "truncate r", "truncate b")
    assert root.events() == [truncate("a"), truncate("a"), truncate(), truncate("b")]


def test_truncate_that_fails_after_the_triggers_before_it(root: Tap) -> None:
    root.write(
        "create function no() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$",
        "create trigger zz before truncate on r execute function no()",
    )
    root.events()
    with root.app.transaction():
        with pytest.raises(errors.RaiseException), root.app.transaction():
            root.write("truncate r")
        root.write("truncate a")
    assert root.events() == [truncate("a")]


def test_two_roots_in_one_truncate(root: Tap) -> None:
    root.write("create table s (id int) partition by list (id)", "create table s1 partition of s for values in (1)")
    root.add("shop.s")
    root.write("truncate s1, r, a")
    assert sorted(root.events(), key=str) == sorted([truncate("s1", "shop.s"), truncate()], key=str)


@pytest.mark.parametrize("setting", ["b,{root},", "a,{root},", "1"])
def test_no_setting_of_a_session_hides_a_truncate(root: Tap, setting: str) -> None:
    (oid,) = root.app.execute("select 'shop.r'::regclass::oid").fetchone() or (0,)
    with root.db.connect("su") as su:
        su.execute("create role leaf_only")
        try:
            su.execute("grant usage on schema shop to leaf_only; grant truncate on shop.a to leaf_only")
            su.execute("set role leaf_only")
            with su.transaction():
                value = setting.format(root=oid)
                su.execute("select set_config(%s, %s, true)", [f"gdq.truncate_{oid}_1", value])
                su.execute("truncate shop.a")
                with pytest.raises(errors.InsufficientPrivilege), su.transaction():
                    su.execute("insert into gdq_log.q1_truncation values (txid_current(), 'shop.a'::regclass, 1)")
        finally:
            su.execute("reset role; drop owned by leaf_only; drop role leaf_only")
    assert root.events() == [truncate("a")]


def test_triggers_of_a_partition(root: Tap) -> None:
    """Each is an object that DROP TABLE of the root locks: a partition has no more of them than it needs."""
    count = "select count(*) from pg_trigger where tgrelid = %s::regclass"
    assert root.app.execute(count, ["shop.a"]).fetchone() == (4,)
    assert root.app.execute(count, ["shop.r"]).fetchone() == (5,)


def test_truncate_within_savepoints_and_below_a_part_of_the_tree(root: Tap) -> None:
    root.write(
        "create table y partition of r for values in ('y', 'z') partition by list (part)",
        "create table y1 partition of y for values in ('y')",
        "create table z partition of y for values in ('z') partition by list (part)",
        "create table z1 partition of z for values in ('z')",
    )
    root.events()
    with root.app.transaction():
        root.write("truncate z1, r", "truncate z1, z", "truncate y1, z1")
        with root.app.transaction(force_rollback=True):
            root.write("truncate y", "truncate z1")
        root.write("truncate z1", "truncate r", "truncate r", "truncate y1")
    assert root.events() == [truncate(leaf) for leaf in (None, "z", "y1", "z1", "z1", None, None, "y1")]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_truncates_in_parallel_transactions_do_not_fail(root: Tap, level: str) -> None:
    root.write("create table s (id int) partition by list (id)", "create table s1 partition of s for values in (1)")
    root.add("shop.s")
    with root.db.connect("app") as one, root.db.connect("app") as two:
        for session in (one, two):
            session.execute(f"begin isolation level {level}".encode())
            session.execute("select 1")
        one.execute("truncate shop.r")
        two.execute("truncate shop.s")
        one.execute("truncate shop.a")
        two.execute("truncate shop.s1")
        one.execute("commit")
        two.execute("commit")
    expected = [truncate(), truncate("a"), truncate(None, "shop.s"), truncate("s1", "shop.s")]
    assert sorted(root.events(), key=str) == sorted(expected, key=str)


def test_notes_of_truncate_are_emptied(root: Tap) -> None:
    root.write(*["truncate r", "truncate a"] * 3)
    assert root.owner.execute("select count(*) > 0 from gdq_log.q1_truncation").fetchone() == (True,)
    with root.app.transaction():
        root.write("truncate a")
        root.owner.execute("select gdq.rotate_control(false, 1)")
        assert root.owner.execute("select count(*) > 0 from gdq_log.q1_truncation").fetchone() == (True,)
    root.owner.execute("select gdq.rotate_control(false, 1)")
    assert root.owner.execute("select count(*) from gdq_log.q1_truncation").fetchone() == (0,)


def test_attach_of_an_empty_partition(root: Tap) -> None:
    root.write(
        "create table c (like r including all)",
        "insert into c values (0, 'c')",
        "truncate c",
        "alter table r attach partition c for values in ('c')",
        "insert into c values (1, 'c')",
        "truncate c",
    )
    seen = root.events()
    assert resyncs(seen) == []
    assert [(e.op, e.new) for e in without_ddl(seen)] == [
        ("insert", row(1, "c")),
        ("truncate", {"partition": "shop.c"}),
    ]


def test_attach_of_a_filled_partition_asks_for_a_resync(root: Tap) -> None:
    root.write(
        "create table c (like r including all)",
        "insert into c values (1, 'c')",
        "alter table r attach partition c for values in ('c')",
        "insert into c values (2, 'c')",
    )
    seen = root.events()
    assert resyncs(seen) == ["partition shop.c was attached with rows"]
    assert [e.new for e in seen if e.op == "insert"] == [row(2, "c")]


def test_attach_of_a_tree(root: Tap) -> None:
    root.write(
        "create table c (like r including all) partition by list (part)",
        "create table d partition of c for values in ('d')",
        "alter table r attach partition c for values in ('c', 'd')",
        "insert into d values (1, 'd')",
        "truncate d",
        "truncate c, d",
    )
    seen = root.events()
    assert resyncs(seen) == []
    assert [(e.op, e.tbl, e.new) for e in without_ddl(seen)] == [
        ("insert", "shop.r", row(1, "d")),
        ("truncate", "shop.r", {"partition": "shop.d"}),
        ("truncate", "shop.r", {"partition": "shop.c"}),
    ]


def test_leaf_captured_alone_then_attached_is_captured_once(root: Tap) -> None:
    root.write("create table c (like r including all)")
    root.add("shop.c")
    root.write(
        "insert into c values (1, 'c')",
        "alter table r attach partition c for values in ('c')",
        "insert into c values (2, 'c')",
        "insert into r values (3, 'c')",
        "truncate c",
        "truncate r",
    )
    seen = root.events()
    assert [(e.op, e.tbl, e.new) for e in without_ddl(seen) if e.op != "resync"] == [
        ("insert", "shop.c", row(1, "c")),
        ("insert", "shop.r", row(2, "c")),
        ("insert", "shop.r", row(3, "c")),
        ("truncate", "shop.r", {"partition": "shop.c"}),
        ("truncate", "shop.r", None),
    ]
    assert {(e.tbl, e.new["reason"]) for e in seen if e.op == "resync" and e.new} == {
        ("shop.r", "partition shop.c was attached with rows"),
        ("shop.c", "attached to shop.r, which is captured"),
    }


def test_leaf_captured_alone_under_a_root_that_is_not(tap: Tap) -> None:
    tap.write(*ROOT)
    tap.add("shop.a")
    tap.write(
        "insert into r values (1, 'a'), (2, 'b')", "update r set part = 'b' where id = 1", "truncate r", "truncate a, r"
    )
    assert [(e.op, e.tbl, e.new) for e in tap.events()] == [
        ("insert", "shop.a", row(1, "a")),
        ("delete", "shop.a", None),
        ("truncate", "shop.a", None),
        ("truncate", "shop.a", None),
    ]


def test_root_and_leaf_in_one_queue_are_refused(root: Tap) -> None:
    with pytest.raises(errors.DuplicateObject, match=r"shop\.a is already captured by this queue through shop\.r"):
        root.add("shop.a")
    root.owner.execute("select gdq.remove_table('q', 'shop.r')")
    root.add("shop.a")
    with pytest.raises(errors.DuplicateObject, match=r"shop\.r is already captured by this queue through shop\.a"):
        root.add("shop.r")


def test_root_and_leaf_in_two_queues(root: Tap) -> None:
    with Tap(root.db, "second", "other") as second:
        second.add("shop.a")
        root.write("insert into r values (1, 'a')", "truncate r", "truncate a")
        assert [(e.op, e.tbl, e.new) for e in second.events()] == [
            ("insert", "shop.a", row(1, "a")),
            ("truncate", "shop.a", None),
            ("truncate", "shop.a", None),
        ]
        assert [(e.op, e.tbl) for e in root.events()] == [
            ("insert", "shop.r"),
            ("truncate", "shop.r"),
            ("truncate", "shop.r"),
        ]


@pytest.mark.parametrize("how", ["detach partition a", "detach partition a concurrently"])
def test_detach_asks_for_a_resync(root: Tap, how: str) -> None:
    root.write("insert into r values (1, 'a'), (2, 'b')")
    root.events()
    root.write(f"alter table r {how}", "insert into a values (3, 'a')", "truncate a", "delete from r")
    seen = root.events()
    assert resyncs(seen) == ["partition shop.a was detached or dropped"]
    assert [(e.op, e.old) for e in without_ddl(seen) if e.op != "resync"] == [("delete", row(2, "b"))]
    root.write("insert into a values (4, 'a')", "alter table r attach partition a for values in ('a')", "truncate a")
    seen = root.events()
    assert resyncs(seen) == ["partition shop.a was attached with rows"]
    assert [e for e in without_ddl(seen) if e.op != "resync"] == [truncate("a")]


def test_drop_of_a_partition_asks_for_a_resync(root: Tap) -> None:
    root.write("insert into r values (1, 'a')", "drop table a")
    assert len(resyncs(root.events())) == 1


def test_partitions_that_triggers_cannot_watch_are_refused(tap: Tap) -> None:
    with tap.db.connect("su") as su:
        su.execute("create foreign data wrapper nowhere")
        su.execute("create server nowhere foreign data wrapper nowhere")
        su.execute("grant usage on foreign server nowhere to app")
    tap.write(
        "create table r (id int, v int) partition by list (id)",
        "create foreign table f partition of r for values in (1) server nowhere",
        "create table u (id int) partition by list (id)",
        "create unlogged table u1 partition of u for values in (1)",
        "create table w (id int) partition by list (id)",
        "create table w1 partition of w for values in (1)",
        "revoke trigger on w1 from gdq_owner",
    )
    with pytest.raises(errors.FeatureNotSupported, match=r"partition shop\.f of shop\.r is a foreign table"):
        tap.add("shop.r")
    with pytest.raises(errors.FeatureNotSupported, match=r"partition shop\.u1 of shop\.u is unlogged"):
        tap.add("shop.u")
    with pytest.raises(errors.InsufficientPrivilege, match=r"no right to put triggers on shop\.w1"):
        tap.add("shop.w")
