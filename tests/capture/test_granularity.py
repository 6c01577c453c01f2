"""What capture by row and by statement make of every kind of write; the sum of images is exact in both."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from psycopg import errors

from gdq.consumer import Consumer
from tests.support.events import Event, Tap

pytestmark = pytest.mark.server

BOTH = pytest.mark.parametrize("granularity", ["row", "statement"])


def key_of(image: dict[str, Any]) -> str:
    return str(sorted(image.items()))


def state(tap: Tap, *tables: str) -> Counter[str]:
    rows: Counter[str] = Counter()
    for table in tables:
        for (image,) in tap.app.execute(f"select to_jsonb(t) from {table} t".encode()).fetchall():
            rows[table + key_of(image)] += 1
    return rows


def net(events: list[Event]) -> Counter[str]:
    """The sum of all images, old ones negative; zeros left out."""
    rows: Counter[str] = Counter()
    for event in events:
        for image, weight in ((event.old, -1), (event.new, 1)):
            if image is not None:
                rows[f"{event.tbl}{key_of(image)}"] += weight
    return Counter({row: weight for row, weight in rows.items() if weight})


def difference(before: Counter[str], after: Counter[str]) -> Counter[str]:
    return Counter({row: after[row] - before[row] for row in before | after if after[row] != before[row]})


WRITES = [
    "insert into t select g, g, 'new' from generate_series(1, 8) g",
    "insert into t values (8, 80, 'x'), (9, 9, 'y') on conflict (id) do update set v = excluded.v",
    "insert into t values (8, 0, 'x'), (10, 0, 'y') on conflict do nothing",
    "update t set id = -id where id <= 2",
    "insert into swap values (3), (4)",
    "update swap set id = 7 - id",
    "update t set v = v where id = 5",
    "delete from t where id = 5",
    """merge into t using (values (6, 60), (7, null), (20, 200)) s(id, v) on t.id = s.id
         when matched and s.v is null then delete when matched then update set v = s.v
         when not matched then insert values (s.id, s.v, 'merged')""",
    """with gone as (delete from t where id = 8 returning *), moved as (update t set v = v + 1 where id = 9 returning *)
         insert into t select id + 100, v, s from gone union all select id + 100, v, s from moved""",
    "copy t from stdin",
    "update t set v = 1 where false",
    """do $$ begin insert into t values (30);
         begin insert into t values (31); raise 'undo'; exception when others then end; end $$""",
    "insert into parent values (1), (2), (3)",
    "insert into child select g, 1 + g % 3 from generate_series(1, 9) g",
    "update parent set id = 4 where id = 2",
    "delete from parent where id in (1, 4)",
    "delete from t",
]


@BOTH
def test_sum_of_images_of_every_kind_of_write(tap: Tap, granularity: str) -> None:
    tap.write(
        "create table t (id int primary key, v int, s text)",
        "create table swap (id int primary key deferrable)",
        "create table parent (id int primary key)",
        "create table child (id int primary key, up int references parent on delete cascade on update cascade)",
    )
    tables = ("shop.t", "shop.swap", "shop.parent", "shop.child")
    for table in tables:
        tap.add(table, granularity=granularity)
    for write in WRITES:
        before = state(tap, *tables)
        if write.startswith("copy"):
            with tap.app.cursor().copy(write.encode()) as copy:
                copy.write("40\t1\ta\n41\t2\tb\n")
        else:
            tap.write(write)
        seen = tap.events()
        assert net(seen) == difference(before, state(tap, *tables)), write
        if granularity == "statement":
            assert {e.op for e in seen} <= {"insert", "delete"}


def last_images(events: list[Event]) -> dict[int, dict[str, Any] | None]:
    """What a reader gets that believes the last event of each key."""
    images: dict[int, dict[str, Any] | None] = {}
    for event in events:
        assert event.key
        images[event.key["id"]] = event.new
    return images


@BOTH
def test_trigger_of_the_application_that_inverts_the_order(tap: Tap, granularity: str) -> None:
    """Its nested update of a sibling row is logged before the outer one of that row: only the sum is right."""
    tap.write(
        "create table t (id int primary key, v int)",
        """create function again() returns trigger language plpgsql as $$ begin
             if new.id = 1 and new.v < 100 then update t set v = v + 100; end if; return null; end $$""",
        "create trigger again after update on t for each row execute function again()",
        "insert into t values (1, 1), (2, 2), (3, 3)",
    )
    tap.add("shop.t", granularity=granularity)
    before = state(tap, "shop.t")
    tap.write("update t set v = v + 10")
    after = state(tap, "shop.t")
    with Consumer(tap.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            seen = [Event(e.op, e.table, e.key, e.old, e.new) for e in batch.events()]
            delta = batch.delta("shop.t").to_pylist()
    truth = {row[0]["id"]: row[0] for row in tap.app.execute("select to_jsonb(t) from t").fetchall()}
    assert last_images(seen) != truth
    assert net(seen) == difference(before, after)
    summed = {f"shop.t{key_of({'id': r['id'], 'v': r['v']})}": r["_weight"] for r in delta}
    assert summed == dict(difference(before, after))


ROOT = (
    "create table r (id int, p int, v int, primary key (id, p)) partition by list (p)",
    "create table a partition of r for values in (1)",
    "create table b partition of r for values in (2) partition by list (id)",
    "create table b1 partition of b for values in (1, 2, 3)",
    "create table b2 partition of b default",
)


@BOTH
def test_partitions(tap: Tap, granularity: str) -> None:
    """Written to by the root, a level between and the leaf; also leaves that come later, with other columns."""
    tap.write(*ROOT)
    tap.add("shop.r", granularity=granularity)
    writes = [
        "insert into r values (1, 1), (2, 2), (3, 1), (4, 2), (5, 1)",
        "insert into a values (6, 1)",
        "insert into b values (7, 2)",
        "insert into b1 values (1, 2)",
        "update r set p = 3 - p where id in (3, 4)",
        "update b set v = 1",
        "update b set id = 2 + id % 2 * 10 where id in (2, 3)",
        "update b2 set v = 2",
        "insert into r values (1, 1, 0), (2, 1, 0) on conflict (id, p) do update set v = 7",
        "create table c (v int, gone int, p int not null, id int not null)",
        "alter table c drop gone",
        "alter table r attach partition c for values in (3)",
        "create table d partition of r for values in (4) partition by list (id)",
        "create table d1 partition of d default",
        "insert into c (id, p) values (21, 3)",
        "insert into d1 values (22, 4)",
        "update r set p = 7 - p where id in (21, 22)",
        """merge into r using (values (1, 1), (8, 2)) s(id, p) on r.id = s.id and r.p = s.p
             when matched then update set v = 9 when not matched then insert values (s.id, s.p)""",
        "delete from d",
        "delete from a where v is null",
        "delete from r",
    ]
    for write in writes:
        before = state(tap, "shop.r")
        tap.write(write)
        seen = tap.events()
        assert [e for e in seen if e.op == "resync"] == [], write
        assert net([e for e in seen if e.op != "ddl"]) == difference(before, state(tap, "shop.r")), write
        assert {e.tbl for e in seen} <= {"shop.r"}


def test_detached_partition_is_no_part_of_the_root(tap: Tap) -> None:
    tap.write(*ROOT)
    tap.add("shop.r", granularity="statement")
    tap.write("insert into r values (1, 1)", "alter table r detach partition a", "insert into a values (2, 1)")
    tap.write("update a set v = 1", "delete from a", "truncate a")
    assert [e.op for e in tap.events()] == ["insert", "ddl", "resync"]


def test_partition_without_the_right_to_put_triggers_on_it(tap: Tap) -> None:
    """Writes to it alone would go unseen, so capture is off until the right is there."""
    tap.write(*ROOT, "insert into r values (1, 1)")
    tap.add("shop.r", granularity="statement")
    tap.write(
        "alter default privileges revoke trigger on tables from gdq_owner",
        "create table c partition of r for values in (3)",
        "insert into c values (1, 3)",
    )
    seen = tap.events()
    assert [e.op for e in seen if e.op in ("insert", "delete")] == []
    assert "a capture trigger of shop.c was dropped or disabled" in [(e.new or {}).get("reason") for e in seen]
    tap.write("grant trigger on c to gdq_owner")
    assert tap.owner.execute("select gdq.maintain()").fetchone() == (True,)
    tap.write("insert into c values (2, 3)")
    assert [(e.op, (e.new or {}).get("id")) for e in tap.events() if e.op == "insert"] == [("insert", 2)]


def test_tables_that_statement_triggers_would_not_see_whole(tap: Tap) -> None:
    tap.write(
        *ROOT, "create table up (id int)", "create table down () inherits (up)", "create table x (id int primary key)"
    )
    tap.add("shop.down")
    for table, reason in (
        ("shop.a", "is a partition: statements on its root fire no statement triggers of it"),
        ("shop.b", "is a partition"),
        ("shop.up", "has or is an inheritance child"),
    ):
        with pytest.raises(errors.FeatureNotSupported, match=reason):
            tap.add(table, granularity="statement")
    with pytest.raises(errors.InvalidParameterValue, match="a logical replication worker fires no statement triggers"):
        tap.add("shop.x", granularity="statement", always=True)
    with pytest.raises(errors.InvalidParameterValue, match='unknown granularity "page"'):
        tap.add("shop.x", granularity="page")


@pytest.mark.parametrize(
    ("ddl", "reason"),
    [
        ("alter table x inherit up", "has or is an inheritance child"),
        ("alter table r attach partition x for values in (3)", "is a partition"),
    ],
)
def test_table_that_becomes_one_of_those_later(tap: Tap, ddl: str, reason: str) -> None:
    tap.write(*ROOT, "create table up (id int)", "create table x (id int, p int, v int, primary key (id, p))")
    tap.add("shop.x", granularity="statement")
    tap.write(ddl, "insert into x values (1, 3)")
    seen = tap.events()
    assert [e.op for e in seen if e.op == "insert"] == []
    assert any(reason in (e.new or {}).get("reason", "") for e in seen)


def test_modes_filters_types_and_ddl(tap: Tap) -> None:
    tap.write(
        "create type mood as enum ('sad', 'ok')",
        "create table f (id int primary key, m mood, n numeric)",
        "create table k (id int primary key, g int, note text)",
    )
    tap.add("shop.f", granularity="statement", where="n > 1", operations=["insert", "update"])
    tap.add("shop.k", granularity="statement", mode="pk", include=["g"])
    tap.write(
        "insert into f values (1, 'ok', 1.0), (2, 'sad', 2.0)",
        "update f set n = 3 - n",
        "delete from f",
        "alter table f add x int",
        "insert into f values (3, null, 3, 3)",
        "insert into k values (1, 1), (2, 2)",
        "update k set id = 3 - id, g = 5 where id = 1 and false",
        "update k set note = 'x', g = g + 1 where id = 2",
        "truncate k",
    )
    assert [(e.op, e.key, e.old, e.new) for e in tap.events() if e.op != "ddl"] == [
        ("insert", {"id": 2}, None, {"id": 2, "m": "sad", "n": "2.0"}),
        ("delete", {"id": 2}, {"id": 2, "m": "sad", "n": "2.0"}, None),
        ("insert", {"id": 1}, None, {"id": 1, "m": "ok", "n": "2.0"}),
        ("insert", {"id": 3}, None, {"id": 3, "m": None, "n": "3", "x": 3}),
        ("insert", {"id": 1}, None, {"g": 1}),
        ("insert", {"id": 2}, None, {"g": 2}),
        ("delete", {"id": 2}, {"g": 2}, None),
        ("insert", {"id": 2}, None, {"g": 3}),
        ("truncate", None, None, None),
    ]
