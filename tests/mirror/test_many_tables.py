"""Mirrors of many tables under DDL and writes, killed for good anywhere: equal at every tick that is looked at.

    GDQ_MIRROR_KILLS=50 GDQ_MIRROR_TABLES=100 GDQ_MIRROR_SEED=1 python -m pytest tests/mirror/test_many_tables.py

The kills are shared out among the formats and forms. After each the mirror is brought up to the present: a lake table
that is as its table has its rows; a history gives them at each tick that was noted meanwhile.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from gdq.consumers.mirror.state import History
from tests.mirror.conftest import KINDS, Lake
from tests.mirror.test_history import Replay
from tests.mirror.test_kills import FORKS, follow

_FORMS: list[tuple[str, History | None]] = [(kind, form) for kind in KINDS for form in (None, "feed", "scd2")]
_KILLS = int(os.environ.get("GDQ_MIRROR_KILLS", "9"))
_TABLES = int(os.environ.get("GDQ_MIRROR_TABLES", "9"))
_SEED = int(os.environ.get("GDQ_MIRROR_SEED", "1"))
_WRITERS = 2
# A mirror is killed within so many seconds.
_LONGEST = 4.0

# Every change uses the columns id and n alone, which all tables have for good.
_CHANGES = (
    "insert into {t} (id, n) select i, {x} from generate_series({x}, {x} + 9) i",
    "update {t} set n = n + 1 where id % 5 = {x} % 5",
    "update {t} set id = id + 1000 where id between {x} and {x} + 3",
    "update {t} set id = -id where id between {x} and {x} + 3",
    "delete from {t} where id % 7 = {x} % 7",
)

_VALUES = {"int": "n", "bigint": "n", "text": "'x' || n", "numeric(8, 2)": "n / 8.0", "numeric(12, 2)": "n / 8.0"}


@dataclass(slots=True)
class _Table:
    """A table as its writers know it; `blurred`: a history cannot have all that was since the last look.

    Since it changed without events, or has not been copied.
    """

    name: str
    keyed: bool
    columns: dict[str, str] = field(default_factory=dict)
    made: int = 0
    touched: bool = True
    blurred: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Writers:
    """Threads that change random tables, each transaction one or two of them."""

    def __init__(self, lake: Lake, tables: list[_Table], seed: int) -> None:
        self._lake, self._tables = lake, tables
        self._over = threading.Event()
        self._choices = [random.Random(seed + number) for number in range(_WRITERS)]
        self.failed: list[BaseException] = []
        self.altered: Counter[str] = Counter()
        # held by a writer during a transaction
        self._locks = [threading.Lock() for _ in range(_WRITERS)]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(number,)) for number in range(_WRITERS)]
        self._over.clear()
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
        assert not self.failed, self.failed

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let the writers end their transactions, and wait."""
        with ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            yield

    def _run(self, number: int) -> None:
        choice = self._choices[number]
        try:
            with self._lake.source.connect() as connection:
                while not self._over.is_set():
                    table = choice.choice(self._tables)
                    with self._locks[number], table.lock:
                        self._write(connection, table, choice)
                    time.sleep(0.01)
        except BaseException as error:
            self.failed.append(error)

    def _write(self, connection: psycopg.Connection[Any], table: _Table, choice: random.Random) -> None:
        table.touched = True
        luck = choice.random()
        if luck < 0.04:
            connection.execute(f"truncate {table.name}".encode())
        elif luck < 0.12:
            self._alter(connection, table, choice)
        elif luck < 0.2:
            self._again(connection, table, choice)
        elif luck < 0.21:
            connection.execute("select gdq.maintain()")
        else:
            self._change(connection, table, choice)

    def _change(self, connection: psycopg.Connection[Any], table: _Table, choice: random.Random) -> None:
        for _ in range(choice.randint(1, 3)):
            change = choice.choice(_CHANGES).format(t=table.name, x=choice.randrange(1, 200))
            if change.startswith("insert") and table.keyed:
                change += " on conflict (id) do update set n = excluded.n"
            try:
                connection.execute(change.encode())
            except psycopg.errors.UniqueViolation:
                continue

    def _again(self, connection: psycopg.Connection[Any], table: _Table, choice: random.Random) -> None:
        """Delete rows and insert them again, in one transaction."""
        some = f"id % 3 = {choice.randrange(3)}"
        with connection.transaction():
            made = f"create temp table gone on commit drop as select * from {table.name} where {some}"
            connection.execute(made.encode())
            connection.execute(f"delete from {table.name} where {some}".encode())
            connection.execute(f"insert into {table.name} select * from gone".encode())
            connection.execute(f"update {table.name} set n = -n where {some} and id % 2 = 0".encode())

    def _alter(self, connection: psycopg.Connection[Any], table: _Table, choice: random.Random) -> None:
        kind = choice.choice(["add", "add", "default", "rename", "drop", "widen", "digits"])
        some = choice.choice(list(table.columns)) if table.columns else None
        fresh, clause = f"c{table.made}", None
        if kind == "add":
            of = choice.choice(["int", "numeric(8, 2)", "text"])
            clause, table.columns[fresh] = f"add column {fresh} {of}", of
        elif kind == "default":
            clause, table.columns[fresh] = f"add column {fresh} int default 7", "int"
        elif some is not None and kind == "rename":
            clause = f"rename column {some} to {fresh}"
            table.columns[fresh] = table.columns.pop(some)
        elif some is not None and kind == "drop":
            clause = f"drop column {some}"
            del table.columns[some]
        elif kind == "widen" and some is not None and table.columns[some] == "int":
            clause, table.columns[some] = f"alter column {some} type bigint", "bigint"
        elif kind == "digits" and some is not None and table.columns[some] == "numeric(8, 2)":
            clause, table.columns[some] = f"alter column {some} type numeric(12, 2)", "numeric(12, 2)"
        if clause is None:
            return
        table.made += 1
        # these change rows, or the form of a column in the log, without an event that tells a history what
        table.blurred |= kind in ("default", "widen", "digits")
        self.altered[kind] += 1
        with connection.transaction():
            connection.execute(f"update {table.name} set n = n + 1 where id % 11 = 0".encode())
            connection.execute(f"alter table {table.name} {clause}".encode())
            if kind in ("add", "rename"):
                value = _VALUES[table.columns[fresh]]
                connection.execute(f"update {table.name} set {fresh} = {value} where id % 2 = 0".encode())


