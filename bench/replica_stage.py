"""The servers, databases and tables of bench.replica, the work that is written, and what is compared in the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import psycopg
from psycopg.conninfo import make_conninfo

from bench.packages import BenchError
from bench.replica_sides import BINARY, BUILT_IN, COPY_QUEUE, EACH, GDQ_WORKERS, QUEUE, BuiltIn, Gdq, Side, session
from bench.slot_reader import wait_for
from bench.steady import one, ticker
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install
from gdq.ticker import maintain_all

SETTINGS: dict[str, str | float | bool] = {
    "fsync": True,
    "full_page_writes": True,
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "wal_level": "logical",
    "max_worker_processes": 32,
    "max_logical_replication_workers": 16,
}

ITEMS = ("app.item_1", "app.item_2")
BIG = ("app.big_1", "app.big_2")
PING = "app.ping"
# What is written last shows that all was applied: in a table for each of those that are written to.
MARKS = ("app.mark_1", "app.mark_2")
_LOOK_SECONDS = 0.2
WRITTEN = (*ITEMS, *MARKS, PING)

# About 180 bytes a row, as in the other benchmarks, which vacuum by themselves too, outside the timing.
_ROW = """(id bigint primary key, customer integer not null, amount numeric(12,2) not null,
  changed timestamptz not null, code text not null, name text not null, note text, active boolean not null)
  with (autovacuum_enabled = off)"""
_TABLES = f"""
create schema app;
{"".join(f"create table {name} {_ROW};" for name in (*ITEMS, *BIG))}
create table {PING} (id bigint primary key, note text default 'some text of a usual length');
{"".join(f"create table {name} (id int primary key);" for name in MARKS)}"""
_VALUES = """i, i % 1000, i * 7919 % 10000000 / 100.0, timestamptz '2024-01-01 00:00Z' + i * interval '61 s',
  'C-' || i * 31 % 100000, 'customer ' || md5(i::text), repeat(md5((i + 1)::text), 2) || ' note', i % 3 = 0"""

# Changes in transactions of `size` rows, to one table after the other: of ten transactions five update, three insert
# and two delete. Updates are spread over the table.
_MIXED = f"""
create procedure app.write_mixed(changes bigint, size int) language plpgsql as $$
declare
  first bigint[] := array[{", ".join(f"(select min(id) from {name})" for name in ITEMS)}];
  last bigint[] := array[{", ".join(f"(select max(id) from {name})" for name in ITEMS)}];
  t int;
  place bigint;
begin
  for n in 0 .. changes / size - 1 loop
    t := n % 2 + 1;
    if n / 2 % 10 in (0, 2, 4, 6, 8) then
      place := first[t] + n::bigint * 7919 * size % (last[t] - first[t] - size);
      {{updates}}
    elsif n / 2 % 10 in (1, 5, 9) then
      place := last[t] + 1;
      {{inserts}}
      last[t] := last[t] + size;
    else
      place := first[t];
      {{deletes}}
      first[t] := first[t] + size;
    end if;
    commit;
  end loop;
end $$"""
# Each row of the first tables' parts is updated ten times, in transactions of `size` rows.
_REPEATED = f"""
create procedure app.write_repeated(changes bigint, size int) language plpgsql as $$
declare
  first bigint[] := array[{", ".join(f"(select min(id) from {name})" for name in ITEMS)}];
  t int;
  place bigint;
begin
  for pass in 1 .. 10 loop
    for n in 0 .. changes / 10 / size - 1 loop
      t := n % 2 + 1;
      place := first[t] + n / 2 * size;
      {{updates}}
      commit;
    end loop;
  end loop;
