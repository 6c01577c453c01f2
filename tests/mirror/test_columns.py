"""`gdq mirror` and columns that are added, widened, renamed, dropped and given another type, amid writes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gdq.consumers.mirror.state import History
from tests.mirror.conftest import Lake
from tests.mirror.test_history import Replay

_DDL = (
    "alter table item add column more int",
    "alter table item add column made int default 7",
    "alter table item rename column name to label",
    "alter table item alter column price type numeric(12, 3)",
    "alter table item alter column n type bigint",
    "alter table item drop column more",
    "alter table item add column more text",
    """begin; alter table item rename column label to other; alter table item rename column made to label;
              alter table item rename column other to made; commit""",
)
_CHANGES = (
    "insert into item (id) select i from generate_series({0}, {0} + 8) i on conflict do nothing",
    "update item set n = coalesce(n, 0) + 1, price = {0} / 8.0 where id % 4 = {0} % 4",
    "update item set id = -id where id between {0} and {0} + 3 and -id not in (select id from item)",
    "begin; delete from item where id = {0}; insert into item (id, n) values ({0}, 5); commit",
    "delete from item where id % 9 = {0} % 9",
)


def write(lake: Lake, choice: random.Random) -> None:
    lake.run(*(change.replace("{0}", str(choice.randrange(1, 60))) for change in choice.choices(_CHANGES, k=4)))


def make(lake: Lake) -> None:
    lake.run(
        "create table item (id int primary key, name text, n int, price numeric(8, 2))",
        "insert into item select i, 'name ' || i, i, i from generate_series(1, 50) i",
    )
    lake.capture("item")


@pytest.mark.long
def test_columns_that_change_amid_writes(each: Lake) -> None:
    """The lake table equals the table after each kind of DDL, with changes before and after it in one batch."""
    choice = random.Random(3)
    make(each)
    each.bring_up("public.item")
    for ddl in _DDL:
        write(each, choice)
        each.run(ddl)
        write(each, choice)
        each.bring_up("public.item")
        each.same("public.item")
    each.run("truncate item")
    write(each, choice)
    each.bring_up("public.item")
    each.same("public.item")


@pytest.mark.long
@pytest.mark.parametrize("form", ["feed", "scd2"])
def test_columns_of_histories_that_change_amid_writes(each: Lake, form: History) -> None:
    """A history gives the table at each tick, also at those before its columns changed; columns that went are kept."""
    choice = random.Random(4)
    make(each)
    history = Replay(each, ["public.item"], form)
    history.mirror()
    history.note()
    for ddl in _DDL:
        write(each, choice)
        history.note()
        history.mirror()
        each.run(ddl)
        write(each, choice)
        history.mirror()
        history.note()
        history.mirror()
        history.check()
    each.run("truncate item")
    write(each, choice)
    history.note()
    history.mirror()
    history.check()
    assert "more_1" in each.read("public.item").schema.names


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_added_columns_write_no_file_again(lake: Lake, kind: str) -> None:
    """Where the format allows it, the files of a lake table stay, whatever it is; no copy is made."""
    lake = replace(lake, kind=kind)
    make(lake)
    lake.mirror("public.item")
    files = {path.name for path in (lake.folder).rglob("part-*.parquet")}
    ddl = ["alter table item add column more int"]
    if kind == "iceberg":
        ddl += ["alter table item rename column name to label", "alter table item drop column n"]
    lake.run(*ddl)
    said = lake.mirror("public.item")
    assert "copied" not in said
    assert "has other columns, which its lake table has got" in said
    assert {path.name for path in (lake.folder).rglob("part-*.parquet")} == files
    lake.run("insert into item (id, more) values (1000, 3)", "update item set more = 4 where id = 2")
    assert "copied" not in lake.mirror("public.item")
    lake.same("public.item")


def test_a_policy_for_columns(lake: Lake) -> None:
    """What is dropped is kept as NULL, what is renamed under both names; what is to stop stops in one line."""
    make(lake)
    words = ["public.item", "--on-column", "dropped=keep", "--on-column", "renamed=keep"]
    lake.mirror(*words)
    lake.run("alter table item drop column n", "alter table item rename column name to label")
    lake.run("update item set label = 'other' where id = 1", "delete from item where id = 2")
    assert "copied" not in lake.mirror(*words)
    rows = {row["id"]: row for row in lake.read("public.item").to_pylist()}
    assert (rows[1]["n"], rows[1]["name"], rows[1]["label"]) == (None, None, "other")
    assert (rows[3]["n"], rows[3]["name"], rows[3]["label"]) == (3, "name 3", "name 3")
    assert 2 not in rows
    lake.run("alter table item drop column price")
    done = lake.command("public.item", "--on-column", "dropped=stop")
    assert (done.returncode, done.stdout) == (1, "")
    assert 'the column "price" of table public.item was dropped: the mirror stops' in done.stderr
    assert "--on-column dropped=drop" in done.stderr
    assert "price" in lake.read("public.item").schema.names
    for word, said in (("gone=keep", "names no change of columns"), ("added=keep", "has no such answer")):
        done = lake.command("public.item", "--on-column", word)
        assert (done.returncode, said in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize("form", ["feed", "scd2"])
def test_another_type_ends_a_history_or_begins_a_column(lake: Lake, form: History) -> None:
    make(lake)
    history = Replay(lake, ["public.item"], form)
    history.mirror()
    history.note()
    lake.run("alter table item alter column n type text using 'n' || n", "update item set n = 'x' where id = 1")
    done = lake.command("public.item", "--history", form)
    assert (done.returncode, done.stdout) == (1, "")
    assert 'the column "n" of table public.item was retyped: the mirror stops' in done.stderr
    assert "--on-column retyped=keep" in done.stderr
    history.mirror("retyped=keep")
    before = {row["id"]: row for row in lake.read("public.item").to_pylist() if row["n"] is None}
    assert (before[7]["n_1"], before[7]["n"]) == (7, None)
    history.known.clear()
    history.note()
    history.mirror()
    history.check()
