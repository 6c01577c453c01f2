"""Spools: what is in the files is what a consumer reads, each change once, whenever the writer is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from types import FrameType, SimpleNamespace
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import gdq
from gdq.consumers.spool import store, writer
from gdq.installer.install import install
from tests.support.managed import ManagedDatabase
from tests.support.programs import gdq as gdq_program
from tests.support.server import Database
from tests.support.waiting import SECONDS

pytestmark = pytest.mark.server

TABLES = ("public.orders", "public.lines")

_SETUP = """create table orders (id int primary key, note text, amount numeric(10, 2), at timestamptz, days date[]);
    create table lines (id int, n bigint);
    select gdq.create_queue('shop', rotation_period => '1 ms', rotation_bytes => 1);
    select gdq.add_table('shop', 'orders'), gdq.add_table('shop', 'lines')"""


@dataclass(frozen=True, slots=True)
class Shop:
    """A queue with the consumer "spool", and the consumer "reader", which gets the same changes."""

    db: Database
    connection: psycopg.Connection[Any]
    folder: Path

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.connection.execute(statement.encode())

    def spool(self, **options: Any) -> list[writer.SpooledBatch]:
        with gdq.connect(self.db.dsn) as connection:
            return list(writer.spool_batches(connection, "shop", "spool", str(self.folder), once=True, **options))

    def change(self, seed: int) -> None:
        """Several transactions and ticks of changes."""
        chosen = random.Random(seed)
        for number in range(1, 5):
            low = seed * 1000 + number * 100
            self.run(
                f"insert into orders (id, note, amount, at) select i, 'n' || i, i / 3.0, now()"
                f" from generate_series({low}, {low + chosen.randint(1, 20)}) i",
                f"update orders set note = null, days = '{{2024-01-01}}' where id % {chosen.randint(2, 5)} = 0",
                f"insert into lines values ({number}, {seed}), ({number}, {seed})",
                f"delete from orders where id % 7 = {number}",
            )
            if chosen.random() < 0.5:
                gdq.force_tick(self.connection, "shop")
            if chosen.random() < 0.3:
                self.run("truncate lines")
                gdq.insert_event(self.connection, "shop", "greeting", {"seed": seed})


@pytest.fixture
def shop(db: Database, tmp_path: Path) -> Iterator[Shop]:
    with db.connect() as connection:
        connection.execute(_SETUP)
        for name in ("spool", "reader"):
            gdq.register_consumer(connection, "shop", name)
        yield Shop(db, connection, tmp_path / "spool")


@dataclass(slots=True)
class Seen:
    """All rows of each table by their numbers, and the changes that no row shows."""

    rows: dict[str, list[dict[str, Any]]]
    schemas: dict[str, list[pa.Schema]]
    events: list[tuple[int, str, str | None, Any]]


def _seen(rows: dict[str, list[pa.Table]], events: list[tuple[int, str, str | None, Any]]) -> Seen:
    found = {table: [row for part in parts for row in part.to_pylist()] for table, parts in rows.items()}
    ordered = {
        table: sorted(some, key=lambda row: (row["ev_id"], row["ev_op"])) for table, some in found.items() if some
    }
    schemas = {table: list(dict.fromkeys(part.schema for part in parts if len(part))) for table, parts in rows.items()}
    return Seen(ordered, {table: some for table, some in schemas.items() if some}, events)


def consumed(shop: Shop) -> Seen:
    """What the consumer "reader" gets."""
    rows: dict[str, list[pa.Table]] = {}
    events: list[tuple[int, str, str | None, Any]] = []
    with gdq.Consumer(shop.db.dsn, "shop", "reader", max_events=1) as consumer:
        for batch in consumer.batches(once=True):
            for table in batch.tables():
                rows.setdefault(table, []).append(batch.arrow(table))
            some = (event.in_json() for event in batch.events())
            events += [(e.id, e.op, e.table, e.new) for e in some if e.op not in ("insert", "update", "delete")]
    return _seen(rows, events)


def spooled(shop: Shop, after: gdq.Position | None = None) -> Seen:
    """What a reader of the spool gets."""
    rows: dict[str, list[pa.Table]] = {}
    events: list[tuple[int, str, str | None, Any]] = []
    for batch in gdq.open_spool(str(shop.folder), after=after).batches(once=True):
        for table in batch.tables():
            rows.setdefault(table, []).append(batch.arrow(table))
            assert sum(some.num_rows for some in batch.arrow_batches(table)) == len(rows[table][-1])
        events += [(event.id, event.op, event.table, event.data) for event in batch.events]
    return _seen(rows, events)


def files_alone(shop: Shop, table: str = "public.orders") -> list[int]:
    """The numbers that a program finds which reads a table's Parquet files by itself."""
    numbers = ds.dataset(str(shop.folder / table), format="parquet").to_table(columns=["ev_id"]).column("ev_id")
    return sorted(numbers.to_pylist())


