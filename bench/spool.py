"""`python -m bench.spool`: what many readers of the same changes cost the server, by a spool and by slots.

    python -m bench.spool [--rows 40000] [--readers 16] [--seconds 20] [--rounds 3]

A spool is written once by `gdq spool`, and its readers read the files; each slot is read by a pg_recvlogical of its
own. Both have a server of their own with the same work: changes that gathered while nobody read, then a steady rate,
which is measured after some seconds of it: connections are made and plans are kept by then.
What counts is the processor time of all processes of the server, but for the session that writes to the tables.
"""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import click
import psycopg
from psycopg.conninfo import make_conninfo

from bench.contenders import create_feed
from bench.lake import Tell, in_turns, lake_options, rounds_of, run
from bench.lake_report import CATCH_UP, LIVE, SLOTS, SPOOL, SPOOL_PART
from bench.packages import BenchError, Place
from bench.reading import server_cpu, wait_for_sessions
from bench.replica_sides import session
from bench.replica_stage import SETTINGS
from bench.results import Results
from bench.slot_reader import cpu_seconds, drop_slots, libpq_environment, pgoutput_options, recvlogical, wait_for
from bench.steady import TICKER, Child, one, ticker
from gdq.consumers.spool.reader import open_spool
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install
from gdq.ticker import maintain_all

_QUEUE, _TABLE = "bench", "app.item"
_RATE, _TRANSACTION = 1000, 20
_BEFORE_SECONDS = 3  # a round of inserts, updates and deletes is whole then
_WAIT_SECONDS = 600.0
_WRITE = f"""
do $$ begin
  for i in 0..{{rows}} / {{step}} - 1 loop
    insert into {_TABLE} select * from app.feed where id between i * {{step}} + 1 and (i + 1) * {{step}}; commit;
    update {_TABLE} set amount = amount + 1, changed = changed + interval '1 s'; commit;
    delete from {_TABLE}; commit;
  end loop;
end $$"""
_LIVE = (
    f"insert into {_TABLE} select * from app.feed where id <= {_TRANSACTION}",
    f"update {_TABLE} set amount = amount + 1",
    f"delete from {_TABLE}",
)


@dataclass(frozen=True, slots=True)
class Size:
    """Rows inserted, updated and deleted, `step` in a transaction; readers; seconds of a steady rate; rounds."""

    rows: int
    step: int
    readers: int
    seconds: float
    rounds: int


def measure(size: Size, results: Results, tell: Tell) -> None:
    """Measure what is missing in `results`, on servers of its own."""
    with ExitStack() as stack:
        places = {who: _opened(stack, size) for who in (SPOOL, SLOTS)}
        install(places[SPOOL].conninfo)
        with session(places[SPOOL].conninfo) as connection:
            connection.execute("select gdq.create_queue(%s)", [_QUEUE])
            connection.execute("select gdq.add_table(%s, %s)", [_QUEUE, _TABLE])
        with session(places[SLOTS].conninfo) as connection:
            connection.execute(f"alter table {_TABLE} replica identity full".encode())
            connection.execute(f"create publication bench for table {_TABLE}".encode())
        tell("the servers are ready")
        for number in range(1, size.rounds + 1):
            for case in (CATCH_UP, LIVE):
                for who in in_turns((SPOOL, SLOTS), number):
                    if not results.has(SPOOL_PART, case, who, number):
                        with session(places[who].conninfo) as connection:
                            connection.execute(f"delete from {_TABLE}".encode())
                        values = _WAYS[who](places[who], case, size) | {"load": os.getloadavg()[0]}
                        results.add(SPOOL_PART, case, who, number, values)
                        told = f"{values['server_us']:.1f} us of the server's processor time an event"
                        tell(f"round {number}, {case}: {who} {told}")


def _opened(stack: ExitStack, size: Size) -> Place:
    """A server with the table that is written to, and the rows that go into it."""
    binaries = find_binaries(18)
    given = SETTINGS | {"max_replication_slots": size.readers + 8, "max_wal_senders": size.readers + 8}
    server = stack.enter_context(EmbeddedServer(binaries=binaries, settings=given))
    place = Place(binaries, make_conninfo(server.conninfo(), host=str(server.socket_folder)), frozenset())
    with session(place.conninfo) as connection:
        create_feed(connection, max(size.rows, _TRANSACTION))
        made = f"create table {_TABLE} (like app.feed including all) with (autovacuum_enabled = off)"
        connection.execute(made.encode())
    return place


