"""Large tables that a mirror loads in chunks: each at a snapshot of its own, while the application writes."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from gdq.consumers.copy import chunk_bounds
from gdq.consumers.lake.readers import SnapshotReaders
from gdq.consumers.mirror import chunked_load, copies
from gdq.consumers.mirror.mirror import Mirror
from gdq.consumers.mirror.state import History
from tests.mirror.conftest import Lake
from tests.mirror.test_history import Replay
from tests.mirror.test_kills import FORKS
from tests.support.programs import gdq
from tests.support.waiting import until

TABLES = ("public.keyed", "public.parts")
_SCHEMA = (
    'create table keyed (a text collate "C", b int, n int, primary key (b, a))',
    "create table parts (id int primary key, n int) partition by hash (id)",
    "create table parts_0 partition of parts for values with (modulus 2, remainder 0)",
    "create table parts_1 partition of parts for values with (modulus 2, remainder 1)",
    "insert into keyed select 'k' || i % 7, i, 0 from generate_series(1, 400) i",
    "insert into parts select i, 0 from generate_series(1, 200) i",
)
_CHANGES = (
    "update keyed set n = n + 1 where b % 9 = {0} % 9",
    """update keyed set b = -b
        where b between {0} and {0} + 20 and not exists (select from keyed k where k.b = -keyed.b)""",
    "delete from keyed where b % 31 = {0} % 31",
    "insert into keyed values ('new', {0}, 1) on conflict (b, a) do update set n = -1",
    "update parts set id = id + 1000 where id = {0} and {0} + 1000 not in (select id from parts)",
    "delete from parts where id % 17 = {0} % 17",
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tables are large, and a chunk has one range of about 40 rows."""
    patch_sizes(monkeypatch.setattr)


def patch_sizes(patch: Callable[[object, str, object], None]) -> None:
    sizes = {"LARGE_BYTES": -1, "FIRST_ROWS": 40, "_ROWS_MIN": 40, "_RANGE_BYTES": 0, "_CHUNK_SECONDS": 0.0}
    for name, value in sizes.items():
        patch(chunked_load, name, value)
    patch(chunk_bounds, "_APART_ROWS", 20)


def load(lake: Lake, between: Callable[[], bool], history: History | None = None) -> list[str]:
    """Bring a mirror up; `between` is called before each chunk, among others, and says whether to stop."""
    said: list[str] = []
    with Mirror(lake.source.dsn, "shop", "copy", lake.target, TABLES, history=history, tell=said.append) as mirror:
        list(mirror.run(stop=between))
    return said


def make(lake: Lake) -> None:
    lake.run(*_SCHEMA)
    lake.capture(*TABLES)


def writes(lake: Lake, choice: random.Random) -> Callable[[], bool]:
    """Changes the tables, and checks that no snapshot is held."""
    held = """select count(*) from pg_stat_activity
               where application_name like 'gdq:shop/copy%' and backend_xmin is not null"""

    def write() -> bool:
        assert lake.ask(held) == [(0,)]
        some = choice.sample(_CHANGES, 2)
        lake.run(f"begin; {'; '.join(some)}; commit".replace("{0}", str(choice.randrange(1, 400))))
        return False

    return write


def staged(lake: Lake) -> Iterator[Path]:
    """The files of loads that are not done."""
    yield from (path for path in lake.folder.glob("_gdq_load/*/*") if path.is_file())


def test_loaded_while_others_write(each: Lake) -> None:
    """The rows of all chunks are those of one tick, whatever changed between them, and the changes after it follow."""
    make(each)
    write, calls = writes(each, random.Random(3)), [0]

    def between() -> bool:
        calls[0] += 1
        return write()

    load(each, between)
    assert calls[0] > 15
    each.bring_up(*TABLES)
    each.same(*TABLES)
    assert not list(staged(each))


