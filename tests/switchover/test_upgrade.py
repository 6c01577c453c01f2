"""A major upgrade under load: no write that was acknowledged is lost, and the old server follows the new one."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psycopg
import pytest

from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError
from gdq.installer.install import install
from tests.support.programs import start_gdq
from tests.support.server import Database
from tests.support.waiting import until
from tests.switchover.conftest import Pair

pytestmark = pytest.mark.server


@pytest.fixture
def upgrade(empty_db: Database) -> Iterator[Pair]:
    """A database of an older PostgreSQL, and one of 18: from 15, or from the one that is tested."""
    tested = empty_db.server.binaries.major
    if tested == 15:
        pytest.skip("the tests on PostgreSQL 18 go from 15 to 18")
    other = 15 if tested == 18 else 18
    try:
        binaries = find_binaries(other)
    except EmbeddedError as error:
        pytest.skip(str(error))
    with EmbeddedServer(binaries=binaries, in_memory=True) as server:
        second = Database(server, "postgres")
        with second.connect("su") as su:
            for role in ("gdq_owner", "app"):
                su.execute(f"create role {role} login".encode())
        yield Pair(second, empty_db) if tested == 18 else Pair(empty_db, second)


class Writers:
    """Threads that insert rows, and connect to where writes are taken when they are refused.

    `cut_off`: servers are killed, which ends no writer: what it was writing is `doubtful` then.
    """

    def __init__(self, pair: Pair, number: int = 3, *, cut_off: bool = False) -> None:
        self.at = pair.old
        self._cut_off = cut_off
        self.doubtful: list[tuple[int, int]] = []
        self._pair = pair
        self._done = threading.Event()
        self.acknowledged: list[tuple[int, int]] = []
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._write, args=[one]) for one in range(number)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _write(self, writer: int) -> None:
        number, row = 0, None
        while not self._done.is_set():
            try:
                with self.at.connect("su") as connection:
                    while not self._done.is_set():
                        number += 1
                        row = (writer, number)
                        with connection.transaction():
                            connection.execute("insert into entry (writer, number) values (%s, %s)", row)
                            connection.execute("update total set n = n + 1 where writer = %s", [writer])
                        self.acknowledged.append(row)
                        row = None
            except psycopg.errors.ReadOnlySqlTransaction:
                self.at = self._pair.old if self.at is self._pair.new else self._pair.new
            except psycopg.Error as error:
                if not self._cut_off or not isinstance(error, psycopg.OperationalError):
                    self.errors.append(str(error))
                    return
                self.doubtful += [row] if row else []
                row = None
                self._done.wait(0.1)


TABLES = """
create table entry (id bigint generated always as identity primary key, writer int, number int, at date default now());
create table total (writer int primary key, n int not null default 0);
insert into total select i from generate_series(0, 7) i"""


def open_entries(pair: Pair) -> None:
    """Make the tables on both sides and a queue in the old one, which captures them."""
    install(pair.old.su_dsn)
    for place in (pair.old, pair.new):
        with place.connect("su") as su:
            for statement in TABLES.split(";")[: 3 if place is pair.old else 2]:
                su.execute(statement.encode())
    with pair.old.connect("su") as su:
        for statement in (
            "select gdq.create_event_triggers()",
            "select gdq.create_queue('shop')",
            "select gdq.add_table('shop', 'entry')",
            "select gdq.add_table('shop', 'total')",
            "select gdq.add_sequence('shop', 'entry_id_seq')",
        ):
            su.execute(statement.encode())


def switch(pair: Pair, *, back: bool = False) -> float:
    told = pair.done("switchover", "--json", "--wait", "600", "--max-pause", "600", *(["--back"] if back else []))
    return float(json.loads(told.stdout)[0]["pause_seconds"])


def followed(pair: Pair, *, back: bool) -> None:
    """Let a replica follow until the other side is equal, where nobody writes any more."""
    here, there = (pair.new, pair.old) if back else (pair.old, pair.new)
    follower = start_gdq("replicate", "shop", "mirror", "--to", there.su_dsn, "--follow", dsn=here.su_dsn)
    try:
        for table in ("entry", "total"):
            query = f"select t::text from {table} t order by 1"
            until(lambda: pair.rows(here, query) == pair.rows(there, query), f"{table} equal", pause=0.2)  # noqa: B023
    finally:
        follower.terminate()
        follower.communicate()


def test_to_another_major_and_back_under_load(upgrade: Pair) -> None:
    pair = upgrade
    open_entries(pair)
    pair.done("replicate")
    pair.done("switchover", "--prepare")
    with Writers(pair) as writers:
        until(lambda: len(writers.acknowledged) > 50, "writers at work")
        pair.run_su(pair.old, "alter table entry add note text")
        pair.done("replicate")
        pause = switch(pair)
        print(f"{pair.old.server.binaries.major} -> {pair.new.server.binaries.major}: no writes for {pause} s")
        written = len(writers.acknowledged)
        until(lambda: writers.at is pair.new and len(writers.acknowledged) > written + 50, "writers at the new place")
    assert writers.errors == []
    _nothing_lost(pair, pair.new, writers)
    followed(pair, back=True)
    with Writers(pair) as again:
        again.at = pair.new
        until(lambda: len(again.acknowledged) > 50, "writers at work")
        print(f"back: no writes for {switch(pair, back=True)} s")
        written = len(again.acknowledged)
        until(lambda: again.at is pair.old and len(again.acknowledged) > written + 50, "writers at the old place")
    assert again.errors == []
    _nothing_lost(pair, pair.old, writers, again)


def _nothing_lost(pair: Pair, place: Database, *writers: Writers) -> None:
    """Every acknowledged row is there, none twice, and the numbers of rows agree with the totals."""
    wanted = sorted(row for one in writers for row in one.acknowledged)
    assert pair.rows(place, "select writer, number from entry order by 1, 2") == wanted
    assert pair.rows(place, "select sum(n) from total") == [(len(wanted),)]


@pytest.mark.long
def test_pgbench(upgrade: Pair) -> None:
    """pgbench itself under DDL, there and back: it stops at the fence and is started again at the new place."""
    pair = upgrade
    try:
        program = pair.old.server.binaries.program("pgbench")
    except EmbeddedError as error:
        pytest.skip(str(error))
    install(pair.old.su_dsn)
    for place, steps in ((pair.old, "dtgp"), (pair.new, "dtp")):
        _pgbench(program, place, "--initialize", f"--init-steps={steps}")
        pair.run_su(place, "alter table pgbench_history add id bigint generated always as identity primary key")
    pair.run_su(
        pair.old,
        "select gdq.create_event_triggers()",
        "select gdq.create_queue('shop')",
        *(f"select gdq.add_table('shop', '{name}')" for name in _PGBENCH),
        "select gdq.add_sequence('shop', 'pgbench_history_id_seq')",
    )
    pair.done("replicate")
    pair.done("switchover", "--prepare")
    for back in (False, True):
        here, there = (pair.new, pair.old) if back else (pair.old, pair.new)
        pause = _switched_under_load(pair, program, back=back)
        rows = pair.rows(there, _SUMS)[0]
        print(f"{here.server.binaries.major} -> {there.server.binaries.major}, {rows[-1]} transactions of pgbench: no"
              f" writes for {pause} s")  # fmt: skip
        assert rows[:3] == (rows[3],) * 3
        assert pair.rows(here, _SUMS) == pair.rows(there, _SUMS)
        for name in _PGBENCH:
            query = f"select t::text from {name} t order by 1"
            assert pair.rows(here, query) == pair.rows(there, query), name


_PGBENCH = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history")
_SUMS = """
select (select sum(abalance) from pgbench_accounts), (select sum(tbalance) from pgbench_tellers),
       (select sum(bbalance) from pgbench_branches), sum(delta), count(*) from pgbench_history"""


def _switched_under_load(pair: Pair, program: Path, *, back: bool) -> float:
    """Switch amid transactions and new columns, and let the side that was left follow: the pause in seconds."""
    here, there = (pair.new, pair.old) if back else (pair.old, pair.new)
    load = subprocess.Popen(
        [program, "-n", "-c", "4", "-T", "3600", here.su_dsn],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        history = "select count(*) from pgbench_history"
        before = pair.rows(here, history)
        for number in (1, 2, 3):
            wanted = before[0][0] + 200 * number
            until(lambda: pair.rows(here, history)[0][0] > wanted, "transactions", pause=0.2)  # noqa: B023
            for name in _PGBENCH[1:]:
                pair.run_su(here, f"alter table {name} add x{int(back)}{number} int default {number}")
        pair.done("replicate", "--on-ddl", "follow", back=back)
        pause = switch(pair, back=back)
        _, errors = load.communicate()
    finally:
        load.kill()
    assert "takes no writes here" in errors
    _pgbench(program, there, "-n", "-c", "4", "-t", "100")
    pair.done("replicate", back=not back)
    return pause


def _pgbench(program: Path, place: Database, *options: str) -> None:
    subprocess.run([program, *options, place.su_dsn], check=True, capture_output=True)
