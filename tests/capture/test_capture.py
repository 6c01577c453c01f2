"""What a consumer sees of ordinary writes, in each capture mode."""

from __future__ import annotations

import pytest
from psycopg import errors

from tests.support.events import SCHEMA, Tap, drain
from tests.support.programs import dump

pytestmark = pytest.mark.server


def test_full_mode_logs_both_images(tap: Tap) -> None:
    tap.write("create table t (id int primary key, n numeric, s text)")
    tap.add("shop.t")
    tap.write(
        "insert into t values (1, 1.50, null)",
        "update t set s = ''",
        "update t set id = 2",
        "delete from t",
    )
    seen = tap.batch("shop.t")
    assert [(e.op, e.key, e.old, e.new) for e in seen.events] == [
        ("insert", {"id": 1}, None, {"id": 1, "n": "1.50", "s": None}),
        ("update", {"id": 1}, {"id": 1, "n": "1.50", "s": None}, {"id": 1, "n": "1.50", "s": ""}),
        ("update", {"id": 2}, {"id": 1, "n": "1.50", "s": ""}, {"id": 2, "n": "1.50", "s": ""}),
        ("delete", {"id": 2}, {"id": 2, "n": "1.50", "s": ""}, None),
    ]
    assert {e.tbl for e in seen.events} == {"shop.t"}
    assert [(r["ev_op"], r["old_id"], r["new_id"], r["old_s"], r["new_s"]) for r in seen.rows["shop.t"]] == [
        ("I", None, 1, None, None),
        ("U", 1, 1, None, ""),
        ("U", 1, 2, "", ""),
        ("D", 2, None, "", None),
    ]
    assert tap.events() == []


def test_pk_mode_logs_the_key_alone(tap: Tap) -> None:
    tap.write("create table t (id int primary key, s text)")
    tap.add("shop.t", mode="pk")
    tap.write("insert into t values (1, 'a')", "update t set s = 'b'", "update t set id = 2", "delete from t")
    seen = tap.batch("shop.t")
    assert [(e.op, e.key, e.old, e.new) for e in seen.events] == [
        ("insert", {"id": 1}, None, None),
        ("update", {"id": 1}, None, None),
        ("delete", {"id": 1}, None, None),
        ("insert", {"id": 2}, None, None),
        ("delete", {"id": 2}, None, None),
    ]
    assert [(r["ev_op"], r["key_id"]) for r in seen.rows["shop.t"]] == [
        ("I", 1),
        ("U", 1),
        ("D", 1),
        ("I", 2),
        ("D", 2),
    ]
    assert set(seen.rows["shop.t"][0]) == {"ev_id", "ev_txid", "ev_time", "ev_op", "key_id"}


def test_pk_mode_with_included_columns(tap: Tap) -> None:
    tap.write("create table t (id int primary key, grp text, amount int, note text)")
    tap.add("shop.t", mode="pk", include=["grp", "amount"])
    tap.write(
        "insert into t values (1, 'a', 5, 'x')",
        "update t set amount = 6, note = 'y'",
        "update t set id = 2, grp = 'b'",
        "delete from t",
    )
    seen = tap.batch("shop.t")
    assert [(e.op, e.key, e.old, e.new) for e in seen.events] == [
        ("insert", {"id": 1}, None, {"grp": "a", "amount": 5}),
        ("update", {"id": 1}, {"grp": "a", "amount": 5}, {"grp": "a", "amount": 6}),
        ("delete", {"id": 1}, {"grp": "a", "amount": 6}, None),
        ("insert", {"id": 2}, None, {"grp": "b", "amount": 6}),
        ("delete", {"id": 2}, {"grp": "b", "amount": 6}, None),
    ]
    assert set(seen.rows["shop.t"][0]) == {
        *("ev_id", "ev_txid", "ev_time", "ev_op", "key_id"),
        *("old_grp", "old_amount", "new_grp", "new_amount"),
    }


