"""`gdq mirror`: captured tables as Delta, Iceberg and Parquet tables, equal at every tick."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gdq.consumers.lake.files import ArrowDifference
from gdq.consumers.mirror.current import CurrentRows
from gdq.consumers.mirror.mirror import Mirror
from gdq.consumers.mirror.table import MirrorTable
from tests.mirror.conftest import Lake
from tests.support.programs import gdq, start_gdq
from tests.support.waiting import until

ITEM = """create table item (id int primary key, name text, price numeric(10, 2), rate numeric, at timestamptz,
            share float8, tags text[], data bytea, active bool, made date)"""
FILL = """insert into item select i, 'name ' || i, i * 1.25, i / 3.0, timestamptz '2024-02-29 12:00Z'
            + i * interval '1 s', i / 7.0, array['a', 'b'], null, i % 2 = 0, date '2024-01-01' + i
            from generate_series(1, 300) i"""


@pytest.mark.server
def test_a_table_is_copied_and_its_changes_follow(each: Lake) -> None:
    """Inserts, updates, changed keys, deletes; keys that swap; a row that comes and goes; a table without rows."""
    each.run(ITEM, FILL, "create table empty (id int primary key)")
    each.capture("item", "empty")
    said = each.mirror("public.item", "public.empty")
    assert "public.item: copied" in said
    each.same("public.item", "public.empty")
    each.run(
        "insert into item (id, name, share) values (1000, 'new', 'NaN'), (1001, 'a ''quoted'', \"name\"', -0.0)",
        "update item set price = price + 1 where id < 20",
        "begin; update item set id = -1 where id = 1; update item set id = 1 where id = 2; "
        "update item set id = 2 where id = -1; commit",
        "delete from item where id between 50 and 60",
        "begin; insert into item (id) values (2000); delete from item where id = 2000; commit",
    )
    each.mirror("public.item", "public.empty")
    each.same("public.item", "public.empty")
    each.run("delete from item", "insert into item select * from item", "insert into empty values (7)")
    each.mirror("public.item", "public.empty")
    each.same("public.item", "public.empty")
    assert "copied" not in each.mirror("public.item", "public.empty")


@pytest.mark.long
@pytest.mark.server
def test_a_truncated_table(each: Lake) -> None:
    """Rows before, between and after, in one batch and in one transaction; also alone."""
    each.run("create table item (id int primary key, name text)", "insert into item values (1, 'a'), (2, 'b')")
    each.capture("item")
    each.mirror("public.item")
    each.run(
        "insert into item values (3, 'c')",
        "truncate item",
        "begin; insert into item values (1, 'x'); truncate item; insert into item values (1, 'y'), (5, 'z'); commit",
        "update item set name = 'w' where id = 5",
    )
    assert "copied" not in each.mirror("public.item")
    each.same("public.item")
    each.run("truncate item")
    assert "copied" not in each.mirror("public.item")
    each.same("public.item")


@pytest.mark.server
def test_tables_without_a_key_and_with_partitions(lake: Lake) -> None:
    """Equal rows are counted; rows move between partitions; a partition that is truncated."""
    lake.run(
        "create table line (a int, b text)",
        "insert into line select i % 3, null from generate_series(1, 12) i",
        "create table part (id int, day date, primary key (id, day)) partition by range (day)",
        "create table part_1 partition of part for values from ('2024-01-01') to ('2024-02-01')",
        "create table part_2 partition of part for values from ('2024-02-01') to ('2024-03-01')",
        "insert into part select i, date '2024-01-01' + i from generate_series(0, 50) i",
    )
    lake.run("select gdq.add_table('shop', 'line')")
    lake.capture("part")
    lake.mirror("public.line", "public.part")
    lake.same("public.line", "public.part")
    lake.run(
        "delete from line where ctid in (select ctid from line where a = 1 limit 2)",
        "update line set b = 'x' where ctid = (select min(ctid) from line where a = 2)",
        "insert into line values (0, null), (null, null)",
        "update part set day = day + 20 where id < 20",
        "delete from part where id = 40",
    )
    lake.mirror("public.line", "public.part")
    lake.same("public.line", "public.part")
    lake.run("truncate part_1", "truncate line")
    lake.mirror("public.line", "public.part")
    lake.same("public.line", "public.part")


@pytest.mark.long
@pytest.mark.server
def test_ddl_has_the_table_copied_again(each: Lake) -> None:
    """Columns added, renamed, retyped and dropped, with changes around them; a table with another name."""
    each.run("create table item (id int primary key, name text, n int)", "insert into item values (1, 'a', 1)")
    each.capture("item")
    each.mirror("public")
    each.run(
        "update item set n = 2",
        "alter table item add column more int default 7",
        "insert into item values (2, 'b', 3, 4)",
        "alter table item rename column name to label",
        "alter table item alter column n type bigint",
    )
    each.mirror("public")
    each.same("public.item")
    each.run("alter table item drop column more", "alter table item rename to thing", "insert into thing values (3)")
    said = each.mirror("public")
    assert "public.thing: copied" in said
    each.same("public.thing")


def test_a_schema_is_mirrored_with_tables_that_are_made_later(lake: Lake) -> None:
    """While the mirror follows; tables of other schemas are passed over."""
    lake.run("create schema stock", "create table stock.part (id int primary key)", "create table other (id int)")
    lake.capture("stock.part", "other")
    done = gdq("add-table", "shop", "--new-tables", "*.*", dsn=lake.source.dsn)
    assert done.returncode == 0, done.stderr
    follower = start_gdq("mirror", "shop", "stock", "--target", lake.target, "--follow", dsn=lake.source.dsn)
    try:
        until((lake.folder / "stock.part" / "_delta_log").is_dir, "the first copy")
        lake.run(
            "create table stock.later (id int primary key, name text)",
            "insert into stock.later values (1, 'a')",
            "insert into other values (1)",
        )
        until((lake.folder / "stock.later" / "_delta_log").is_dir, "the copy of the new table")
        lake.run("insert into stock.later values (2, 'b')", "insert into stock.part values (5)")
        until(lambda: lake.read("stock.later").num_rows == 2 and lake.read("stock.part").num_rows == 1, "the rows")
        (listed,) = json.loads(gdq("mirrors", "--json", dsn=lake.source.dsn).stdout)
        assert (listed["mirror_name"], listed["queue_name"], listed["state"]) == ("copy", "shop", "running")
        assert (listed["target"], listed["history"]) == (lake.target, None)
        assert listed["lag_seconds"] is not None
    finally:
        follower.terminate()
        out, err = follower.communicate()
    assert follower.returncode == 0, err
    assert "copy: tick " in out
    lake.same("stock.part", "stock.later")
    assert not (lake.folder / "public.other").exists()


@pytest.mark.long
def test_a_table_without_changes_gets_no_commit(lake: Lake) -> None:
    """Nor a copy, however long the consumer goes on without it, and although its changes are gone from the log."""
    lake.run("create table busy (id int primary key)", "create table idle (id int primary key)")
    lake.run("insert into idle values (1)")
    lake.capture("busy", "idle")
    lake.mirror("public.busy", "public.idle")
    for number in range(3):
        lake.run(f"insert into busy values ({number})", "select gdq.force_tick('shop')")
        lake.mirror("public.busy", "public.idle")
        with lake.source.connect("su") as su:
            su.execute("update gdq.queue set rotation_period = '1 ms'")
            su.execute("select gdq.maintain()")
            su.execute("select gdq.maintain()")
    assert (lake.commits("public.idle"), lake.commits("public.busy")) == (1, 4)
    lake.run("update idle set id = 2")
    assert "copied" not in lake.mirror("public.busy", "public.idle")
    lake.same("public.busy", "public.idle")


@pytest.mark.long
def test_a_consumer_that_was_moved_loses_nothing(lake: Lake) -> None:
    """Changes are read from where each table stands: applied once after a step back, copied if they are gone."""
    lake.run("create table item (id int primary key)", "create table idle (id int primary key)")
    lake.capture("item", "idle")
    lake.mirror("public.item", "public.idle")
    (before,) = lake.ask("select last_tick from gdq.consumer_info('shop')")[0]
    lake.run("insert into item values (1)")
    lake.mirror("public.item", "public.idle")
    lake.run(f"select gdq.seek('shop', 'copy', at_tick => {before})", "insert into item values (2)")
    lake.mirror("public.item", "public.idle")
    lake.same("public.item", "public.idle")
    lake.run("insert into item values (3)", "insert into idle values (3)")
    lake.run("select gdq.seek('shop', 'copy', to_now => true)")
    lake.mirror("public.item", "public.idle")
    lake.same("public.item", "public.idle")


def test_a_killed_mirror_goes_on(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the commit of one table, before the next one's: that one's changes are not applied twice."""
    lake.run("create table a (n int)", "create table b (n int)")
    lake.capture("a", "b")
    words = ["public.a", "public.b"]
    lake.mirror(*words)
    lake.run("insert into a values (1), (1)", "insert into b values (1)")

    class Killed(BaseException):
        pass

    found = CurrentRows.changed

    def changed(self: CurrentRows, table: MirrorTable, *given: Any) -> ArrowDifference | None:
        if table.name == "public.b":
            raise Killed
        return found(self, table, *given)

    monkeypatch.setattr(CurrentRows, "changed", changed)
    with Mirror(lake.source.dsn, "shop", "copy", lake.target, words) as mirror, pytest.raises(Killed):
        list(mirror.run())
    monkeypatch.undo()
    assert lake.read("public.a").num_rows == 2
    lake.run("insert into a values (1)")
    assert "copied" not in lake.mirror(*words)
    lake.same("public.a", "public.b")