def _spool(place: Place, case: str, size: Size) -> dict[str, float]:
    """Written by `gdq spool`, and read by processes that do not know the server."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        command = [sys.executable, "-m", "gdq", "spool", _QUEUE, f"{folder}/spool"]
        environment = os.environ | {"GDQ_DSN": place.conninfo}

        def once() -> None:
            subprocess.run([*command, "--once"], env=environment, check=True, stdout=subprocess.DEVNULL)

        once()  # makes the folder, and registers its consumer
        wanted = _gather(place, case, size)
        readers = [stack.enter_context(Child(read_spool, f"{folder}/spool", wanted)) for _ in range(size.readers)]
        for reader in readers:
            reader.hear()
        with _used(place) as used:
            if case == CATCH_UP:
                once()
            else:
                with ticker(place.conninfo), _program(command, environment):
                    _written_live(place, _BEFORE_SECONDS)
                    used.begin()
                    before = _ticker_cpu(place)
                    used.writer = _written_live(place, size.seconds)
                    told = [reader.hear(_WAIT_SECONDS) for reader in readers]
                    used.ticker = _ticker_cpu(place) - before
                    used.end()
            told = [reader.hear(_WAIT_SECONDS) for reader in readers] if case == CATCH_UP else told
            used.readers = sum(told)
        batches = len(list(Path(folder, "spool", "_gdq_spool", "batches").iterdir()))
        with session(place.conninfo) as connection:
            connection.execute("select gdq.unregister_consumer(%s, 'spool')", [_QUEUE])
            maintain_all(connection)
        return _values(used, case, wanted, size.readers) | {"batches": batches}


def _slots(place: Place, case: str, size: Size) -> dict[str, float]:
    """Each slot read by a pg_recvlogical, which throws away what it gets."""
    names = [f"bench_{number}" for number in range(size.readers)]
    with session(place.conninfo) as connection:
        for name in names:
            connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
        wanted = _gather(place, case, size)
        (end,) = one(connection, "select pg_current_wal_insert_lsn()::text")
        # a program that is to stop at the end sees it when something later comes
        connection.execute(f"insert into {_TABLE} select * from app.feed limit 1".encode())
        connection.execute(f"delete from {_TABLE}".encode())
    environment = libpq_environment(place.conninfo)
    stop = [f"--endpos={end}"] if case == CATCH_UP else ["--status-interval=1"]
    with _used(place) as used, ExitStack() as stack:
        programs = [
            stack.enter_context(
                _program(recvlogical(place, name, pgoutput_options("bench"), *stop, "--no-loop"), environment)
            )
            for name in names
        ]
        if case == CATCH_UP:
            if any(program.wait() for program in programs):
                raise BenchError("pg_recvlogical failed")
        else:
            _written_live(place, _BEFORE_SECONDS)
            used.begin()
            used.writer = _written_live(place, size.seconds)
            with session(place.conninfo) as connection:
                query = """select case when count(*) = %s then 1 end from pg_stat_replication
                            where sent_lsn >= pg_current_wal_lsn()"""
                wait_for("the slots", query, connection, size.readers, seconds=_WAIT_SECONDS)
                used.writer += cpu_seconds(connection.info.backend_pid)
            used.end()
    with session(place.conninfo) as connection:
        drop_slots(connection, "bench_%")
    return _values(used, case, wanted, size.readers)


_WAYS: dict[str, Callable[[Place, str, Size], dict[str, float]]] = {SPOOL: _spool, SLOTS: _slots}


def _gather(place: Place, case: str, size: Size) -> int:
    """Write what is to be caught up; the number of events that readers will get in all."""
    if case == LIVE:
        return _events_of(size.seconds) + _events_of(_BEFORE_SECONDS)
    with session(place.conninfo) as connection:
        connection.execute(_WRITE.format(rows=size.rows, step=size.step).encode())
        connection.execute(f"vacuum {_TABLE}".encode())
        connection.execute("checkpoint")
    return 3 * size.rows


def _events_of(seconds: float) -> int:
    """How many a steady rate makes in this time."""
    return round(seconds * _RATE / _TRANSACTION) * _TRANSACTION


def _written_live(place: Place, seconds: float) -> float:
    """Have a process write at a steady rate; the processor time of its session in the server."""
    with Child(write_live, place.conninfo, _events_of(seconds) // _TRANSACTION) as writer:
        return float(writer.hear(_WAIT_SECONDS))


def write_live(told: Pipe, conninfo: str, transactions: int) -> None:
    """Insert, update and delete the same rows over and over; tell the processor time of the session."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        due = time.monotonic()
        for number in range(transactions):
            connection.execute(_LIVE[number % len(_LIVE)].encode(), prepare=True)
            due += _TRANSACTION / _RATE
            time.sleep(max(due - time.monotonic(), 0))
        told.send(cpu_seconds(connection.info.backend_pid))