def test_the_files_are_what_a_consumer_reads(shop: Shop) -> None:
    for seed in range(1, 4):
        shop.change(seed)
        assert shop.spool(max_events=1)
    theirs, ours = consumed(shop), spooled(shop)
    assert ours == theirs
    assert {op for _, op, _, _ in ours.events} == {"truncate", "message"}
    assert files_alone(shop) == [row["ev_id"] for row in ours.rows["public.orders"]]
    assert not list(shop.folder.glob("_gdq_spool/staged/*"))


def test_columns_that_change_begin_files_of_another_schema(shop: Shop) -> None:
    """Also inside one batch, whose rows then have the newest columns, as a consumer's do."""
    shop.run(
        "insert into lines values (1, 1)", "alter table lines add more text", "insert into lines values (2, 2, 'x')"
    )
    shop.run("alter table lines drop n", "insert into lines values (3, 'y')")
    shop.spool()
    (batch,) = gdq.open_spool(str(shop.folder)).batches(once=True)
    with gdq.Consumer(shop.db.dsn, "shop", "reader") as consumer:
        for theirs in consumer.batches(once=True):
            assert batch.versions("public.lines") == [version.id for version in theirs.versions("public.lines")]
            read = theirs.arrow("public.lines")
            assert batch.arrow("public.lines").sort_by("ev_id") == read.sort_by("ev_id")
            for version in batch.versions("public.lines"):
                assert batch.arrow("public.lines", version=version) == theirs.arrow("public.lines", version=version)
    assert [event.op for event in batch.events] == ["ddl", "ddl"]
    assert len(list((shop.folder / "public.lines").iterdir())) == 3


def _die_at(line: int, dsn: str, folder: str) -> None:
    """Write a spool in this process, which is killed at its `line`th line of the writer's code."""
    counted = 0
    modules = {store.__file__, writer.__file__}

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal counted
        if os.path.realpath(frame.f_code.co_filename) not in {os.path.realpath(name) for name in modules}:
            return None
        counted += event == "line"
        if counted == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    with gdq.connect(dsn) as connection:
        sys.settrace(trace)
        for _ in writer.spool_batches(connection, "shop", "spool", folder, once=True, max_events=1):
            pass
        sys.settrace(None)
    Path(folder, "_lines").write_text(str(counted))


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["gdq.consumers.spool.writer", __name__])


def lines_until_the_end(shop: Shop, line: int) -> int | None:
    """None if a writer was killed at a line, else how many lines it had."""
    process = _FORKS.Process(target=_die_at, args=(line, shop.db.dsn, str(shop.folder)))
    process.start()
    process.join(SECONDS)
    if process.exitcode == -signal.SIGKILL:
        return None
    assert process.exitcode == 0
    told = shop.folder / "_lines"
    lines = int(told.read_text())
    told.unlink()
    return lines


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 7))])
def test_killed_anywhere(shop: Shop, seed: int) -> None:
    """Nobody who reads the files by himself finds a change twice, at no time; and in the end none is missing."""
    chosen = random.Random(seed)
    shop.change(1)
    lines = lines_until_the_end(shop, -1)
    assert lines is not None
    for number in range(2, 8):
        shop.change(number)
        while lines_until_the_end(shop, chosen.randint(1, lines)) is None and chosen.random() < 0.7:
            numbers = files_alone(shop)
            assert len(numbers) == len(set(numbers))
    shop.spool()
    theirs, ours = consumed(shop), spooled(shop)
    assert ours == theirs
    assert files_alone(shop) == [row["ev_id"] for row in ours.rows["public.orders"]]