def test_key_change_that_the_types_equality_does_not_see(tap: Tap) -> None:
    """1.0 and 1.00 are equal to PostgreSQL, but a consumer that keeps keys as text must be told."""
    tap.write("create table p (k numeric primary key, v int)", "create table f (k numeric primary key)")
    tap.add("shop.p", mode="pk", include=["v"])
    tap.add("shop.f")
    tap.write("insert into p values (1.0, 7)", "insert into f values (1.0)")
    tap.events()
    tap.write("update p set k = 1.00", "update f set k = 1.00")
    assert tap.images() == [
        ("delete", {"k": "1.0"}, {"v": 7}, None),
        ("insert", {"k": "1.00"}, None, {"v": 7}),
        ("update", {"k": "1.00"}, {"k": "1.0"}, {"k": "1.00"}),
    ]


def test_key_change_in_letter_case_of_citext(tap: Tap) -> None:
    if not tap.app.execute("select from pg_type where typname = 'citext'").rowcount:
        pytest.skip("this PostgreSQL comes without citext")
    tap.write("create table t (k citext primary key)")
    tap.add("shop.t", mode="pk")
    tap.write("insert into t values ('A')", "update t set k = 'a'", "update t set k = 'a'")
    assert tap.images() == [
        ("insert", {"k": "A"}, None, None),
        ("delete", {"k": "A"}, None, None),
        ("insert", {"k": "a"}, None, None),
        ("update", {"k": "a"}, None, None),
    ]


def test_composite_key_in_both_modes(tap: Tap) -> None:
    tap.write(
        "create table f (v int, b text, a int, primary key (a, b))",
        "create table p (v int, b text, a int, primary key (a, b))",
    )
    tap.add("shop.f")
    tap.add("shop.p", mode="pk")
    for table in ("f", "p"):
        tap.write(f"insert into {table} values (1, 'x', 1)", f"update {table} set v = 2", f"update {table} set b = 'y'")
    assert [(e.op, e.key) for e in tap.events()] == [
        ("insert", {"a": 1, "b": "x"}),
        ("update", {"a": 1, "b": "x"}),
        ("update", {"a": 1, "b": "y"}),
        ("insert", {"a": 1, "b": "x"}),
        ("update", {"a": 1, "b": "x"}),
        ("delete", {"a": 1, "b": "x"}),
        ("insert", {"a": 1, "b": "y"}),
    ]


def test_key_of_a_unique_index(tap: Tap) -> None:
    tap.write("create table t (id int primary key, code text not null unique, v int)")
    tap.add("shop.t", mode="pk", key=["code"])
    tap.write("insert into t values (1, 'a', 0)", "update t set id = 2", "update t set code = 'b'")
    assert [(e.op, e.key) for e in tap.events()] == [
        ("insert", {"code": "a"}),
        ("update", {"code": "a"}),
        ("delete", {"code": "a"}),
        ("insert", {"code": "b"}),
    ]


def test_table_without_key(tap: Tap) -> None:
    tap.write("create table t (a int, b text)")
    with pytest.raises(errors.FeatureNotSupported, match=r"table shop\.t has no primary key, which mode pk logs") as e:
        tap.add("shop.t", mode="pk")
    assert e.value.diag.message_hint == "Use mode full, or name the columns of a unique index with key."
    tap.add("shop.t")
    tap.write("insert into t values (1, 'x'), (1, 'x')", "delete from t where ctid::text = '(0,1)'")
    row = {"a": 1, "b": "x"}
    assert tap.images() == [("insert", None, None, row), ("insert", None, None, row), ("delete", None, row, None)]


def test_columns_and_exclude(tap: Tap) -> None:
    tap.write("create table a (id int primary key, x int, y int)", "create table b (id int primary key, x int, y int)")
    tap.add("shop.a", columns=["id", "y"])
    tap.add("shop.b", exclude=["y"])
    tap.write("insert into a values (1, 2, 3)", "insert into b values (1, 2, 3)", "update a set x = 9")
    assert [e.new for e in tap.events()] == [{"id": 1, "y": 3}, {"id": 1, "x": 2}, {"id": 1, "y": 3}]


def test_identity_and_stored_generated_columns(tap: Tap) -> None:
    tap.write(
        "create table t (id int generated always as identity primary key, a int,"
        " b int generated always as (a * 2) stored)"
    )
    tap.add("shop.t")
    tap.write("insert into t (a) values (5)", "update t set a = 6")
    assert tap.images() == [
        ("insert", {"id": 1}, None, {"id": 1, "a": 5, "b": 10}),
        ("update", {"id": 1}, {"id": 1, "a": 5, "b": 10}, {"id": 1, "a": 6, "b": 12}),
    ]