def test_ranges_side_by_side(each: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk with many ranges, which two sessions read; then those of a copy at one snapshot, by blocks."""
    monkeypatch.setattr(chunked_load, "_CHUNK_SECONDS", 60.0)
    make(each)
    each.run("insert into keyed select 'more', i, 0 from generate_series(1000, 3000) i")
    load(each, lambda: False)
    each.same(*TABLES)
    assert not list(staged(each))
    monkeypatch.setattr(chunked_load, "LARGE_BYTES", 2**40)
    monkeypatch.setattr(copies, "_PART_BYTES", 8192)
    each.run("select gdq.require_copy('shop', 'copy', array['keyed'::regclass])")
    each.bring_up(*TABLES)
    each.same(*TABLES)


def test_a_statement_that_waits_for_the_table(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the chunk's snapshot, and a reader behind it: the chunk gives way and is read again."""
    make(lake)
    joined, waiting = SnapshotReaders._taken, list[threading.Thread]()
    query = "select count(*) from pg_locks where not granted and mode = 'AccessExclusiveLock'"

    def taken(self: SnapshotReaders) -> object:
        if not waiting:
            waiting.append(threading.Thread(target=lake.run, args=("alter table keyed set (fillfactor = 90)",)))
            waiting[0].start()
            statement = "alter table keyed add column more int default 7"
            waiting.append(threading.Thread(target=lake.run, args=(statement,)))
            waiting[1].start()
            until(lambda: lake.ask(query) != [(0,)], "a statement that waits")
        return joined(self)

    monkeypatch.setattr(SnapshotReaders, "_taken", taken)
    load(lake, lambda: False)
    for thread in waiting:
        thread.join()
    lake.bring_up(*TABLES)
    lake.same(*TABLES)


@pytest.mark.parametrize("history", ["feed", "scd2"])
def test_histories_are_loaded_in_chunks(lake: Lake, history: History) -> None:
    make(lake)
    load(lake, writes(lake, random.Random(4)), history)
    replay = Replay(lake, list(TABLES), history)
    replay.note()
    lake.bring_up(*TABLES, history=history)
    replay.check()


def test_many_changes_are_brought_into_the_files(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_load, "_FOLD_ROWS", 20)
    make(lake)
    load(lake, writes(lake, random.Random(5)))
    lake.bring_up(*TABLES)
    lake.same(*TABLES)
    assert not list(staged(lake))


@pytest.mark.parametrize("event", ["truncate keyed", "alter table keyed add column more int default 5"])
def test_what_no_row_shows_begins_the_load_again(each: Lake, event: str) -> None:
    """TRUNCATE and other columns in the midst of a load."""
    make(each)
    calls = [0]

    def between() -> bool:
        calls[0] += 1
        if calls[0] == 4:
            each.run(event, "insert into keyed (a, b, n) values ('after', 7000, 1)")
        return False

    load(each, between)
    each.bring_up(*TABLES)
    each.same(*TABLES)


def test_a_load_that_is_stopped_goes_on(each: Lake) -> None:
    make(each)
    calls = [0]

    def stops() -> bool:
        calls[0] += 1
        return calls[0] > 5

    load(each, stops)
    assert list(staged(each))
    each.run("update keyed set n = 77 where b < 100", "delete from keyed where b = 3")
    said = load(each, lambda: False)
    assert any("its load goes on after" in line for line in said)
    each.bring_up(*TABLES)
    each.same(*TABLES)
    assert not list(staged(each))


def stopped(lake: Lake) -> None:
    """Load the tables, and stop in the midst of the first."""
    make(lake)
    calls: list[None] = []

    def stops() -> bool:
        calls.append(None)
        return len(calls) > 5

    load(lake, stops)
    assert list(staged(lake))


def test_a_mirror_that_is_dropped_in_a_load(each: Lake) -> None:
    """Nothing stays of the load; another mirror's is left alone."""
    stopped(each)
    other = each.folder / "_gdq_load" / "public.keyed-0123456789ab" / "progress.json"
    other.parent.mkdir()
    other.touch()
    done = gdq("drop-mirror", "shop", "copy", dsn=each.source.dsn)
    assert done.returncode == 0, done.stderr
    assert list(staged(each)) == [other]


def test_a_mirror_that_is_dropped_while_it_loads(lake: Lake) -> None:
    make(lake)
    calls: list[None] = []

    def drops() -> bool:
        calls.append(None)
        if len(calls) == 6:
            assert list(staged(lake))
            assert gdq("drop-mirror", "shop", "copy", dsn=lake.source.dsn).returncode == 0
        return False

    with pytest.raises(psycopg.errors.UndefinedObject, match='consumer "copy" is not registered'):
        load(lake, drops)
    assert not list(staged(lake))


@pytest.mark.parametrize("event", ["shrinks", "drop table keyed", "alter table keyed rename to other"])
def test_a_load_that_nobody_needs_any_more(each: Lake, monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    """The table is copied at once now, or is not there any more by its name: nothing stays of its load."""
    stopped(each)
    if event == "shrinks":
        monkeypatch.setattr(chunked_load, "LARGE_BYTES", 2**40)
    else:
        each.run(event)
    each.bring_up("public")
    assert not list(staged(each))


def be_killed(dsn: str, target: str) -> None:
    """Be a mirror with small chunks, in a process of its own, until it is killed."""
    patch_sizes(setattr)
    with Mirror(dsn, "shop", "copy", target, TABLES) as mirror:
        list(mirror.run())


@pytest.mark.long
def test_killed_in_a_load(each: Lake) -> None:
    """Killed again and again, at any step: the load goes on, and no file stays."""
    make(each)
    each.run("insert into keyed select 'more', i, 0 from generate_series(1000, 7000) i")
    choice, done = random.Random(6), 0
    for _ in range(6):
        done = kill_after(each, done, choice.uniform(0, 0.3))
        each.run(choice.choice(_CHANGES[:4]).replace("{0}", str(choice.randrange(1, 400))))
    load(each, lambda: False)
    each.bring_up(*TABLES)
    each.same(*TABLES)
    assert not list(staged(each))


def kill_after(lake: Lake, rows: int, seconds: float) -> int:
    """Kill a mirror some time after its load has more than so many rows; how many it has then."""
    process = FORKS.Process(target=be_killed, args=(lake.source.dsn, lake.target))
    process.start()
    until(lambda: not process.is_alive() or rows_staged(lake) > rows, "a further chunk")
    process.join(seconds)
    process.kill()
    process.join()
    return max(rows, rows_staged(lake))


def rows_staged(lake: Lake) -> int:
    found = [json.loads(path.read_text()) for path in staged(lake) if path.name == "progress.json"]
    return sum(rows for progress in found for *_, rows in progress["files"])