def test_seek_and_positions(shop: Shop) -> None:
    batches = []
    times = []
    for number in range(3):
        times.append(shop.connection.execute("select clock_timestamp()").fetchone()[0])  # type: ignore[index]
        shop.run(f"insert into orders (id) values ({number})")
        shop.spool()
    spool = gdq.open_spool(str(shop.folder))
    batches = list(spool.batches(once=True))
    assert list(spool.batches(timeout=0)) == []

    def ids(read: gdq.Spool) -> list[int]:
        return [id_ for batch in read.batches(once=True) for id_ in batch.arrow("public.orders")["new_id"].to_pylist()]

    assert [ids(gdq.open_spool(str(shop.folder), after=batch.position)) for batch in batches] == [[1, 2], [2], []]
    for number, time in enumerate(times):
        assert spool.seek(time=time) == batches[number].tick_from
        assert ids(spool) == list(range(number, 3))
        assert spool.seek(tick=batches[number].tick_to) == batches[number].tick_to
        assert ids(spool) == list(range(number + 1, 3))
    assert spool.seek(time=datetime.now(UTC) + timedelta(days=1)) == batches[-1].tick_to
    with pytest.raises(gdq.DivergedPosition, match="no batch that ends"):
        gdq.open_spool(str(shop.folder), after=str(batches[0].position).replace("/", "/x", 1))


def test_what_is_older_than_keep_is_removed(shop: Shop) -> None:
    for number in range(3):
        shop.run(f"insert into orders (id) values ({number})")
        shop.spool(keep=timedelta(days=1))
    first, *_, last = gdq.open_spool(str(shop.folder)).batches(once=True)
    behind = gdq.open_spool(str(shop.folder), after=first.position)
    shop.run("insert into orders (id) values (9)")
    shop.spool(keep=timedelta(0))
    (kept,) = gdq.open_spool(str(shop.folder)).batches(once=True)
    assert kept.tick_from == last.tick_to
    assert len(files_alone(shop)) == 1
    for read in (
        lambda: list(behind.batches(once=True)),
        lambda: gdq.open_spool(str(shop.folder), after=first.position),
        lambda: first.arrow("public.orders"),
        lambda: behind.seek(tick=first.tick_to),
        lambda: behind.seek(time=first.written),
    ):
        with pytest.raises(gdq.TruncatedPosition, match="has no more the changes after"):
            read()
    assert [batch.tick_to for batch in gdq.open_spool(str(shop.folder), after=last.position).batches(once=True)]


def test_refusals(shop: Shop) -> None:
    """A spool whose consumer was moved, and a folder of somebody else's."""
    shop.run("insert into orders (id) values (1)")
    shop.spool()
    with gdq.connect(shop.db.dsn) as other:
        other.autocommit = True
        gdq.seek(other, "shop", "spool", now=True)
    with pytest.raises(gdq.GdqError, match="changes between the two would be missing"):
        shop.spool()
    with shop.db.connect() as connection, pytest.raises(gdq.GdqError, match="is the spool of"):
        list(writer.spool_batches(connection, "shop", "reader", str(shop.folder), once=True))
    full = shop.folder.parent / "full"
    full.mkdir()
    (full / "x").touch()
    with pytest.raises(gdq.GdqError, match="has files and is no spool"):
        list(writer.spool_batches(shop.connection, "shop", "reader", str(full), once=True))
    with pytest.raises(gdq.GdqError, match="is no spool"):
        gdq.open_spool(str(shop.folder.parent / "nothing"))


