"""Columns that change in the source change in a replica's target too, between the rows before and after."""

from __future__ import annotations

import pytest

from tests.replica.conftest import Pair

TABLE = "create table item (id int primary key, name text, qty int)"


def columns(pair: Pair, *, target: bool) -> list[tuple[object, ...]]:
    with (pair.target if target else pair.source).connect("su") as connection:
        return connection.execute(
            """select attname::text, format_type(atttypid, atttypmod) from pg_attribute
                where attrelid = 'public.item'::regclass and attnum > 0 and not attisdropped order by 1"""
        ).fetchall()


def equal(pair: Pair) -> None:
    """Both sides have the same columns and rows."""
    assert columns(pair, target=True) == columns(pair, target=False)
    listed = ", ".join(f'"{name}"' for name, _ in columns(pair, target=False))
    found = []
    for place in (pair.source, pair.target):
        with place.connect("su") as connection:
            found.append(connection.execute(f"select {listed} from item order by id".encode()).fetchall())
    assert found[0] == found[1]


@pytest.fixture
def items(pair: Pair) -> Pair:
    pair.make(TABLE)
    pair.capture("item")
    pair.run("insert into item values (1, 'a', 10), (2, 'b', 20), (3, 'c', 30)")
    assert "copied public.item: 3 rows" in pair.apply().stderr
    return pair


def test_added_renamed_widened_and_dropped_within_one_batch(items: Pair) -> None:
    """Rows of every version arrive with its columns; nothing is copied again."""
    items.run(
        "update item set qty = qty + 1 where id = 1",
        "alter table item add note varchar(10)",
        "insert into item values (4, 'd', 40, 'four')",
        "alter table item rename name to title",
        "update item set title = 'B', note = 'two' where id = 2",
        "alter table item alter note type varchar(200)",
        "update item set note = repeat('long ', 20) where id = 4",
        "alter table item drop qty",
        "delete from item where id = 3",
        "insert into item values (5, 'e', 'five')",
    )
    assert "copied" not in items.apply().stderr
    equal(items)
    assert columns(items, target=True) == [
        ("id", "integer"),
        ("note", "character varying(200)"),
        ("title", "text"),
    ]


def test_ddl_without_rows(items: Pair) -> None:
    items.run("alter table item add note text")
    assert "copied" not in items.apply().stderr
    equal(items)
    items.run("alter table item drop note, add note int", "update item set note = id")
    assert "copied" not in items.apply().stderr
    equal(items)


def test_columns_that_no_row_had(items: Pair) -> None:
    """gdq.maintain() drops a version of the columns that was replaced before a row was written."""
    items.run(
        "update item set qty = 0 where id = 1",
        "alter table item add note text",
        "alter table item rename note to remark",
        "alter table item add flag boolean",
        "alter table item drop name",
    )
    items.run(*["select gdq.maintain()"] * 3)
    assert "copied" not in items.apply().stderr
    items.run("insert into item values (4, 40, 'r', true)")
    assert "copied" not in items.apply().stderr
    equal(items)


def test_names_that_change_hands(items: Pair) -> None:
    items.run(
        "alter table item add other text",
        "update item set other = 'o' || id",
        "begin; alter table item rename name to x; alter table item rename other to name; "
        "alter table item rename x to other; commit",
        "update item set name = 'after' where id = 2",
    )
    assert "copied" not in items.apply().stderr
    equal(items)


def test_values_that_change_without_events_are_copied(items: Pair) -> None:
    """A default for the rows that are there, and a type that rewrites them: the columns change, the rows come anew."""
    items.run("alter table item add flag boolean not null default true", "insert into item values (4, 'd', 40, false)")
    assert "copied public.item: 4 rows" in items.apply().stderr
    equal(items)
    items.run("alter table item alter qty type text using 'n' || qty", "update item set qty = 'x' where id = 1")
    assert "copied public.item: 4 rows" in items.apply().stderr
    equal(items)


def test_truncate_among_ddl(items: Pair) -> None:
    items.run(
        "insert into item values (4, 'd', 40)",
        "alter table item add note text",
        "insert into item values (5, 'e', 50, 'n')",
        "truncate item",
        "alter table item drop name",
        "insert into item values (6, 60, 'left')",
    )
    assert "copied" not in items.apply().stderr
    equal(items)


def test_what_was_changed_by_hand_already_stays(items: Pair) -> None:
    items.there(
        "alter table item add note text, drop qty, add own int default 7, alter name type varchar(1000)",
        "alter table item rename name to title",
    )
    items.run(
        "alter table item add note text, drop qty",
        "alter table item rename name to title",
        "insert into item values (4, 'd', 'n')",
    )
    assert "copied" not in items.apply().stderr
    with items.target.connect() as connection:
        found = connection.execute("select id, title, note, own from item order by id").fetchall()
    assert found == [(1, "a", None, 7), (2, "b", None, 7), (3, "c", None, 7), (4, "d", "n", 7)]


def test_a_target_that_refuses(items: Pair) -> None:
    """The batch is not applied; when the column can go, the next run goes on."""
    items.there("create view v as select name from item")
    items.run("insert into item values (4, 'd', 40)", "alter table item drop name", "insert into item values (5, 50)")
    failed = items.replicate()
    assert failed.returncode == 1
    assert 'the target refuses ALTER TABLE public.item drop column "name"' in failed.stderr
    with items.target.connect() as connection:
        assert connection.execute("select count(*) from item").fetchone() == (3,)
    items.there("drop view v")
    assert "copied" not in items.apply().stderr
    equal(items)


def test_a_column_that_capture_leaves_out_stays(items: Pair) -> None:
    items.run("""select gdq.alter_table_options('shop', 'item', '{"exclude": ["qty"]}')""")
    items.run("update item set name = 'z', qty = 0 where id = 1")
    items.apply()
    with items.target.connect() as connection:
        assert connection.execute("select name from item where id = 1").fetchone() == ("z",)
    assert [name for name, _ in columns(items, target=True)] == ["id", "name", "qty"]