def test_rows_that_others_changed_are_copied_again(lake: Lake) -> None:
    from deltalake import DeltaTable

    lake.run("create table item (id int primary key)", "insert into item values (1), (2)")
    lake.capture("item")
    lake.mirror("public.item")
    DeltaTable(str(lake.folder / "public.item")).delete("id = 1")
    assert "copied again" in lake.mirror("public.item")
    lake.same("public.item")


def test_dropped_and_made_anew(lake: Lake) -> None:
    """The lake tables stay, and are caught up with or copied again."""
    lake.run("create table item (id int primary key)", "insert into item values (1)")
    lake.capture("item")
    lake.mirror("public.item")
    done = gdq("drop-mirror", "shop", "copy", dsn=lake.source.dsn)
    assert (done.returncode, done.stderr) == (0, "dropped mirror copy of shop\n")
    assert gdq("drop-mirror", "shop", "copy", dsn=lake.source.dsn).stderr == "already gone: mirror copy of shop\n"
    assert json.loads(gdq("mirrors", "--json", dsn=lake.source.dsn).stdout) == []
    assert lake.ask("select count(*) from gdq.consumer_info('shop')") == [(0,)]
    lake.run("insert into item values (2)")
    lake.mirror("public.item")
    lake.same("public.item")


def test_a_mirror_is_paused_and_resumed(lake: Lake) -> None:
    """It says so and waits, amid batches too; its lag is in the status and in the metrics meanwhile."""
    lake.run("create table item (id int primary key)")
    lake.capture("item")
    follower = start_gdq("mirror", "shop", "public.item", "--target", lake.target, "--follow", dsn=lake.source.dsn)
    try:
        until((lake.folder / "public.item" / "_delta_log").is_dir, "the copy")
        assert gdq("pause", "shop", "copy", dsn=lake.source.dsn).returncode == 0
        _said(follower, "mirror copy is paused: gdq resume shop copy")
        lake.run("insert into item values (1)", "select gdq.force_tick('shop')")
        (consumer,) = json.loads(gdq("status", "--json", dsn=lake.source.dsn).stdout)["consumers"]
        assert (consumer["consumer_name"], consumer["unread_events"]) == ("copy", 1)
        assert consumer["lag_seconds"] > 0
        (listed,) = json.loads(gdq("mirrors", "--json", dsn=lake.source.dsn).stdout)
        assert (listed["state"], listed["unread_events"]) == ("paused", 1)
        metrics = gdq("metrics", "--once", dsn=lake.source.dsn).stdout
        assert re.search(r'^gdq_consumer_lag_seconds\{.*"copy".*\} [0-9.e-]+$', metrics, re.MULTILINE), metrics
        assert lake.read("public.item").num_rows == 0
        assert gdq("resume", "shop", "copy", dsn=lake.source.dsn).returncode == 0
        until(lambda: lake.read("public.item").num_rows == 1, "the row")
        _said(follower, "mirror copy is resumed")
    finally:
        follower.terminate()
        follower.communicate()