def test_virtual_generated_column_is_left_out(tap: Tap) -> None:
    if tap.app.info.server_version < 180000:
        pytest.skip("virtual generated columns came with PostgreSQL 18")
    tap.write("create table t (id int primary key, a int, b int generated always as (a * 2) virtual)")
    with pytest.raises(errors.InvalidParameterValue, match=r'column "b" of shop\.t is a virtual generated column'):
        tap.add("shop.t", columns=["id", "b"])
    tap.add("shop.t")
    tap.write("insert into t (id, a) values (1, 5)")
    assert [e.new for e in tap.events()] == [{"id": 1, "a": 5}]


def test_before_triggers_have_had_their_say(tap: Tap) -> None:
    tap.write(
        "create table t (id int primary key, v int)",
        "create function bump() returns trigger language plpgsql as 'begin new.v := new.v + 100; return new; end'",
        "create trigger bump before insert or update on t for each row execute function bump()",
    )
    tap.add("shop.t")
    tap.write("insert into t values (1, 1)", "update t set v = 2")
    assert [e.new for e in tap.events()] == [{"id": 1, "v": 101}, {"id": 1, "v": 102}]


def test_merge_upsert_and_copy(tap: Tap) -> None:
    tap.write("create table t (id int primary key, v int)", "create table s (id int, v int)")
    tap.add("shop.t")
    tap.write("insert into s values (1, 10), (2, 20)", "insert into t values (2, 0), (3, 0)")
    tap.events()
    tap.write(
        "merge into t using s on t.id = s.id when matched then update set v = s.v"
        " when not matched then insert values (s.id, s.v)",
        "merge into t using (values (1)) s(id) on t.id = s.id when matched then delete",
    )
    assert sorted(tap.images(), key=str) == [
        ("delete", {"id": 1}, {"id": 1, "v": 10}, None),
        ("insert", {"id": 1}, None, {"id": 1, "v": 10}),
        ("update", {"id": 2}, {"id": 2, "v": 0}, {"id": 2, "v": 20}),
    ]
    tap.write("insert into t values (2, 1), (4, 1) on conflict (id) do update set v = excluded.v")
    tap.write("insert into t values (2, 1), (5, 1) on conflict do nothing")
    assert [(e.op, e.new) for e in tap.events()] == [
        ("update", {"id": 2, "v": 1}),
        ("insert", {"id": 4, "v": 1}),
        ("insert", {"id": 5, "v": 1}),
    ]
    with tap.app.cursor().copy("copy t from stdin") as copy:
        copy.write("7\t70\n8\t\\N\n")
    assert [e.new for e in tap.events()] == [{"id": 7, "v": 70}, {"id": 8, "v": None}]
    tap.write("with gone as (delete from t where id > 6 returning *) insert into t select id + 10, v from gone")
    assert sorted(((e.op, e.key) for e in tap.events()), key=str) == [
        ("delete", {"id": 7}),
        ("delete", {"id": 8}),
        ("insert", {"id": 17}),
        ("insert", {"id": 18}),
    ]


def test_foreign_key_cascades_come_after_their_cause(tap: Tap) -> None:
    tap.write(
        "create table head (id int primary key)",
        "create table line (id int primary key, head int references head on delete cascade on update cascade)",
        "create table note (id int primary key, head int references head on delete set null)",
    )
    for table in ("head", "line", "note"):
        tap.add(f"shop.{table}")
    tap.write("insert into head values (1)", "insert into line values (10, 1)", "insert into note values (20, null)")
    tap.events()
    tap.write("update head set id = 2", "update note set head = 2", "delete from head")
    assert [(e.tbl, e.op, e.new) for e in tap.events()] == [
        ("shop.head", "update", {"id": 2}),
        ("shop.line", "update", {"id": 10, "head": 2}),
        ("shop.note", "update", {"id": 20, "head": 2}),
        ("shop.head", "delete", None),
        ("shop.line", "delete", None),
        ("shop.note", "update", {"id": 20, "head": None}),
    ]


