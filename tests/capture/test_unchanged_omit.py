"""Large values that updates leave as they were are not logged: readers get no value of them, and are told of which."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import errors
from psycopg.rows import dict_row

from gdq import queue as queues
from gdq.batch import Batch
from gdq.cli import main
from gdq.consumers.debezium.envelope import Envelope
from gdq.errors import GdqError
from gdq.event_rows import EventChoice
from gdq.monitor.doctor import doctor
from gdq.source import Event
from gdq.stream import read_events
from tests.capture.test_unchanged import ONE, TWO, TYPES, changes, log_bytes
from tests.support.events import Tap
from tests.support.server import Database

pytestmark = pytest.mark.server

TABLE = "create table t (id int primary key, n int, doc text, note text)"


@pytest.fixture
def twins(db: Database) -> Iterator[tuple[Tap, Tap]]:
    """Two queues for the same tables: the first one logs both images whole, the second one omits."""
    with Tap(db) as both, Tap(db, "p", "d") as omit:
        yield both, omit


@contextmanager
def batch_of(tap: Tap) -> Iterator[Batch]:
    """All that the tap has not read, and is not to have read."""
    tap.owner.execute("select gdq.force_tick(%s)", [tap.queue])
    with tap.owner.transaction(force_rollback=True):
        batch = Batch.open(tap.owner, tap.queue, tap.consumer, 1_000_000)
        assert batch is not None
        yield batch


def docs(tap: Tap) -> Tap:
    """The table t with a large document in row 1, of which updates omit it."""
    tap.write(TABLE, f"insert into t values (1, 0, {ONE}, 'a')")
    tap.add("shop.t", unchanged="omit")
    return tap


def without(image: dict[str, Any] | None, names: set[str]) -> dict[str, Any] | None:
    return None if image is None else {name: value for name, value in image.items() if name not in names}


def test_types(twins: tuple[Tap, Tap]) -> None:
    """Each value that an update leaves as it was is missing in both images, and all others are there."""
    both, omit = twins
    names = [f"c{n}" for n in range(len(TYPES))]
    columns = [f"{name} {kind}" for name, kind in zip(names, TYPES, strict=True)]
    both.write(
        "create domain never_null as text not null",
        "create type pair as (a int, b text)",
        "create type mood as enum ('sad', 'so so')",
        f"create table t (id int primary key, n int, {', '.join(columns)},"
        ' "odd ""name" text generated always as (c0 || n) stored)',
    )
    both.add("shop.t")
    omit.add("shop.t", unchanged="omit")
    first, second = ([value % large for value in TYPES.values()] for large in (ONE, TWO))
    both.write(
        f"insert into t values (1, 0, {', '.join(first)})",
        "update t set n = 1",
        "update t set id = 2",
        "update t set c0 = c0 || ''",
        f"update t set ({', '.join(names)}) = (select {', '.join(second)})",
        "update t set c0 = null, c2 = null, c4 = '{\"a\": 1.0}'",
        f"update t set c0 = {ONE}, c2 = 'x', c4 = null, n = 5",
        "update t set n = n",
        "delete from t",
    )
    large = {*names, 'odd "name'}
    left = [
        set[str](),
        large - {'odd "name'},  # its value follows n
        set[str](),  # the key changed
        large,
        set[str](),
        large - {"c0", "c2", "c4", 'odd "name'},
        large - {"c0", "c2", "c4", 'odd "name'},
        large - {"c2", "c4"},
        set[str](),
    ]
    assert [finding for finding in doctor(both.owner) if finding.severity == "error"] == []
    found = omit.batch("shop.t")
    whole = both.batch("shop.t")
    expected = [
        event._replace(old=without(event.old, lacks), new=without(event.new, lacks))
        for event, lacks in zip(whole.events, left, strict=True)
    ]
    assert changes(found) == expected
    for row, full, lacks in zip(found.rows["shop.t"], whole.rows["shop.t"], left, strict=True):
        assert set(row.pop("ev_unchanged") or ()) == lacks
        given = {name: value for name, value in full.items() if name not in {"ev_id", "ev_time"}}
        given |= {f"{side}_{name}": None for side in ("old", "new") for name in lacks}
        assert {name: row[name] for name in given} == given


def test_the_log_of_a_counter_is_small(twins: tuple[Tap, Tap]) -> None:
    both, omit = twins
    both.write(TABLE, f"insert into t values (1, 0, {ONE}, repeat('a', 100))")
    both.add("shop.t")
    omit.add("shop.t", unchanged="omit")
    both.write(*(f"update t set n = {n}" for n in range(40)))
    assert log_bytes(omit) < 0.2 * log_bytes(both)
    images = omit.images()
    assert images[7] == (
        "update", {"id": 1}, {"id": 1, "n": 6, "note": "a" * 100}, {"id": 1, "n": 7, "note": "a" * 100}
    )  # fmt: skip


@pytest.mark.parametrize("images", ["both", "new"])
@pytest.mark.parametrize("columns", [None, ["n", "doc"], ["n"]])
@pytest.mark.parametrize("many", [False, True])
def test_events_name_what_they_lack(tap: Tap, images: Any, columns: list[str] | None, many: bool) -> None:
    docs(tap)
    tap.write("update t set n = 1", f"update t set doc = {TWO}", "delete from t")
    if many:  # beyond what readers give
        tap.write("insert into t select i, 0, '', '' from generate_series(1, 1001) i")
    with batch_of(tap) as batch:
        first, second, gone, *_ = batch.events(images=images, columns=columns)
    wanted = columns or ["id", "n", "doc", "note"]
    assert first.unchanged == (("doc",) if "doc" in wanted else ())
    assert (second.unchanged, gone.unchanged) == ((), ())
    assert first.new is not None
    assert first.new.keys() == {*wanted} - {"doc"}
    assert second.new is not None
    assert second.new.keys() == {*wanted}
    if images == "both":
        assert first.old is not None
        assert first.old.keys() == first.new.keys()
        assert gone.old is not None
        assert gone.old.keys() == {*wanted}
    assert first.in_json().unchanged == first.unchanged


def test_retried_events(tap: Tap) -> None:
    docs(tap)
    tap.write("update t set n = 1")
    tap.owner.execute("select gdq.force_tick('q')")
    with tap.owner.transaction():
        batch = Batch.open(tap.owner, "q", "c", 1000)
        assert batch is not None
        [event] = batch.events()
        batch.dead_letter(event)
        batch.commit()
    assert tap.owner.execute("select new from gdq.dead_letters('q')").fetchall() == [({"id": 1, "n": 1, "note": "a"},)]
    tap.owner.execute("select gdq.replay_dead_letters('q', 'c')")
    with batch_of(tap) as batch:
        [again] = batch.events()
        assert dataclasses.replace(again, retries=0) == event
        assert again.unchanged == ("doc",)


@pytest.mark.parametrize("reads_logs", [True, False])
def test_typed_rows(tap: Tap, reads_logs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    docs(tap)
    tap.write("update t set n = 1", f"update t set doc = {TWO}")
    monkeypatch.setattr("gdq.batch.may_read_logs", lambda _: reads_logs)
    with batch_of(tap) as batch:
        rows = sorted(batch.arrow("shop.t").to_pylist(), key=lambda row: row["ev_id"])
        assert [row["ev_unchanged"] for row in rows] == [["doc"], None]
        assert [row["new_doc"] is None for row in rows] == [True, False]
        assert "ev_unchanged" not in batch.arrow("shop.t", columns=["n"]).schema.names
        with pytest.raises(GdqError, match=r"table shop.t has updates that do not log doc: there is no net change"):
            batch.delta("shop.t")
    tap.batch()
    tap.write(f"update t set doc = {ONE}")
    with batch_of(tap) as batch:
        assert sorted(batch.delta("shop.t").column("_weight").to_pylist()) == [-1, 1]


def test_printed_events(tap: Tap) -> None:
    docs(tap)
    tap.write("alter table t add bytes bytea, add list text[]")
    tap.write(f"update t set bytes = {TWO}::bytea, list = array[{ONE}]", "update t set n = 1")
    with batch_of(tap) as batch:
        *_, event = batch.events()
        envelope = Envelope(tap.owner, "q")
        [record] = envelope.records(event)
    absent = "__debezium_unavailable_value"
    placed = {"doc": absent, "bytes": "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==", "list": [absent]}
    for side, n in (("before", 0), ("after", 1)):
        assert record["value"][side] == {"id": 1, "n": n, "note": "a"} | placed
    printed = CliRunner().invoke(main, ["consume", "q", "c", "--once", "--dsn", tap.db.dsn])
    lines = [json.loads(line) for line in printed.output.splitlines() if line.startswith("{")]
    assert lines[-1]["unchanged"] == ["doc", "list", "bytes"]
    assert lines[-1]["new"] == {"id": 1, "n": 1, "note": "a"}
    assert all("unchanged" not in line for line in lines[:-1] if line["op"] != "update")


def test_row_filter_and_partitions(tap: Tap) -> None:
    """A row that enters or leaves the filter, or moves to another partition, is logged whole."""
    tap.write(
        "create table t (id int primary key, n int, doc text) partition by range (id)",
        "create table t1 partition of t for values from (0) to (10)",
        "create table t2 (n int, doc text, id int not null)",
        "alter table t attach partition t2 for values from (10) to (20)",
        f"insert into t values (1, 1, {ONE}), (11, 1, {ONE})",
    )
    tap.add("shop.t", unchanged="omit", where="n < 100")
    tap.write(
        "update t set n = 2 where id = 11",
        "update t set n = 100 where id = 1",
        "update t set n = 3 where id = 1",
        "update t set id = 12 where id = 1",
        "update t set n = 4 where id = 12",
    )
    seen = [(op, "doc" in (old or {}), "doc" in (new or {})) for op, _, old, new in tap.images()]
    assert seen == [
        ("update", False, False),
        ("delete", True, False),
        ("insert", False, True),
        ("delete", True, False),
        ("insert", False, True),
        ("update", False, False),
    ]


def test_ddl_amid_a_batch(tap: Tap) -> None:
    """The names are those of the newest columns in typed rows, and those of its time in each event."""
    docs(tap)
    tap.write(
        "update t set n = 1",
        "alter table t rename doc to body",
        "update t set n = 2",
        "alter table t rename note to doc",
        "update t set n = 3",
        "alter table t add more text",
        f"update t set n = 4, more = {TWO}",
        "update t set n = 5",
        "alter table t drop body",
        "update t set n = 6",
    )
    with batch_of(tap) as batch:
        events = [event for event in batch.events() if event.op == "update"]
        assert [e.unchanged for e in events] == [("doc",), ("body",), ("body",), ("body",), ("body", "more"), ("more",)]
        rows = sorted(batch.arrow("shop.t").to_pylist(), key=lambda row: row["ev_id"])
        assert [row["ev_unchanged"] for row in rows] == [None, None, None, None, ["more"], ["more"]]
        assert [row["new_doc"] for row in rows] == ["a"] * 6
        oldest, *_ = batch.versions("shop.t")
        assert batch.arrow("shop.t", version=oldest.id).to_pylist()[0]["ev_unchanged"] == ["doc"]


def test_a_key_that_is_dropped_and_a_type_that_changes(tap: Tap) -> None:
    """Without a key the new image has the values again; a version in which they are small loses nothing."""
    docs(tap)
    tap.write(
        "alter table t drop constraint t_pkey",
        "update t set n = 1",
        "alter table t add primary key (id)",
        "update t set n = 2",
        "alter table t alter doc type jsonb using to_jsonb(doc)",
        "update t set n = 3",
        "alter table t alter doc type int using 7",
        "update t set n = 4",
    )
    with batch_of(tap) as batch:
        found = [event for event in _not_resynced(batch) if event.op == "update"]
    assert [event.unchanged for event in found] == [(), ("doc",), ("doc",), ()]
    assert found[0].old is not None
    assert len(found[0].old["doc"]) == 12800


def _not_resynced(batch: Batch) -> list[Event]:
    """The events of a batch, also after a gap."""
    return list(read_events(batch.connection, batch.id, batch.token, EventChoice()))


def test_the_option_comes_and_goes(twins: tuple[Tap, Tap]) -> None:
    both, omit = twins
    both.write(TABLE, f"insert into t values (1, 0, {ONE}, 'a')")
    both.add("shop.t")
    omit.add("shop.t")
    dsn = both.db.dsn
    for n, value in enumerate(("omit", "once", "omit")):
        both.write(f"update t set n = {n}")
        done = CliRunner().invoke(main, ["alter-table", "p", "shop.t", "--unchanged", value, "--dsn", dsn])
        assert done.exit_code == 0
        assert not queues.alter_table_options(omit.owner, "p", "shop.t", unchanged=value)
    both.write("update t set n = 9")
    assert queues.alter_table_options(omit.owner, "p", "shop.t", format="json")
    both.write("update t set n = 10")
    assert queues.table_info(omit.owner, "p")[0].unchanged == "omit"
    with batch_of(omit) as batch:
        found = [event for event in batch.events() if event.op == "update"]
        assert [event.unchanged for event in found] == [(), ("doc",), (), ("doc",), ()]
        assert batch.arrow("shop.t").column("ev_unchanged").to_pylist().count(["doc"]) == 2
    whole = both.events()
    assert [e for e in changes(omit.batch()) if e.new is not None and "doc" in e.new] == [whole[0], whole[2], whole[4]]


def test_rules_for_new_tables(tap: Tap) -> None:
    done = CliRunner().invoke(
        main, ["add-table", "q", "--new-tables", "shop.*", "--unchanged", "omit", "--dsn", tap.db.dsn]
    )
    assert done.exit_code == 0
    tap.write(TABLE, f"insert into t values (1, 0, {ONE}, 'a')", "update t set n = 1", "create table bare (v text)")
    assert "doc" not in (tap.events()[-1].new or {})
    (rule,) = queues.new_table_info(tap.owner, "q")
    assert rule.options == {"unchanged": "omit"}
    assert rule.missing == ["shop.bare"]
    assert rule.reason == 'table shop.bare has no primary key, by which readers find what unchanged "omit" leaves out'


def test_refusals(tap: Tap) -> None:
    tap.write(TABLE, "create table bare (v text)", "create unique index on t (n)", "alter table t alter n set not null")
    with pytest.raises(errors.InvalidParameterValue, match='"omit" goes with granularity row'):
        tap.add("shop.t", unchanged="omit", granularity="statement")
    with pytest.raises(errors.InvalidParameterValue, match='"omit" goes with mode full'):
        tap.add("shop.t", unchanged="omit", mode="pk")
    with pytest.raises(errors.FeatureNotSupported, match=r"table shop.bare has no primary key, by which readers"):
        tap.add("shop.bare", unchanged="omit")
    tap.add("shop.bare")
    with pytest.raises(errors.FeatureNotSupported, match=r"table shop.bare has no primary key, by which readers"):
        queues.alter_table_options(tap.owner, "q", "shop.bare", unchanged="omit")
    tap.add("shop.t", unchanged="omit", key=["n"])
    with pytest.raises(errors.InvalidParameterValue, match='"omit" goes with mode full'):
        queues.alter_table_options(tap.owner, "q", "shop.t", mode="pk")
    tap.write(f"insert into t values (1, 0, {ONE}, '')", "update t set id = 2", "update t set n = 1")
    assert ["doc" in (new or {}) for _, _, _, new in tap.images()] == [True, False, True]


def test_rows_for_refreshes_fail_where_a_value_is_wanted(tap: Tap) -> None:
    """gdq.delta_sql() is for readers of whole rows: what a row lacks has to be named as not wanted."""
    docs(tap)
    before = tap.owner.execute("select pg_current_snapshot()::text").fetchone()
    tap.write("update t set n = 1")

    def read(may_lack: str) -> list[dict[str, Any]]:
        query = f"select gdq.delta_sql('q', 'shop.t', %s, pg_current_snapshot(){may_lack})"
        assert before is not None
        with tap.owner.transaction(), tap.owner.cursor(row_factory=dict_row) as cursor:
            found = cursor.execute(query.encode(), before).fetchone()
            assert found is not None
            return cursor.execute(found["delta_sql"].encode()).fetchall()

    for wanted in ("", ", '{note}'"):
        with pytest.raises(psycopg.errors.FeatureNotSupported, match=r"event \d+, an update, does not log doc, which"):
            read(wanted)
    assert [row["ev_unchanged"] for named in (", '{doc}'", ", null") for row in read(named)] == [["doc"], ["doc"]]
    assert [c for c, omitted in tap.owner.execute("select name, omitted from gdq.table_columns('q', 'shop.t')")
            if omitted] == ["doc", "note"]  # fmt: skip
