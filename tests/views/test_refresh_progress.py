"""`gdq refresh` on a terminal shows what it is at; interrupted in any phase it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gdq.cli.progress import RowCount
from gdq.conninfo import conninfo_without_password
from gdq.consumers.refresh.refresher import Refresher
from gdq.view.view import set_view_owner
from tests.support.endings import Interrupts
from tests.support.lake import KINDS, Lakes
from tests.support.programs import environment, gdq, start_gdq
from tests.support.server import Database
from tests.support.spark import Shop, make_shop
from tests.support.waiting import until
from tests.views.test_view_owners import role_named

SUMS = "select k, max(n) as top, count(*) as rows from item group by k"

# A row below zero waits for an advisory lock, wherever its value is computed.
_WAIT = """create function wait(n bigint) returns bigint language plpgsql immutable as $$
begin
  if n < 0 then
    perform pg_advisory_xact_lock_shared(7);
  end if;
  return n;
end $$"""
ROWS = "select id, wait(n) as n from item"


@pytest.fixture
def loaded(db: Database) -> Iterator[Shop]:
    statements = [
        "create table item (id int primary key, k int, n bigint)",
        "insert into item select i, i % 5, i from generate_series(1, 25000) i",
        "analyze item",
        _WAIT,
    ]
    for shop in make_shop(db, statements):
        shop.capture("item")
        yield shop


def test_phases_and_rows(loaded: Shop, empty_db: Database) -> None:
    """Netting, computing, writing and indexing in this order; rows and their estimate in a full load."""
    told: list[tuple[str, str, int, int | None]] = []
    loaded.view("sums", SUMS, engine="postgres")
    with conninfo_without_password(empty_db.dsn) as dsn:
        loaded.view("far", "select id, n from item", engine="postgres", target_dsn=dsn)
        with Refresher(loaded.db.dsn, progress=lambda *now: told.append(now)) as refresher:
            refresher.refresh("sums")
            refresher.refresh("far")
            loaded.execute("update item set n = n + 1 where id = 1")
            refresher.refresh("sums")
    # how many rows come at once is the connection's affair
    far = [now for now in told if now[:2] == ("far", "writing")]
    written = [rows for _, _, rows, _ in far]
    assert written == sorted(set(written))
    assert written[0] == 0
    assert 10_000 <= written[-1] <= 25_000
    assert {now[3] for now in far} == {25_000}
    full = [("sums", "writing", 0, 5), ("sums", "indexing", 0, None), *far, ("far", "indexing", 0, None)]
    # a row of five may look how many there are by now
    found = [now for now in told if now[0] == "far" or not now[2]]
    assert found == [*full, *(("sums", phase, 0, None) for phase in ("netting", "computing", "writing"))]


def test_rows_of_one_statement(loaded: Shop) -> None:
    """A load within the database tells the rows that are in the target so far, also one that acts as another role."""
    loaded.view("rows", "select id, n from item", engine="postgres")
    with role_named(loaded.db, "analyst", "", "item") as analyst:
        loaded.view("theirs", "select id, n from item", engine="postgres")
        with loaded.db.connect("su") as su:
            set_view_owner(su, "theirs", analyst)
            for name in ("rows", "theirs"):
                for _ in range(2):
                    told: list[tuple[str, str, int, int | None]] = []
                    with Refresher(loaded.db.su_dsn, progress=partial(note, told)) as refresher:
                        refresher.refresh(name, full=True)
                    counts = [rows for _, _, rows, _ in told if rows]
                    assert len(counts) > 10
                    assert counts == sorted(counts)
                    assert counts[-1] <= 25_000
                    assert {expected for _, phase, _, expected in told if phase == "writing"} == {25_000}
                assert Shop(loaded.db, su).differences(name, "select id, n from item") == (0, 0)


def note(told: list[tuple[str, str, int, int | None]], *now: Any) -> None:
    """Add what a Refresher tells."""
    told.append(now)


def test_rows_that_cannot_be_told(loaded: Shop) -> None:
    """A server that refuses the function that tells rows loads them as ever."""
    with loaded.db.connect("su") as su:
        su.execute("""create function refuse() returns event_trigger language plpgsql as
                      $$begin raise insufficient_privilege; end$$""")
        su.execute(
            "create event trigger refuse on ddl_command_start when tag in ('CREATE FUNCTION') execute function refuse()"
        )
    told: list[tuple[str, str, int, int | None]] = []
    loaded.view("rows", "select id, n from item", engine="postgres")
    with Refresher(loaded.db.dsn, progress=lambda *now: told.append(now)) as refresher:
        refresher.refresh("rows")
    assert told == [("rows", "writing", 0, 25_000), ("rows", "indexing", 0, None)]
    assert loaded.differences("rows", "select id, n from item") == (0, 0)


@pytest.mark.long
def test_a_long_load_is_logged(loaded: Shop) -> None:
    """Where stderr is no terminal a line of the log comes every ten seconds; nothing comes with --quiet."""
    for name in ("quiet", "told"):
        loaded.view(name, ROWS, engine="postgres")
    loaded.execute("update item set n = -n where id = 20001")
    with loaded.db.connect() as holder:
        holder.execute("select pg_advisory_lock(7)")
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted and objid = 7"
        quiet = start_gdq("--quiet", "refresh", "quiet", dsn=loaded.db.dsn)
        until(lambda: quiet.poll() is not None or holder.execute(waiting).fetchone() == (1,))
        told = start_gdq("refresh", "told", dsn=loaded.db.dsn)
        assert told.stderr is not None
        line = told.stderr.readline()
    assert told.communicate()[1].count("\n") < 100
    assert (told.returncode, quiet.communicate()[1], quiet.returncode) == (0, "", 0)
    found = re.search(
        r'level=info msg="view told: writing ([\d,]+) of about 25,000 rows, about (\d+) %, .*after ', line
    )
    assert found, line
    rows = int(found[1].replace(",", ""))
    assert rows < 25_000  # the updated row is the last one
    assert int(found[2]) == rows * 100 // 25_000


def test_a_long_load_on_a_terminal(loaded: Shop) -> None:
    loaded.view("v", ROWS, engine="postgres")
    loaded.execute("update item set n = -n where id = 20001")
    with loaded.db.connect() as holder:
        holder.execute("select pg_advisory_lock(7)")
        process, ours = on_terminal(loaded.db.dsn, "refresh")
        text = ""
        while not re.search(r"v writing [\d,]+ of about 25,000 rows, about \d+ %", text):
            text += os.read(ours, 65536).decode()
    assert "\x1b[2K" in text + printed(ours)
    assert process.wait() == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_share_never_goes_down(seed: int) -> None:
    """Whatever rows are told, and however wrong the estimate is."""
    chance = random.Random(seed)
    expected, share = chance.choice([1, 10, 1000]), 0
    count = RowCount("writing", 0.0)
    for second in range(1, 50):
        count.told("writing", chance.randint(1, 40 * second), expected, float(second))
        found = re.search(r"about (\d+) %", count.text(float(second)))
        now = int(found[1]) if found else 100
        assert share <= now <= 100
        share = now


def test_time_left() -> None:
    count = RowCount("writing", 0.0)
    count.told("writing", 0, 40_000, 0.0)
    assert count.text(0.0) == "writing, about 40,000 rows expected"
    count.told("writing", 100, 40_000, 60.0)  # the rows came late: what was before says nothing of their rate
    assert count.text(60.0) == "writing 100 of about 40,000 rows, about 0 %"
    count.told("writing", 10_100, 40_000, 70.0)
    assert count.text(70.0) == "writing 10,100 of about 40,000 rows, about 25 %, 1,000 rows/s, about 30 s left"
    count.told("writing", 50_000, 40_000, 110.0)
    assert count.text(110.0) == "writing 50,000 rows, 998 rows/s"


def on_terminal(dsn: str, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command with a terminal of its own, whose other end is returned."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gdq", *arguments],
        env=environment(dsn) | {"TERM": "xterm", "COLUMNS": "100"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    return process, ours


def printed(ours: int) -> str:
    """All that comes out of the terminal until its program ends."""
    text = b""
    with contextlib.suppress(OSError):  # how Linux tells that nobody is there any more
        while block := os.read(ours, 65536):
            text += block
    os.close(ours)
    return text.decode()


def test_shown_on_a_terminal_only(loaded: Shop) -> None:
    loaded.view("sums", SUMS, engine="postgres")
    process, ours = on_terminal(loaded.db.dsn, "refresh")
    text = printed(ours)
    assert process.wait() == 0
    assert "\x1b[2K" in text
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"sums writing(, about 5 rows expected)? +0:00:0", text)  # a quick load may end before the count
    assert re.search(r"\nsums +full +first load +0 +5 ", text)
    process, ours = on_terminal(loaded.db.dsn, "refresh", "--json")
    assert [row["action"] for row in json.loads(printed(ours))] == ["none"]
    assert process.wait() == 0
    piped = gdq("refresh", dsn=loaded.db.dsn)
    assert (piped.returncode, piped.stderr) == (0, "")
    assert "\x1b" not in piped.stdout


# Where a refresh stands still, and what it was doing: the lock of somebody else that holds it up there.
PHASES = {
    "full load": ("select pg_advisory_lock(7)", "full"),
    "full load elsewhere": ("select pg_advisory_lock(7)", "full"),
    "computing": ("select pg_advisory_lock(7)", "delta"),
    "computing elsewhere": ("select pg_advisory_lock(7)", "delta"),
    "writing": ("lock table v in share mode", "delta"),
}
LONG = ("full load elsewhere", "computing elsewhere", "writing")


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=[pytest.mark.long] if phase in LONG else []) for phase in PHASES]
)
def test_interrupted_a_rerun_is_right(loaded: Shop, empty_db: Database, phase: str) -> None:
    """Ctrl-C reaches the statement at hand: nothing of the refresh is left, and the next one goes on."""
    shop, (hold, action) = loaded, PHASES[phase]
    with conninfo_without_password(empty_db.dsn) as dsn:
        far = {"target_dsn": dsn} if "elsewhere" in phase else {}
        shop.view("v", ROWS, engine="postgres", **far)
        there = empty_db if far else shop.db
        if action == "delta":
            assert gdq("refresh", dsn=shop.db.dsn).returncode == 0
        shop.execute("update item set n = -n where id % 10000 = 1")
        before = target(there)
        with shop.db.connect(autocommit=False) as holder:
            holder.execute(hold.encode())
            process, ours = on_terminal(shop.db.dsn, "refresh")
            waiting = "select from pg_locks where not granted"
            until(lambda: process.poll() is not None or shop.connection.execute(waiting).rowcount)
            process.send_signal(signal.SIGTERM if phase == "computing" else signal.SIGINT)
            text = printed(ours)
            assert process.wait() == 130
            # all of it is gone while what it had waited for is still held
            until(lambda: not sessions(shop))
        assert text.rstrip().splitlines()[-1].endswith("Error: interrupted: the refresh at hand was rolled back")
        assert target(there) == before
        assert shop.execute("select action, error from gdq.view_history('v', 1)") == [("failed", "KeyboardInterrupt")]
        assert shop.execute("select count(*) from gdq.view_run where finished_at is null") == [(0,)]
        for database in {shop.db, there}:
            with database.connect() as connection:
                left = r"select relname from pg_class where relname like 'gdq\_%' and relpersistence <> 'p'"
                assert connection.execute(left).fetchall() == []
        done = gdq("refresh", "--json", dsn=shop.db.dsn)
        assert [row["action"] for row in json.loads(done.stdout)] == [action]
        expected = shop.execute(f"select q::text from ({ROWS}) q order by 1")
        assert target(there) == expected


@pytest.mark.long
def test_killed_while_the_server_works(loaded: Shop) -> None:
    """The statement at hand does not go on without its process."""
    loaded.view("v", ROWS, engine="postgres")
    loaded.execute("update item set n = -n where id % 10000 = 1")
    with loaded.db.connect() as holder:
        holder.execute("select pg_advisory_lock(7)")
        process, ours = on_terminal(loaded.db.dsn, "refresh")
        until(lambda: process.poll() is not None or holder.execute("select from pg_locks where not granted").rowcount)
        process.kill()
        printed(ours)
        assert process.wait() == -signal.SIGKILL
        until(lambda: not sessions(loaded))
    assert gdq("refresh", dsn=loaded.db.dsn).returncode == 0
    assert loaded.differences("v", ROWS) == (0, 0)


def target(database: Database) -> list[tuple[Any, ...]] | None:
    """The rows of the view, None before its first load."""
    with database.connect() as connection:
        if connection.execute("select to_regclass('v')").fetchone() == (None,):
            return None
        return connection.execute("select v::text from v order by 1").fetchall()


def sessions(shop: Shop) -> list[tuple[Any, ...]]:
    with shop.db.connect("su") as su:
        return su.execute(
            "select application_name, query from pg_stat_activity where application_name ~ '^gdq:refresh'"
        ).fetchall()


@pytest.mark.parametrize("phase", ["netting", "computing", "writing"])
def test_interrupted_between_two_statements(loaded: Shop, phase: str) -> None:
    loaded.view("sums", SUMS, engine="postgres")

    interrupts = Interrupts()
    with Refresher(loaded.db.dsn, progress=interrupts) as refresher:
        refresher.refresh("sums")
        loaded.execute("update item set n = n + 1, k = (k + 1) % 5 where id % 100 = 0")
        interrupts.append(phase)
        with pytest.raises(KeyboardInterrupt):
            refresher.refresh("sums")
        # the same sessions go on
        assert refresher.refresh("sums").action == "delta"
    assert loaded.differences("sums", SUMS) == (0, 0)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_while_a_lake_is_written(loaded: Shop, tmp_path: Path, kind: str) -> None:
    """In the first load, and with changes: readers find what they found before, and a rerun is right."""
    lakes = Lakes(loaded, tmp_path, kind)
    lakes.view("v", "select id, n from item")

    interrupts = Interrupts(["writing"])
    before: Counter[str] = Counter()
    with Refresher(loaded.db.dsn, progress=interrupts) as refresher:
        for action in ("full", "delta"):
            with pytest.raises(KeyboardInterrupt):
                refresher.refresh("v")
            assert not before or lakes.rows("v") == before
            assert refresher.refresh("v").action == action
            assert lakes.equal("v", "select id, n from item")
            before = lakes.rows("v")
            loaded.execute("update item set n = n + 1 where id % 100 = 0")
            interrupts.append("writing")
