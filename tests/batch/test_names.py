"""Events bear the name that their table had when they were written."""

from __future__ import annotations

from typing import Any

from tests.support.events import Tap, drain

SWAP = ("alter table a rename to x", "alter table b rename to a", "alter table x rename to b")


def swapped(tap: Tap) -> list[tuple[str, str]]:
    """(operation, name) of a row in each table before and after a swap of their names; the DDL is left out."""
    tap.write("create table a (id int)", "create table b (id int)")
    tap.add("shop.a")
    tap.add("shop.b")
    tap.write("insert into a values (1)", "insert into b values (2)", "truncate b")
    return [("insert", "shop.a"), ("insert", "shop.b"), ("truncate", "shop.b")]


def names(rows: list[tuple[Any, ...]]) -> list[tuple[str, str]]:
    return [(row[3], row[4]) for row in rows if row[3] != "ddl"]


def test_unread_changes_keep_the_name_of_their_time(tap: Tap) -> None:
    before = swapped(tap)
    with tap.app.transaction():
        tap.write(*SWAP)
    tap.write("insert into a values (3)", "truncate b")
    assert names(drain(tap.db)) == [*before, ("insert", "shop.a"), ("truncate", "shop.b")]


def test_open_batch_that_is_read_again_gives_the_same_names(tap: Tap) -> None:
    before = swapped(tap)
    tap.owner.execute("select gdq.force_tick('q')")
    batch = tap.owner.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
    assert batch
    query = "select ev_id, ev_txid, ev_time, op, tbl, key, old, new from gdq.get_batch(%s, %s)"
    first = tap.owner.execute(query, batch).fetchall()
    tap.write(*SWAP)
    assert tap.owner.execute(query, batch).fetchall() == first
    assert names(first) == before


def test_renamed_schema(tap: Tap) -> None:
    """No table is locked by it, so a writer may log a row between the new name's number and its commit."""
    with tap.db.connect("su") as su, tap.db.connect("su") as writer:
        tap.write("create table a (id int)")
        tap.add("shop.a")
        writer.execute("begin")
        writer.execute("insert into shop.a values (1)")
        su.execute("begin")
        su.execute("alter schema shop rename to store")
        writer.execute("insert into shop.a values (2)")
        writer.execute("commit")
        tap.owner.execute("select gdq.force_tick('q')")
        batch = tap.owner.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
        query = "select tbl, new from gdq.get_batch(%s, %s)"
        first = tap.owner.execute(query, batch).fetchall()
        assert first == [("shop.a", {"id": 1}), ("shop.a", {"id": 2})]
        su.execute("commit")
        assert tap.owner.execute(query, batch).fetchall() == first


def test_resync_says_the_name_of_now(tap: Tap) -> None:
    tap.write("create table a (id int)")
    tap.add("shop.a")
    tap.write("alter table a add c int default 1", "alter table a rename to b")
    [resync] = [row for row in drain(tap.db) if row[3] == "resync"]
    assert (resync[4], resync[7]["now"]) == ("shop.a", "shop.b")


def test_column_that_is_dropped_and_added_again(tap: Tap) -> None:
    tap.write("create table a (id int, v int)")
    tap.add("shop.a")
    tap.write("alter table a drop v, add v int", "alter table a add w int")
    assert [row[7].get("replaced_columns") for row in drain(tap.db)] == [["v"], None]