def test_one_writer_at_a_time(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_LOCK_SECONDS", 0.0)
    with shop.db.connect() as connection:
        shop.run("insert into orders (id) values (1)")
        first = writer.spool_batches(connection, "shop", "spool", str(shop.folder), once=True)
        next(first)
        with pytest.raises(gdq.GdqError, match="another gdq spool writes"):
            shop.spool()
        first.close()


def test_tables_that_are_renamed_and_dropped(shop: Shop) -> None:
    shop.spool()
    shop.run(
        "insert into orders (id) values (1); insert into lines values (1, 1)", "alter table orders rename to bills"
    )
    shop.run("insert into bills (id) values (2)", "drop table lines")
    shop.spool()
    with gdq.Consumer(shop.db.dsn, "shop", "reader") as consumer:
        numbers = [event.id for batch in consumer.batches(once=True) for event in batch.events()]
    ours = spooled(shop)
    assert [len(ours.rows[table]) for table in ("public.bills", "public.lines")] == [2, 1]
    found = [row["ev_id"] for rows in ours.rows.values() for row in rows] + [event[0] for event in ours.events]
    assert sorted(found) == sorted(numbers)


def test_a_folder_whose_making_was_killed(shop: Shop) -> None:
    (shop.folder / "_gdq_spool").mkdir(parents=True)
    (shop.folder / "_gdq_spool" / ".spool.json").touch()
    shop.run("insert into orders (id) values (1)")
    assert [batch.rows for batch in shop.spool()] == [1]


def test_a_gap_in_capture_ends_the_spool(shop: Shop) -> None:
    shop.spool()
    shop.run("insert into orders (id) values (1)", "select gdq.note_resync(1, 'orders'::regclass, 'gap', 'why')")
    for _ in range(2):
        with pytest.raises(gdq.ResyncRequired, match=r"has a gap in its capture: why, and a spool has no rows"):
            shop.spool()


def test_a_row_that_capture_had_not_followed_ends_the_spool(managed_db: ManagedDatabase, tmp_path: Path) -> None:
    """Such a row is a gap, although it stands among the rows that the spool reads as rows only."""
    install(managed_db.dsn)
    managed_db.run("create table item (id int primary key)")
    managed_db.run("select gdq.create_queue('shop'), gdq.add_table('shop', 'item')")
    with gdq.connect(managed_db.dsn) as connection:
        list(writer.spool_batches(connection, "shop", "spool", str(tmp_path / "spool"), once=True))
        script = "alter table item add column note text; insert into item values (1, 'one')"
        connection.execute("select gdq.apply_ddl('shop', %s)", [script])
        with pytest.raises(gdq.ResyncRequired, match="had not followed, and a spool has no rows of a copy"):
            list(writer.spool_batches(connection, "shop", "spool", str(tmp_path / "spool"), once=True))


def test_a_batch_begins_no_sooner_than_every(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the writer rests changes gather, which come in one batch; ticks come as rarely, if it alone reads."""
    rests = iter(range(5))

    def rest(seconds: float) -> None:
        assert seconds <= 1
        shop.run(f"insert into orders (id) values ({1000 + next(rests)})")
        gdq.force_tick(shop.connection, "shop")
        clock[0] += 1000

    clock = [0.0]
    shop.run("insert into orders (id) values (1)")
    gdq.force_tick(shop.connection, "shop")
    with gdq.connect(shop.db.dsn) as connection:
        batches = writer.spool_batches(connection, "shop", "spool", str(shop.folder), every=3500)
        assert next(batches).rows == 1
        monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=rest))
        clock[0] = monotonic()
        assert next(batches).rows == 4
        batches.close()
        paces = {info.consumer_name: info.pace for info in gdq.consumer_info(connection, "shop")}
        assert paces == {"spool": timedelta(seconds=3500), "reader": None}
        gdq.unregister_consumer(connection, "shop", "reader")
        (queue,) = gdq.queue_info(connection, "shop")
        assert queue.tick_lag == timedelta(seconds=3500), "ticks need not come more often for a spool"


def test_command(shop: Shop) -> None:
    shop.run("insert into orders (id) values (1), (2)", "truncate lines")
    done = gdq_program("spool", "shop", str(shop.folder), "--once", "--json", dsn=shop.db.dsn)
    (told,) = map(json.loads, done.stdout.splitlines())
    assert (told["tables"], told["rows"], told["events"]) == (1, 2, 1), done.stderr
    shop.run("insert into orders (id) values (3)")
    done = gdq_program("spool", "shop", str(shop.folder), "--once", "--keep", "0", dsn=shop.db.dsn)
    assert "1 rows of 1 tables, 0 other changes" in done.stdout
    assert len(files_alone(shop)) == 1
    done = gdq_program("spool", "shop", str(shop.folder), "--once", "--consumer", "reader", dsn=shop.db.dsn)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "is the spool of" in done.stderr
