"""Format json: whole rows in one value, read back as a typed log gives them; no DDL makes a write fail."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import errors, sql

from tests.capture.test_types import HOSTILE, PINNED, SAMPLES, USER_COLUMNS, USER_TYPES, VALUES, pin, set_foreign_money
from tests.support.events import Event, Tap

GUARDS = ("!gdq_ddl", "!gdq_drop", "!gdq_rewrite", "!gdq_capture_role")


def no_event_triggers(tap: Tap) -> None:
    with tap.db.connect("su") as su:
        for name in GUARDS:
            su.execute(sql.SQL("drop event trigger if exists {}").format(sql.Identifier(name)))


def in_both_formats(tap: Tap, columns: str, **options: Any) -> None:
    """Tables t and j of the same columns, captured typed and in json."""
    for name, log_format in (("t", "typed"), ("j", "json")):
        tap.write(f"create table {name} ({columns})")
        tap.add(f"shop.{name}", format=log_format, **options)


def same(events: list[Event]) -> list[tuple[Any, ...]]:
    """The events of t, having seen that those of j are the same."""
    by_table = {name: [(e.op, e.key, e.old, e.new) for e in events if e.tbl == f"shop.{name}"] for name in ("t", "j")}
    assert by_table["t"] == by_table["j"]
    return by_table["t"]


def test_values_of_every_type_are_those_of_a_typed_log(tap: Tap) -> None:
    found = tap.app.execute(
        "select t.typname, format_type(t.oid, -1), t.typarray <> 0 from pg_type t"
        " where t.typtype in ('b', 'r', 'm', 'd', 'e') and t.typcategory <> 'A' and t.oid < 16384 order by t.oid"
    ).fetchall()
    columns: dict[str, tuple[str, str | None]] = {}
    for number, (name, type_, has_array) in enumerate(found):
        columns[f"c{number}"] = (type_, SAMPLES[name])
        if has_array:
            columns[f"a{number}"] = (f"{type_}[]", None)
    tap.write(*USER_TYPES)
    columns |= {f"u_{name}": (type_, value) for name, (type_, value, _) in USER_COLUMNS.items()}
    in_both_formats(tap, f"id int primary key, {', '.join(f'{c} {type_}' for c, (type_, _) in columns.items())}")
    plain = ("default_transaction_isolation", "search_path", "array_nulls")
    pin(tap.app, {name: value for name, value in HOSTILE.items() if name not in plain})
    set_foreign_money(tap.app)
    arrays = ", ".join(f"{a} = array[c{a[1:]}, null]" for a in columns if a.startswith("a"))
    values = sql.SQL(", ").join(sql.Literal(value) for _, value in columns.values())
    for name in ("t", "j"):
        tap.app.execute(sql.SQL("insert into {} values (1, {})").format(sql.Identifier("shop", name), values))
        tap.write(f"update shop.{name} set {arrays}", f"update shop.{name} set id = 2", f"delete from shop.{name}")
    assert [op for op, *_ in same(tap.events())] == ["insert", "update", "update", "delete"]


def test_values_that_encoders_lose(tap: Tap) -> None:
    names = {type_: f"c{n}" for n, type_ in enumerate(VALUES)}
    in_both_formats(tap, f"id serial primary key, {', '.join(f'{c} {t}' for t, c in names.items())}, d float8, r real")
    for name in ("t", "j"):
        for type_, values in VALUES.items():
            for value in [*values, None]:
                tap.app.execute(
                    sql.SQL("insert into {} ({}) values ({})").format(
                        sql.Identifier(name), sql.Identifier(names[type_]), sql.Literal(value)
                    )
                )
        for number in ("-0", "NaN", "Infinity", "5e-324", "0.1"):
            tap.write(
                f"insert into {name} (d, r) values ('{number}'::float8 + 0.2, '{number if number != '5e-324' else 1}')"
            )
    tap.owner.execute("select gdq.force_tick('q')")
    batch = tap.owner.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
    assert batch
    events = tap.owner.execute("select op, tbl, key, old, new from gdq.get_batch(%s, %s)", batch).fetchall()
    assert len(same([Event(*event) for event in events])) > 60
    pin(tap.owner, PINNED)
    images = ", ".join(f"{image}_{name}" for image in ("old", "new") for name in [*names.values(), "id", "d", "r"])
    typed, json = (
        tap.owner.execute(
            f"select ev_op, format('%s', row({images})) from ({rows}) r order by ev_id".encode()
        ).fetchall()
        for name in ("t", "j")
        for (rows,) in tap.owner.execute("select gdq.batch_sql(%s, %s, %s::regclass)", [*batch, f"shop.{name}"])
    )
    assert typed == json


@pytest.mark.parametrize("mode", ["full", "pk"])
def test_modes(tap: Tap, mode: str) -> None:
    """Keys that change, included columns and partitions, as with a typed log."""
    options = {"include": ["b"]} if mode == "pk" else {}
    in_both_formats(tap, "a text, id int primary key, b numeric(6,2), c text", mode=mode, **options)
    for name in ("t", "j"):
        tap.write(
            f"insert into {name} values ('x', 1, 1.50, 'y,\"z\"'), ('', 2, null, '()')",
            f"update {name} set b = 2.00, c = null where id = 1",
            f"update {name} set id = 3 where id = 2",
            f"delete from {name}",
            f"truncate {name}",
        )
    seen = tap.batch("shop.t", "shop.j")
    assert len(same(seen.events)) == {"full": 7, "pk": 8}[mode]
    typed, json = ([{k: v for k, v in row.items() if k[:3] != "ev_"} for row in seen.rows[f"shop.{n}"]] for n in "tj")
    assert typed == json
    formats = tap.owner.execute("select table_name, format from gdq.table_info('q')").fetchall()
    assert formats == [("shop.j", "json"), ("shop.t", "typed")]


@pytest.mark.parametrize("granularity", ["row", "statement"])
def test_options_of_capture(tap: Tap, granularity: str) -> None:
    options = {"granularity": granularity, "origin": True, "operations": ["insert", "update"]}
    in_both_formats(tap, "id int primary key, a text", **options)
    tap.write("create table u (id int)", "set gdq.origin = 'here'")
    for name in ("t", "j"):
        tap.write(f"insert into {name} values (1, 'x,y'), (2, null)", f"update {name} set id = id + 2, a = 'z'")
        tap.write(f"delete from {name}", f"truncate {name}")
    seen = tap.batch("shop.t", "shop.j")
    assert len(same(seen.events)) == {"row": 4, "statement": 6}[granularity]
    assert {row["ev_origin"] for row in seen.rows["shop.j"]} == {"here"}
    with pytest.raises(errors.InvalidParameterValue, match="where go with format typed"):
        tap.add("shop.u", format="json", where="id > 1")


@pytest.mark.parametrize("granularity", ["row", "statement"])
def test_column_with_a_name_that_capture_functions_use(tap: Tap, granularity: str) -> None:
    """A table may have a column r, new or gdq_new: the row is logged, not the column."""
    in_both_formats(tap, "r int primary key, new text, gdq_new int4range", granularity=granularity)
    for name in ("t", "j"):
        tap.write(f"insert into {name} values (1, 'x', '[2,3)')", f"update {name} set new = 'y'", f"delete from {name}")
    assert [op for op, *_ in same(tap.events())] == {
        "row": ["insert", "update", "delete"],
        "statement": ["insert", "delete", "insert", "delete"],
    }[granularity]


def test_rows_as_wide_as_a_table_may_be(tap: Tap) -> None:
    """A typed log cannot hold two images of them."""
    columns = ", ".join(f"c{n} int" for n in range(799))
    tap.write(f"create table t (id int primary key, {columns})")
    tap.add("shop.t", format="json")
    tap.write("insert into t (id, c798) values (1, 7)", "update t set c0 = 1")
    insert, update = tap.events()
    assert insert.new
    assert update.new
    assert (insert.new["c798"], update.new["c0"], len(update.new)) == (7, 1, 800)


def test_ddl_is_followed_with_event_triggers(tap: Tap) -> None:
    tap.write("create table t (id int primary key, a int)")
    tap.add("shop.t", format="json")
    with tap.app.transaction():
        tap.write("insert into t values (1, 1)", "alter table t add b text", "insert into t values (2, 2, 'x')")
        tap.write("alter table t drop a, add c int", "update t set b = 'y'", "alter table t rename b to d")
    tap.write("insert into t values (3, 'z', 4)", "alter table t alter c type bigint", "delete from t where id = 3")
    events = [e for e in tap.events() if e.op not in ("ddl", "resync")]
    assert [e.new or e.old for e in events] == [
        {"id": 1, "a": 1},
        {"id": 2, "a": 2, "b": "x"},
        {"id": 1, "b": "y", "c": None},
        {"id": 2, "b": "y", "c": None},
        {"id": 3, "d": "z", "c": 4},
        {"id": 3, "d": "z", "c": "4"},
    ]
    tap.owner.execute("select gdq.remove_table('q', 'shop.t')")
    left = tap.owner.execute("select from pg_type where typnamespace = 'gdq_log'::regnamespace and typname ~ '_row$'")
    assert left.rowcount == 0


def test_format_is_json_where_there_are_no_event_triggers(tap: Tap) -> None:
    no_event_triggers(tap)
    tap.write("create table t (id int primary key, a int)", "create table u (id int)")
    tap.add("shop.t")
    assert tap.owner.execute("select format from gdq.table_info('q')").fetchone() == ("json",)
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="event triggers of gdq are missing"):
        tap.add("shop.u", format="typed")
    with pytest.raises(errors.InvalidParameterValue, match="format json logs whole rows") as refused:
        tap.add("shop.u", exclude=["id"])
    assert "event triggers of gdq are missing or off" in (refused.value.diag.message_hint or "")
    with pytest.raises(errors.InvalidParameterValue, match='unknown format "xml"'):
        tap.add("shop.u", format="xml")
    tap.write("insert into t values (1, 2)")
    assert [e.new for e in tap.events()] == [{"id": 1, "a": 2}]


def test_partition_with_its_columns_in_another_order_is_refused(tap: Tap) -> None:
    tap.write(
        "create table t (id int, a int, gone int) partition by list (id)",
        "create table t1 (a int, id int, gone int)",
        "alter table t attach partition t1 for values in (1)",
    )
    with pytest.raises(errors.FeatureNotSupported, match=r"partition shop\.t1 has its columns in another order"):
        tap.add("shop.t", format="json")
    tap.write("alter table t detach partition t1")
    tap.add("shop.t", format="json")
    tap.write("alter table t attach partition t1 for values in (1)")
    state = tap.owner.execute("select state, reason from gdq.table_info('q')").fetchone()
    assert state
    assert state[0] == "resync"
    assert "another order" in state[1]


def test_partitions_with_dropped_columns(tap: Tap) -> None:
    tap.write(
        "create table t (x int, id int, a int) partition by list (id)",
        "create table t1 (id int, y int, a int)",
        "alter table t drop x",
        "alter table t1 drop y",
        "alter table t attach partition t1 for values in (1)",
        "create table t2 partition of t for values in (2)",
    )
    tap.add("shop.t", format="json")
    tap.write("insert into t values (1, 10), (2, 20)", "update t set id = 2 where id = 1")
    assert [(e.op, e.old, e.new) for e in tap.events()] == [
        ("insert", None, {"id": 1, "a": 10}),
        ("insert", None, {"id": 2, "a": 20}),
        ("delete", {"id": 1, "a": 10}, None),
        ("insert", None, {"id": 2, "a": 10}),
    ]