def _make(lake: Lake, count: int) -> list[_Table]:
    """Tables with a key, without one, and partitioned."""
    tables = []
    for number in range(count):
        name, key = f"public.t{number:03}", "" if number % 9 == 4 else " primary key"
        if number % 9 == 7:
            lake.run(f"create table {name} (id int primary key, n int) partition by hash (id)")
            for part in range(2):
                lake.run(
                    f"create table {name}_{part} partition of {name} for values with (modulus 2, remainder {part})"
                )
        else:
            lake.run(f"create table {name} (id int{key}, n int)")
        lake.run(f"insert into {name} select i, 0 from generate_series(1, 100) i")
        tables.append(_Table(name, bool(key)))
        lake.run(f"select gdq.add_table('shop', '{name}')")
    return tables


class _Looks:
    """Looks at a mirror: at the tables' rows, and those of a history at ticks that were noted."""

    def __init__(self, lake: Lake, tables: list[_Table], history: History | None) -> None:
        self.lake, self.tables, self.history = lake, tables, history
        self.replay = Replay(lake, [], history or "feed")
        self.compared = self._looked = 0

    def note(self) -> None:
        """Note tables that have changed, at a tick; nobody writes meanwhile."""
        ((tick,),) = self.lake.ask("select gdq.force_tick('shop')")
        some = [table for table in self.tables if table.touched and not table.blurred]
        self.replay.known[tick] = {table.name: self.replay.rows(table.name) for table in some}

    def look(self) -> None:
        """Bring the mirror up to the present, and compare; nobody writes meanwhile."""
        self.lake.bring_up("public", history=self.history)
        changed = [table for table in self.tables if table.touched]
        if self.history is None:
            self.lake.same(*(table.name for table in changed))
            self.compared += len(changed)
        else:
            self._look_at_histories(changed)
        for table in self.tables:
            table.touched = table.blurred = False

    def _look_at_histories(self, changed: list[_Table]) -> None:
        # a blurred table is known only before and after
        blurred = {table.name for table in self.tables if table.blurred}
        newest = max(self.replay.known, default=0)
        for tick, tables in self.replay.known.items():
            if tick > self._looked:
                for name in blurred & tables.keys():
                    del tables[name]
        self._looked = newest
        self.replay.check()
        self.compared += sum(len(tables) for tables in self.replay.known.values())
        for table in changed:
            assert self.replay.replayed(table.name, 2**62) == self.replay.rows(table.name)[1], table.name
            if self.history == "scd2" and table.keyed:
                self._no_overlap(table.name)
        # some old ticks are looked at again and again
        for tick in sorted(self.replay.known)[:-3]:
            del self.replay.known[tick]

    def _no_overlap(self, name: str) -> None:
        spans: dict[int, list[tuple[int, int | None]]] = {}
        for row in self.lake.read(name).to_pylist():
            spans.setdefault(row["id"], []).append((row["__START_AT"], row["__END_AT"]))
        for some in spans.values():
            some.sort(key=lambda one: (one[0], one[1] is None))
            for (_, end), (start, _) in pairwise(some):
                assert end is not None, (name, some)
                assert end <= start, (name, some)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "history"), _FORMS)
def test_many_tables_killed_anywhere(lake: Lake, kind: str, history: History | None) -> None:
    place = _FORMS.index((kind, history))
    kills = len(range(place, _KILLS, len(_FORMS)))
    lake = replace(lake, kind=kind)
    tables = _make(lake, _TABLES)
    with lake.source.connect("su") as su:
        su.execute("update gdq.queue set rotation_period = '3 s'")
    writers, looks = _Writers(lake, tables, _SEED * 100 + place), _Looks(lake, tables, history)
    choice, longest = random.Random(_SEED * 100 + place), _LONGEST
    for number in range(kills):
        started = time.monotonic()
        with writers.at_work():
            process = FORKS.Process(target=follow, args=(lake.source.dsn, lake.target, history, lake.env))
            process.start()
            until = time.monotonic() + choice.uniform(0.2, longest)
            while (left := until - time.monotonic()) > 0:
                process.join(min(left, choice.uniform(0.3, 1.0)))
                assert process.exitcode is None
                if history and left > 0.3:
                    with writers.held():
                        looks.note()
            process.kill()
            process.join()
        looks.look()
        print(
            f"{kind} {history}: kill {number + 1}, {looks.compared} compared, {time.monotonic() - started:.0f} s",
            flush=True,
        )
    print(f"{kind} {history}: {dict(writers.altered)}", flush=True)