def _said(follower: subprocess.Popen[str], line: str) -> None:
    """Wait until a program says something."""
    assert follower.stderr is not None
    said = ""
    while line not in said:
        more = follower.stderr.readline()
        assert more, said
        said += more


def test_old_versions_are_removed(each: Lake) -> None:
    """Files that no version within the time has, and what killed mirrors left; the position stays, so do the rows."""
    each.run(
        "create table item (id int primary key, n int)", "insert into item select i, 0 from generate_series(1, 9) i"
    )
    each.capture("item")
    each.mirror("public.item")

    def files() -> set[Path]:
        return {path for path in each.folder.rglob("part-*.parquet") if "current" not in path.parts}

    first = files()
    place = next(iter(first)).parent
    left = place / "part-left.parquet" if each.kind != "parquet" else place.parent / "v00000099" / "part-left.parquet"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"left")
    for number in range(3):
        each.run(f"update item set n = {number} + 1")
        each.mirror("public.item")
    assert files() >= first
    each.run("update item set n = 9")
    assert "copied" not in each.mirror("public.item", "--keep", "0")
    each.same("public.item")
    # those of the present version; a Parquet folder has them once, the version before among them
    assert not files() & first
    assert not left.exists()
    assert len(files()) == 1
    each.run("delete from item where id = 1")
    assert "copied" not in each.mirror("public.item")
    each.same("public.item")