def test_what_is_rolled_back_leaves_no_event(tap: Tap) -> None:
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    with pytest.raises(errors.UniqueViolation), tap.app.transaction():
        tap.app.execute("insert into t values (1), (1)")
    with tap.app.transaction():
        tap.app.execute("insert into t values (2)")
        with tap.app.transaction(force_rollback=True):
            tap.app.execute("insert into t values (3)")
            tap.app.execute("truncate t")
        with tap.app.transaction():
            tap.app.execute("insert into t values (4)")
    tap.write(
        "do $$ begin insert into t values (5); begin insert into t values (6); insert into t values (6);"
        " exception when unique_violation then insert into t values (7); end; end $$"
    )
    rows = drain(tap.db)
    assert [(r[3], r[5]["id"]) for r in rows] == [("insert", 2), ("insert", 4), ("insert", 5), ("insert", 7)]
    # also what a savepoint wrote carries the transaction's own number
    assert rows[0][1] == rows[1][1] < rows[2][1] == rows[3][1]


def test_truncate(tap: Tap) -> None:
    tap.write("create table t (id int primary key)", "create table u (id int primary key references t)")
    tap.add("shop.t")
    tap.add("shop.u", mode="pk")
    tap.write(
        "insert into t values (1)",
        "truncate t cascade",
        "insert into t values (2)",
        "truncate t, u",
        "truncate t, t, u",
    )
    seen = tap.events()
    assert [e.op for e in seen] == ["insert", "truncate", "truncate", "insert", *["truncate"] * 4]
    for pair in (seen[1:3], seen[4:6], seen[6:8]):
        assert {e.tbl for e in pair} == {"shop.t", "shop.u"}
    assert {(e.key is None, e.old is None, e.new is None) for e in seen if e.op == "truncate"} == {(True, True, True)}


def test_two_queues_capture_one_table(tap: Tap) -> None:
    tap.write("create table t (id int primary key, v int)")
    tap.add("shop.t")
    with Tap(tap.db, "second", "other") as second:
        second.add("shop.t", mode="pk")
        tap.write("insert into t values (1, 2)")
        assert tap.images() == [("insert", {"id": 1}, None, {"id": 1, "v": 2})]
        assert second.images() == [("insert", {"id": 1}, None, None)]
        tap.owner.execute("select gdq.remove_table('q', 'shop.t')")
        tap.write("delete from t", "truncate t")
        assert [e.op for e in second.events()] == ["delete", "truncate"]
        assert [e.op for e in tap.events()] == ["ddl"]


def test_capture_leaves_no_trace(tap: Tap) -> None:
    """Definitions and rights of the user's tables are what they were, once capture has ended."""
    tap.write(
        "create table t (id int primary key, v int check (v > 0)) with (fillfactor = 70)",
        "create table p (id int primary key) partition by range (id)",
        "create table p1 partition of p for values from (0) to (10)",
        "grant select on t to public",
        "create index on t (v)",
    )
    before = dump(tap.db, "-s", "-n", SCHEMA)
    for end in (
        "gdq.remove_table('q', 'shop.t', force => true), gdq.remove_table('q', 'shop.p', force => true)",
        "gdq.drop_queue('q', force => true)",
    ):
        tap.add("shop.t")
        tap.add("shop.p")
        tap.write(
            "insert into t values (1, 1)",
            "insert into p values (1)",
            "create table if not exists p2 partition of p default",
        )
        tap.write("drop table p2")
        assert dump(tap.db, "-s", "-n", SCHEMA) != before
        tap.owner.execute(f"select {end}".encode())
        assert dump(tap.db, "-s", "-n", SCHEMA) == before
        tap.write("delete from t", "delete from p", "truncate t, p")
    assert tap.owner.execute("select from pg_class where relnamespace = 'gdq_log'::regnamespace").rowcount == 0
    assert tap.owner.execute("select from pg_proc where pronamespace = 'gdq_log'::regnamespace").rowcount == 0


def test_drop_queue_wants_force_while_it_is_used(tap: Tap) -> None:
    tap.write("create table t (id int)")
    tap.add("shop.t")
    with pytest.raises(errors.ObjectInUse, match=r'queue "q" still has 1 table\(s\), 1 consumer\(s\)'):
        tap.owner.execute("select gdq.drop_queue('q')")
    assert tap.owner.execute("select gdq.drop_queue('no such')").fetchone() == (False,)
