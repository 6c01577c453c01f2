"""Copies of the tables that a slot feeds: several at once, large ones in parts at one snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from subprocess import Popen
from typing import Any, cast

import psycopg
import pytest

from gdq.consumers.replica.slot.slot_replica import SlotReplica
from gdq.consumers.slot.slot import drop_slot
from tests.replica.conftest import Pair, count
from tests.support.programs import gdq, start_gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server

ROWS = 20_000


@pytest.fixture
def slotted(pair: Pair) -> Iterator[Pair]:
    """A pair that a slot feeds, with a table that is worth parts and a small one."""
    pair.make("create table big (id int primary key, n int, place int unique, note text)")
    pair.make("create table small (id int primary key)")
    pair.run(f"insert into big select i, 0, i, 'note ' || i from generate_series(1, {ROWS}) i", "analyze big")
    pair.run("insert into small values (1)")
    fed = replace(pair, fed_by="slot")
    fed.capture("big", "small")
    yield fed
    with pair.source.connect("su") as su:
        drop_slot(su, "shop", "mirror")


@contextmanager
def stuck_copy(pair: Pair) -> Iterator[tuple[Popen[str], psycopg.Connection[tuple[object, ...]]]]:
    """A program whose copy has brought parts of a table, and waits with one; the session that it waits for."""
    with pair.target.connect("su") as holder, pair.target.connect("su") as there:
        holder.execute("begin")
        holder.execute("insert into big values (%s)", [ROWS // 2])
        given = ("replicate", "shop", "mirror", "--to", pair.target.su_dsn, "--source", "slot", "--chunk-rows", "1000")
        copying = start_gdq(*given, dsn=pair.reader_dsn)
        until(lambda: copying.poll() is not None or count(there, "select count(*) from big"), "a part of the copy")
        try:
            yield copying, holder
        finally:
            copying.kill()
            copying.communicate()


def test_parts_are_read_at_one_snapshot(slotted: Pair) -> None:
    """What is written while they are read comes later, and is in no part."""
    with stuck_copy(slotted) as (copying, holder):
        slotted.run(
            "update big set n = 1 where id % 100 = 0",
            f"delete from big where id > {ROWS} - 50",
            f"insert into big select i, 2, i, 'new' from generate_series({ROWS} + 1, {ROWS} + 500) i",
            "insert into small values (2)",
        )
        holder.execute("rollback")
        _, told = copying.communicate()
    assert copying.returncode == 0, told
    assert told.splitlines() == ["copied public.small: 1 rows", f"copied public.big: {ROWS} rows"]
    slotted.apply()
    slotted.same("big", "small")


def test_a_killed_copy_begins_again(slotted: Pair) -> None:
    """Alone: what was copied before stays so. Until it is whole, nothing is taken for a copy."""
    with stuck_copy(slotted) as (copying, _):
        copying.kill()
        copying.communicate()
    listed = gdq("replicas", "--to", slotted.target.su_dsn, "--json", dsn=slotted.source.dsn)
    assert json.loads(listed.stdout)[0]["tables"] == ["public.small"]
    slotted.run("delete from big where id <= 100", "insert into big values (-1, 1)", "insert into small values (2)")
    told = slotted.apply("--chunk-rows", "1000").stderr
    assert told == f"copied public.big: {ROWS - 99} rows\n"
    slotted.same("big", "small")


def test_a_signal_ends_a_copy_after_the_parts_at_hand(slotted: Pair) -> None:
    told: list[str] = []
    with slotted.target.connect("su") as holder, slotted.target.connect("su") as there:
        holder.execute("begin")
        holder.execute("insert into big values (%s)", [ROWS // 2])
        stopped = False

        def stop() -> bool:
            nonlocal stopped
            if stopped:  # the copy knows: let the part at hand, which waits for this, be finished
                holder.execute("rollback")
            stopped = stopped or bool(count(there, "select count(*) from big"))
            return stopped

        options: dict[str, Any] = {"chunk_rows": 1000, "workers": 1, "tell": told.append}
        with SlotReplica(slotted.source.su_dsn, slotted.target.su_dsn, "shop", "mirror", **options) as replica:
            assert list(replica.run(stop=stop)) == []
        assert told == ["copied public.small: 1 rows"]
        assert 0 < cast("int", count(there, "select count(*) from big")) < ROWS
    slotted.apply()
    slotted.same("big", "small")


def test_every_kind_of_table_is_made_and_copied_in_parts(pair: Pair) -> None:
    pair.run(
        "create table bag (a int, b text)",
        "alter table bag replica identity full",
        "create table part (id int primary key, n numeric) partition by range (id)",
        "create table part_1 partition of part for values from (0) to (3000)",
        "create table part_2 partition of part for values from (3000) to (10000)",
        "create table made (id int primary key, twice int generated always as (id * 2) stored)",
        *(f"insert into {one} select i from generate_series(1, 5000) i" for one in ("bag", "bag", "part", "made")),
        "analyze bag, part, made",
    )
    fed = replace(pair, fed_by="slot")
    fed.capture("bag", "part", "made")
    try:
        fed.there("create table made (id int primary key, twice int generated always as (id * 2) stored)")
        refused = fed.replicate("--chunk-rows", "1000")
        assert refused.stderr.startswith("Error: the target has no table public.")
        fed.apply("--chunk-rows", "1000", "--workers", "3", "--create")
        fed.same("bag", "part", "made")
        fed.run("update bag set b = 'x' where ctid = '(0,1)'", "delete from part where id < 10", "delete from made")
        fed.apply()
        fed.same("bag", "part", "made")
    finally:
        with pair.source.connect("su") as su:
            drop_slot(su, "shop", "mirror")