def test_what_cannot_be_mirrored_is_refused(lake: Lake) -> None:
    lake.run(
        "create table item (id int primary key, n int)",
        "create table part (id int primary key, n int)",
        "select gdq.add_table('shop', 'part', mode => 'pk')",
        "select gdq.register_consumer('shop', 'copy')",
    )
    lake.capture("item")

    def refused(*words: str, target: str = lake.target, name: str = "other") -> str:
        done = gdq("mirror", "shop", *words, "--target", target, "--name", name, dsn=lake.source.dsn)
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr

    assert 'queue shop has a consumer "copy", which is not this mirror\'s' in refused("public.item", name="copy")
    assert "table public.part is captured in part" in refused("public.part")
    assert 'there is no schema "item"' in refused("item")
    assert "is neither a table nor a schema" in refused("a.b.c")
    assert "is no folder of lake tables" in refused("public.item", target="csv:/lake")
    assert 'relation "public.missing" does not exist' in refused("public.missing")
    lake.run("create table plain (id int)")
    assert 'table public.plain is not captured by queue "shop"' in refused("public.plain")
    lake.mirror("public.item", "--name", "third")
    elsewhere = refused("public.item", target="delta:/x", name="third")
    assert f'mirror "third" writes to {lake.target}, not to delta:/x' in elsewhere
    assert gdq("pause", "shop", "third", dsn=lake.source.dsn).returncode == 0
    assert 'mirror "third" is paused' in refused("public.item", name="third")
    assert "is not the target of mirror fourth" in refused("public.item", name="fourth")


@pytest.mark.server
def test_rows_of_any_type_are_found_again(lake: Lake) -> None:
    """The image that the log has of a row is that of the copy, to the bit: an update finds it in the lake."""
    lake.run(
        "create type mood as enum ('sad', 'glad')",
        "create domain age as int check (value >= 0)",
        "create type pair as (a int, b text)",
        """create table odd (id int primary key, n int, c char(5), v varchar(9), j json, jb jsonb, ints int[],
             cash money, small numeric(5, 2), big numeric(60, 3), f real, i interval, t time, tz timetz, net inet,
             u uuid, p point, words tsvector, bits bit(3), m mood, d age, two pair, r int4range, q "char", at timestamp,
             twice int generated always as (id * 2) stored)""",
        """insert into odd values (1, 0, 'a', 'b ', '{"a": 1,  "b":2}', '{"b": 2.50}', '{1,null,3}', '12.30', 1.50,
             1e50, 0.1, '1 mon 2 days 24:00', '12:00', '12:00+02', '10.0.0.0/8', gen_random_uuid(), '(1.5,2)', 'a b:2',
             '101', 'glad', 7, '(1,"x, y")', '[1,5)', 'z', '2024-01-01 00:00:00.000001')""",
        "insert into odd (id, n, f, v) values (2, 0, 'NaN', ''), (3, 0, '-0', E'a\\nb,\"c\"')",
    )
    lake.capture("odd")
    lake.mirror("public.odd")
    lake.run("update odd set n = n + 1")
    assert "copied" not in lake.mirror("public.odd")
    rows = lake.read("public.odd").sort_by("id").to_pylist()
    assert [(row["id"], row["n"], row["twice"]) for row in rows] == [(1, 1, 2), (2, 1, 4), (3, 1, 6)]
    assert (rows[0]["j"], rows[0]["two"], rows[1]["v"]) == ('{"a": 1,  "b":2}', '(1,"x, y")', "")
    lake.run("delete from odd")
    assert "copied" not in lake.mirror("public.odd")
    assert lake.read("public.odd").num_rows == 0