def read_spool(told: Pipe, folder: str, wanted: int) -> None:
    """Read all rows and columns of so many events; tell that it begins, then the processor time that it took."""
    importlib.import_module("pyarrow.parquet")  # which a reader does once
    told.send("ready")
    before, count = time.process_time(), 0
    for batch in open_spool(folder).batches(timeout=_WAIT_SECONDS):
        for table in batch.tables():
            count += sum(rows.num_rows for rows in batch.arrow_batches(table))
        if count >= wanted:
            break
    told.send(time.process_time() - before)


@contextmanager
def _program(command: list[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program at work; it is ended with the block if it runs still."""
    program = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield program
        if program.poll() not in (None, 0):
            raise BenchError(f"{command[0]} has ended with exit code {program.returncode}")
    finally:
        program.terminate()
        program.wait()


class _Used:
    """What readers use: seconds and the server's processor time from begin() to end(), that of programs in all."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self.writer = self.readers = self.ticker = self.programs = 0.0
        self._programs = _programs_cpu()
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self.server, self.seconds = -server_cpu(self._connection), -time.perf_counter()
        self._ended = False

    def end(self) -> None:
        """Count no more, unless that was said before."""
        if not self._ended:
            self.server += server_cpu(self._connection)
            self.seconds += time.perf_counter()
            self._ended = True


@contextmanager
def _used(place: Place) -> Iterator[_Used]:
    """What the block uses; of the processor time of programs that of those that end in it."""
    with session(place.conninfo) as connection:
        used = _Used(connection)
        yield used
        wait_for_sessions(connection)
        used.end()
        used.programs = _programs_cpu() - used._programs


def _ticker_cpu(place: Place) -> float:
    """Processor time of the ticker's session so far."""
    query = "select pid from pg_stat_activity where application_name = %s"
    with session(place.conninfo) as connection:
        return sum(cpu_seconds(pid) for (pid,) in connection.execute(query.encode(), [TICKER]))


def _programs_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _values(used: _Used, case: str, wanted: int, readers: int) -> dict[str, float]:
    """Microseconds an event and reader."""
    share = 1e6 / readers
    counted = wanted - _events_of(_BEFORE_SECONDS) if case == LIVE else wanted
    client = (used.programs + used.readers) * share / wanted
    server = {"server_us": (used.server - used.writer) * share / counted, "ticker_us": used.ticker * share / counted}
    return {"seconds": used.seconds, "client_us": client} | server


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", type=click.IntRange(1000), default=40_000, show_default=True, help="To be caught up.")
@click.option("--readers", type=click.IntRange(1), default=16, show_default=True, help="Of the spool, and slots.")
@click.option("--seconds", type=click.IntRange(1), default=20, show_default=True, help="Of a steady rate.")
@lake_options
def main(rows: int, readers: int, seconds: int, **options: Any) -> None:
    """Measure what many readers cost the server: those of one spool, and as many slots."""
    if options["quick"]:
        rows, seconds = 2000, 3
    size = Size(rows, min(rows, 1000), readers, seconds, rounds_of(options))
    told = f"{3 * rows:,} changes, {readers} readers, {seconds} s"
    run(SPOOL_PART, told, lambda results, tell: measure(size, results, tell), options)


if __name__ == "__main__":
    main(prog_name="python -m bench.spool")
