"""Tables with as many columns as every reader can read, and with one more."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from gdq.batch import Batch
from tests.support.events import Tap
from tests.support.server import PASSWORD

pytestmark = pytest.mark.server

# Readers need five columns and two images of each of these.
WIDEST = 829
NAMES = [f"c{n}" for n in range(WIDEST - 1)]
HOW: dict[str, dict[str, Any]] = {
    "full": {},
    "json": {"format": "json"},
    "origin": {"origin": True},
    "statement": {"granularity": "statement"},
    "pk": {"mode": "pk", "include": NAMES},
}


def make(tap: Tap, *more: str) -> None:
    columns = ", ".join(f"{name} smallint" for name in (*NAMES, *more))
    tap.write(f"create table t (id int primary key, {columns})", "grant select on t to public")
    tap.write("grant usage on schema shop to public")


def typed(connection: psycopg.Connection[Any], consumer: str, *, delta: bool) -> tuple[list[Any], list[Any], Any]:
    """Events, rows and net change of the next batch, which stays unread."""
    with connection.transaction(force_rollback=True):
        batch = Batch.open(connection, "q", consumer, 1_000_000)
        assert batch
        rows = batch.arrow("shop.t").sort_by([("ev_id", "ascending"), ("ev_op", "ascending")])
        return [*batch.events()], rows.to_pylist(), batch.delta("shop.t").to_pylist() if delta else None


@pytest.mark.parametrize("how", ["full", *(pytest.param(how, marks=pytest.mark.long) for how in HOW if how != "full")])
def test_every_reader_reads_the_widest_table(tap: Tap, how: str) -> None:
    with tap.db.connect("su") as su:
        su.execute(sql.SQL("create role wide_mirror login password {} in role gdq_consumer").format(PASSWORD))
    try:
        with psycopg.connect(tap.db.server.conninfo("wide_mirror", tap.db.name, PASSWORD), autocommit=True) as mirror:
            mirror.execute("select gdq.register_consumer('q', 'm')")
            make(tap)
            tap.add("shop.t", **HOW[how])
            tap.write("insert into t (id, c0, c827) values (1, 7, 9)", "update t set c1 = 8", "update t set id = 2")
            tap.write("delete from t")
            tap.owner.execute("select gdq.force_tick('q')")
            events, rows, delta = typed(tap.owner, "c", delta=how != "pk")
            assert typed(mirror, "m", delta=how != "pk") == (events, rows, delta)
            mirror.execute("select gdq.unregister_consumer('q', 'm')")
    finally:
        with tap.db.connect("su") as su:
            su.execute("drop role wide_mirror")
    assert events[0].new
    assert (events[0].new["c0"], events[0].new["c827"]) == (7, 9)
    assert [event.op for event in events][-1] == "delete"
    assert delta in (None, [])


@pytest.mark.parametrize("how", HOW)
def test_one_column_more_is_refused(tap: Tap, how: str) -> None:
    make(tap, "more")
    options = HOW[how] | ({"include": [*NAMES, "more", "id"]} if how == "pk" else {})
    with pytest.raises(errors.ProgramLimitExceeded, match=r"readers need a SELECT of \d+ columns, and one holds 1664"):
        tap.add("shop.t", **options)
    tap.add("shop.t", mode="pk")


def test_a_column_added_to_the_widest_table_switches_capture_off(tap: Tap) -> None:
    make(tap)
    tap.add("shop.t")
    tap.write("insert into t (id) values (1)", "alter table t add more int", "insert into t (id) values (2)")
    assert [event.op for event in tap.events()] == ["insert", "resync"]
    (found,) = tap.owner.execute("select code, cause from gdq.doctor('q') where severity = 'error'").fetchall()
    assert found[0] == "capture_off"
    assert "readers need a SELECT of 1665 columns" in found[1]
    tap.write("alter table t drop more")
    tap.owner.execute("select gdq.maintain()")
    tap.write("insert into t (id) values (3)")
    assert [event.op for event in tap.events()][-2:] == ["resync", "insert"]