end $$"""
_SET = "amount = amount + 1, changed = changed + interval '1 s', note = 'changed ' || right(note, -8)"


def _each(statement: str) -> str:
    """A statement for the table that t names."""
    first, second = (statement.format(name) for name in ITEMS)
    return f"if t = 1 then {first}; else {second}; end if;"


_BODIES = {
    "updates": _each(f"update {{}} set {_SET} where id between place and place + size - 1"),
    "inserts": _each(f"insert into {{}} select {_VALUES} from generate_series(place, place + size - 1) i"),
    "deletes": _each("delete from {} where id between place and place + size - 1"),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """The contenders of one run, on servers of its own. `dumped`: a database for what pg_dump gives."""

    gdq: Gdq
    workers: Gdq
    built_in: tuple[BuiltIn, ...]
    dumped: str
    programs: EmbeddedServer

    @property
    def sides(self) -> tuple[Side, ...]:
        return (self.gdq, self.workers, *self.built_in)

    @property
    def sources(self) -> tuple[str, str]:
        """The sources of gdq and of its peers."""
        return self.gdq.source, self.built_in[0].source

    @classmethod
    def opened(cls, stack: ExitStack, items: int) -> Self:
        """Start the servers and fill them: each of the written tables has `items` rows on both sides."""
        own, peers, there = (
            stack.enter_context(EmbeddedServer(binaries=find_binaries(18), settings=SETTINGS)) for _ in range(3)
        )
        sources = [_database(server, "source") for server in (own, peers)]
        names = {"replica": "", "workers": "", "subscriber_1": BUILT_IN, "subscriber_2": BINARY, "subscriber_3": EACH}
        targets = {name: _database(there, name) for name in names}
        stage = cls(
            Gdq(sources[0], targets["replica"]),
            Gdq(sources[0], targets["workers"], GDQ_WORKERS, "workers", ("--apply-workers", "2")),
            tuple(BuiltIn(sources[1], targets[name], side) for name, side in names.items() if side),
            _database(there, "dumped"),
            peers,
        )
        for source in sources:
            with session(source) as connection:
                connection.execute(_MIXED.format(**_BODIES).encode())
                connection.execute(_REPEATED.format(**_BODIES).encode())
        for place in (*sources, *targets.values()):
            _fill(place, ITEMS, items)
        install(stage.gdq.source)
        with session(stage.gdq.source) as connection:
            connection.execute("select gdq.create_event_triggers()")
            for queue, tables in ((QUEUE, WRITTEN), (COPY_QUEUE, BIG)):
                connection.execute("select gdq.create_queue(%s)", [queue])
                for table in tables:
                    connection.execute("select gdq.add_table(%s, %s)", [queue, table])
        for own_side in (stage.gdq, stage.workers):
            with own_side.replicate(QUEUE, "--overwrite"):
                pass
        for side in stage.built_in:
            each = [(ITEMS[0], MARKS[0], PING), (ITEMS[1], MARKS[1])]
            side.subscribe(each if side.name == EACH else [WRITTEN], "follow")
        return stage

    def write(self, what: str, changes: int, size: int) -> None:
        """Vacuum all tables, then have both sources do the same work, which no side applies yet."""
        for place in (*self.sources, *(side.target for side in self.sides)):
            with session(place) as connection:
                for table in ITEMS:
                    connection.execute(f"vacuum analyze {table}".encode())
                connection.execute("checkpoint")
        # side by side: nothing is timed here
        with ThreadPoolExecutor(len(self.sources)) as threads:
            list(threads.map(lambda source: self._write(source, what, changes, size), self.sources))

    def _write(self, source: str, what: str, changes: int, size: int) -> None:
        with ExitStack() as stack:
            if source == self.gdq.source:
                stack.enter_context(ticker(source))
            connection = stack.enter_context(session(source))
            connection.execute("set synchronous_commit = off")
            connection.execute(f"call app.write_{what}({changes}, {size})".encode())
            # all of it is on the disk, where a walsender reads it
            connection.execute("set synchronous_commit = on")
            mark(connection)

    def give_back(self) -> None:
        """Have the queue let go what all have read."""
        with session(self.gdq.source) as connection:
            maintain_all(connection)


def _database(server: EmbeddedServer, name: str) -> str:
    """A new database with the tables; its conninfo, by the socket."""
    with session(server.conninfo()) as connection:
        connection.execute(f"create database {name}".encode())
    conninfo = make_conninfo(server.conninfo(dbname=name), host=str(server.socket_folder))
    with session(conninfo) as connection:
        connection.execute(_TABLES.encode())
    return conninfo


def _fill(conninfo: str, tables: Sequence[str], rows: int) -> None:
    with session(conninfo) as connection:
        for table in tables:
            connection.execute(
                f"insert into {table} select {_VALUES} from generate_series(1, {rows}::bigint) i".encode()
            )
            connection.execute(f"vacuum analyze {table}".encode())


def fill_big(stage: Stage, rows: int) -> None:
    """Have both sources' tables that are copied hold so many rows together.

    A ticker looks after the log, as it does wherever a table is captured.
    """
    for source in stage.sources:
        with session(source) as connection:
            if one(connection, f"select exists (select from {BIG[0]})") == (False,):
                with ticker(source) if source == stage.gdq.source else nullcontext():
                    _fill(source, BIG, rows // len(BIG))
    with session(stage.gdq.source) as connection:
        maintain_all(connection)


def mark(connection: psycopg.Connection[Any]) -> None:
    """Write another mark into each table of marks."""
    with connection.transaction():
        for table in MARKS:
            connection.execute(f"insert into {table} select count(*) from {table}".encode())


def wait_for_marks(source: str, target: str) -> None:
    """Wait until a target has all marks of its source."""
    counts = " + ".join(f"(select count(*) from {table})" for table in MARKS)
    with session(source) as connection:
        (number,) = one(connection, f"select {counts}")
    with session(target) as connection:
        wait_for("the last change", f"select case when {counts} >= {number} then 1 end", connection, seconds=3600)


def check_same(source: str, target: str, tables: Sequence[str]) -> None:
    """BenchError unless the tables have the same rows on both sides: by number and by a sum of hashes of all rows."""
    for table in tables:
        query = f"select count(*), sum(hashtextextended(t::text, 0)) from {table} t"
        sums = []
        for place in (source, target):
            with session(place) as connection:
                sums.append(one(connection, query))
        if sums[0] != sums[1]:
            raise BenchError(f"{table} has {sums[1]} in the target, and {sums[0]} in the source")


@dataclass(slots=True)
class Usage:
    """What processes used: the most MB that one of each kind had of its own, and seconds of processor time of all.

    Buffers that processes share are not counted.
    """

    megabytes: dict[str, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def look(self, processes: Mapping[str, Sequence[int]]) -> None:
        """Take in what the processes use now; those that have ended keep what was seen of them last."""
        for kind, found in processes.items():
            for pid in found:
                try:
                    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
                    self.seconds[pid] = _processor_seconds(pid)
                except OSError:
                    continue
                sizes = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
                own = sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssFile") if name in sizes) / 1024
                self.megabytes[kind] = max(self.megabytes.get(kind, 0), own)

    def values(self) -> dict[str, Any]:
        """As results keep it."""
        sizes = {kind: round(size, 1) for kind, size in self.megabytes.items()}
        return {"megabytes": sizes, "cpu": round(sum(self.seconds.values()), 2)}


def _processor_seconds(pid: int) -> float:
    """Seconds of processor time of a process, with those of threads that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def watched(processes: Callable[[], Mapping[str, Sequence[int]]]) -> Iterator[Usage]:
    """What the processes use while the block runs, looked at five times a second."""
    usage, over = Usage(), Event()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            usage.look(processes())

    looker = Thread(target=look, daemon=True)
    looker.start()
    try:
        yield usage
    finally:
        over.set()
        looker.join()
