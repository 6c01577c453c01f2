"""Rows whose images are wide: log rows that pass the page size, and values stored out of line."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import errors

from tests.support.events import Event, Tap

pytestmark = pytest.mark.server


# 520 bigints are 4,160 bytes an image; 250 texts of 18 characters 4,750; 200 texts of 20 characters 4,200; the longest
# text that PostgreSQL never moves out of the row has 23.
WIDE = {
    "bigint": (520, "bigint", 2**60, 2**60 + 1),
    "18 characters": (250, "text", "x" * 18, "y" * 18),
    "20 characters": (200, "text", "x" * 20, "y" * 20),
    "23 characters": (170, "text", "x" * 23, "y" * 23),
}


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("mode", ["full", "pk"])
def test_two_images_that_pass_the_page_size(tap: Tap, mode: str, wide: str) -> None:
    count, kind, before, after = WIDE[wide]
    names = [f"c{n}" for n in range(count)]
    tap.write(f"create table t (id int primary key, {', '.join(f'{name} {kind}' for name in names)})")
    tap.add("shop.t", mode=mode, **({"include": names} if mode == "pk" else {}))
    tap.write(
        "insert into t select 1" + f", '{before}'" * count,
        "update t set " + ", ".join(f"{name} = '{after}'" for name in names),
        "update t set id = 2",
        "delete from t",
    )
    seen = tap.batch("shop.t")

    def image(value: Any, **more: int) -> dict[str, Any]:
        return (more if mode == "full" else {}) | dict.fromkeys(names, str(value))

    def row(op: str, number: int, old: Any, new: Any) -> Event:
        return Event(op, "shop.t", {"id": number}, old, new)

    moved = (
        [row("update", 2, image(after, id=1), image(after, id=2))]
        if mode == "full"
        else [row("delete", 1, image(after), None), row("insert", 2, None, image(after))]
    )
    assert seen.events == [
        row("insert", 1, None, image(before, id=1)),
        row("update", 1, image(before, id=1), image(after, id=1)),
        *moved,
        row("delete", 2, image(after, id=2), None),
    ]
    typed = seen.rows["shop.t"]
    halves = [r for r in typed if r["ev_op"] in "on"]
    # the delete and the insert of a changed key share one number
    assert len({r["ev_id"] for r in typed}) == len(seen.events) - (mode == "pk")
    assert all(r["new_c0"] is None if r["ev_op"] == "o" else r["old_c0"] is None for r in halves)
    if mode == "pk":
        assert [r["key_id"] for r in typed if r["ev_op"] in "Uon"][:2] == [1, 1]


def test_table_too_wide_for_two_images_in_one_log_row(tap: Tap) -> None:
    """A table holds 1,600 columns; an UPDATE of one with 799 is logged as two rows."""
    names = [f"c{n}" for n in range(799)]
    tap.write(f"create table t ({', '.join(f'{name} smallint' for name in names)})")
    tap.add("shop.t")
    tap.write(f"insert into t values ({', '.join(['1'] * 799)})", "update t set c0 = 2, c798 = 3")
    insert, update = tap.events()
    assert insert.new == dict.fromkeys(names, 1)
    assert update.new == insert.new | {"c0": 2, "c798": 3}
    tap.write("alter table t drop column c0, add column fresh int", "insert into t (c1, fresh) values (5, 6)")
    ddl, insert = tap.events()
    assert (ddl.op, insert.op) == ("ddl", "insert")
    assert insert.new == dict.fromkeys(names[1:]) | {"c1": 5, "fresh": 6}


def test_image_that_cannot_fit_is_refused(tap: Tap) -> None:
    columns = ", ".join(f"c{n} text" for n in range(500))
    tap.write(f"create table t (id int primary key, {columns})")
    with pytest.raises(errors.ProgramLimitExceeded, match=r"one row image may take 505 columns and \d+ bytes") as e:
        tap.add("shop.t")
    assert e.value.diag.message_hint == "Leave columns out with exclude, or capture in pk mode."
    assert "\n" not in str(e.value.diag.message_primary)
    tap.add("shop.t", mode="pk")
    tap.write("insert into t values (1)")
    assert tap.images() == [("insert", {"id": 1}, None, None)]


def test_large_values_out_of_line(tap: Tap) -> None:
    tap.write(
        "create table t (id int primary key, a text, b text)",
        "alter table t alter a set storage external, alter b set storage plain",
    )
    tap.add("shop.t")
    large, plain = "x" * 300_000, "y" * 5000
    tap.write(f"insert into t values (1, '{large}', '{plain}')", "update t set id = 2")
    _, update = tap.events()
    assert update.old == {"id": 1, "a": large, "b": plain}
    assert update.new == {"id": 2, "a": large, "b": plain}


def test_type_that_is_never_stored_out_of_line(tap: Tap) -> None:
    """A tsquery stays in the page whatever its size: two of them do not fit where one did."""
    tap.write("create table t (id int primary key, q tsquery)")
    tap.add("shop.t")
    query = " & ".join(f"'w{n:05}'" for n in range(200))
    tap.write(f"insert into t values (1, $${query}$$)", "update t set id = 2")
    _, update = tap.events()
    assert update.old == {"id": 1, "q": query}
    assert update.new == {"id": 2, "q": query}


@pytest.mark.long
def test_images_of_more_than_a_gigabyte_need_generic_plans(tap: Tap) -> None:
    """The way out that docs/guarantees.md names: the first plans of a session would decompress both images."""
    tap.write("create table t (id int primary key, v text, n int)")
    tap.add("shop.t")
    tap.write("insert into t values (1, repeat('x', 600000000), 0)")
    with pytest.raises((errors.InternalError_, errors.ProgramLimitExceeded), match=r"alloc request|too big"):
        tap.write("update t set n = 1")
    with tap.db.connect("app") as writer:
        writer.execute("set plan_cache_mode = force_generic_plan")
        writer.execute("update shop.t set n = 2")
    tap.owner.execute("select gdq.force_tick('q')")
    batch = tap.owner.execute("select batch_id, token from gdq.next_batch('q', 'c')").fetchone()
    assert batch
    query = tap.owner.execute("select gdq.batch_sql(%s, %s, 'shop.t')", batch).fetchone()
    assert query
    found = tap.owner.execute(f"select ev_op, new_n, octet_length(old_v) from ({query[0]}) r order by ev_id".encode())
    assert found.fetchall() == [("I", 0, None), ("U", 2, 600_000_000)]
