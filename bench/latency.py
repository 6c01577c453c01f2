"""`python -m bench.latency`: from the commit of a change to its handling by a consumer that waits for notifications.

As a part of `python -m bench`: the queue and a logical slot in turns, on one server.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from select import select
from statistics import median, quantiles
from typing import Literal

import click
import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from rich import box
from rich.console import Console
from rich.table import Table

from bench.packages import Place
from bench.results import Results
from gdq.consumer import Consumer
from gdq.consumers.slot.slot import create_slot, drop_slot
from gdq.consumers.slot.source import SlotSource
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError
from gdq.installer.install import install

PART = "latency"
MISSED = 3
RATES = (10, 200, 1000)
TICKS_MS = (10, 100)
# What is promised, at this rate and tick: the half tick that a change waits on average, and two round trips.
GOAL_RATE, GOAL_TICK_MS = 200, 10

Path = Literal["queue", "slot"]
PATHS: tuple[Path, ...] = ("queue", "slot")
_TABLES: dict[Path, str] = {"queue": "app.ping", "slot": "app.slot_ping"}

_SETTINGS: dict[str, str | float | bool] = {"shared_buffers": "256MB", "synchronous_commit": False}


@dataclass(frozen=True, slots=True)
class Bare:
    """What the machine takes without gdq, in ms: medians of a one-row commit and of a NOTIFY until it is heard."""

    commit: float
    notify: float


@dataclass(frozen=True, slots=True)
class LatencyRun:
    """One run: transactions a second that were asked for and made, and ms from commit to handler."""

    rate: int
    tick_ms: int
    made: float
    p50: float
    p99: float
    bare: Bare

    @property
    def goals(self) -> tuple[float, float]:
        """The p50 and p99 to stay below."""
        return self.tick_ms / 2 + 2 * self.bare.notify, 4 * self.tick_ms

    @property
    def met(self) -> bool:
        return self.p50 <= self.goals[0] and self.p99 <= self.goals[1]


@dataclass(frozen=True, slots=True)
class Work:
    """Transactions a second, seconds of a run, and rounds."""

    rates: tuple[int, ...]
    seconds: float
    rounds: int


SIZES = {
    "tiny": Work((10,), 1, 1),
    "quick": Work(RATES, 2, 1),
    "usual": Work(RATES, 5, 2),
    "long": Work((*RATES, 5000), 10, 3),
}


def run(place: Place, work: Work, results: Results, progress: Callable[[str], None]) -> None:
    """The queue and a slot in turns, what `results` does not hold yet."""
    prepare_at(place.conninfo)
    with psycopg.connect(place.conninfo, autocommit=True) as connection:
        connection.execute("create table app.slot_ping (like app.ping including all)")
        # Without it a slot waits for the WAL writer, a tenth of a second in the median: only flushed log is sent.
        database = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("alter database {} set synchronous_commit = on").format(database))
        results.tell(tick_ms=GOAL_TICK_MS)
        for number in range(1, work.rounds + 1):
            for rate in work.rates:
                for path in PATHS if number % 2 else PATHS[::-1]:
                    if results.has(PART, case_name(rate), path, number):
                        continue
                    if path == "slot":
                        create_slot(connection, "bench", "reader", ["app.slot_ping"])
                    try:
                        found = measure(place.conninfo, rate, GOAL_TICK_MS, work.seconds, path)
                    finally:
                        if path == "slot":
                            drop_slot(connection, "bench", "reader")
                    values = {"p50": found.p50, "p99": found.p99, "made": found.made, "notify": found.bare.notify}
                    results.add(PART, case_name(rate), path, number, values)
            progress(f"latency: round {number} of {work.rounds}")


def case_name(rate: int) -> str:
    """The name of a rate in the results."""
    return f"{rate}/s"


def measure(conninfo: str, rate: int, tick_ms: int, seconds: float, path: Path = "queue") -> LatencyRun:
    """One run: a process that writes, one that ticks, and a consumer here. The queue or slot `bench` is there."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("update gdq.queue set ticker_max_lag = make_interval(secs => %s)", [tick_ms / 1000])
        bare = _bare(connection, conninfo)
    ticker = None
    if path == "queue":
        ticker = subprocess.Popen([sys.executable, "-m", "gdq", "ticker"], env=os.environ | {"GDQ_DSN": conninfo})
    context = multiprocessing.get_context("spawn")
    sent: Queue[dict[int, float]] = context.Queue()
    writer = context.Process(target=_write, args=(conninfo, _TABLES[path], rate, seconds, sent))
    committed: dict[int, float] = {}
    handled: dict[int, float] = {}

    def done() -> bool:
        if not committed and not sent.empty():
            committed.update(sent.get())
        return bool(committed) and len(handled) >= len(committed)

    try:
        writer.start()
        if path == "queue":
            with Consumer(conninfo, "bench", "reader") as consumer:
                _handle(consumer, handled, done)
        else:
            with SlotSource(conninfo, "bench", "reader") as source:
                _handle(source, handled, done)
        writer.join()
    finally:
        if ticker is not None:
            ticker.terminate()
            ticker.wait()
    delays = [(handled[number] - moment) * 1000 for number, moment in committed.items()]
    return LatencyRun(rate, tick_ms, len(committed) / seconds, median(delays), quantiles(delays, n=100)[98], bare)


def _handle(source: Consumer | SlotSource, handled: dict[int, float], done: Callable[[], bool]) -> None:
    """Note when each row arrived, until all are there."""
    for batch in source.batches(timeout=30, stop=done):
        numbers = [int((event.key or {})["id"]) for event in batch.events()]
        handled |= dict.fromkeys(numbers, time.monotonic())


def _write(conninfo: str, table: str, rate: int, seconds: float, sent: Queue[dict[int, float]]) -> None:
    """Insert one row a transaction at random moments, `rate` a second; then send when each was committed."""
    committed: dict[int, float] = {}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        row = connection.execute(f"select coalesce(max(id), 0) from {table}".encode()).fetchone()
        number = int(row[0]) if row else 0
        insert = f"insert into {table} values (%s)".encode()
        time.sleep(1)  # until ticker and consumer are at work
        due = time.monotonic()
        end = due + seconds
        while due < end:
            number += 1
            connection.execute(insert, [number], prepare=True)
            committed[number] = time.monotonic()
            due += random.expovariate(rate)
            time.sleep(max(due - time.monotonic(), 0))
    sent.put(committed)


def _bare(connection: psycopg.Connection[object], conninfo: str, times: int = 100) -> Bare:
    commits, notifies = [], []
    with psycopg.connect(conninfo, autocommit=True) as listener:
        listener.execute("listen bare")
        for number in range(times):
            start = time.monotonic()
            connection.execute("insert into app.bare values (%s)", [number], prepare=True)
            commits.append(time.monotonic() - start)
            start = time.monotonic()
            connection.execute("notify bare")
            heard = False
            while not heard:
                select([listener.fileno()], [], [], 1)
                heard = any(True for _ in listener.notifies(timeout=0))
            notifies.append(time.monotonic() - start)
            time.sleep(0.002)
    return Bare(median(commits) * 1000, median(notifies) * 1000)


def prepare(server: EmbeddedServer) -> str:
    """gdq, a captured table and a consumer; the conninfo."""
    conninfo = make_conninfo(server.conninfo(), host=str(server.socket_folder))
    prepare_at(conninfo)
    return conninfo


def prepare_at(conninfo: str) -> None:
    """The same on a server of the caller's."""
    install(conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("select gdq.create_event_triggers()")
        connection.execute("create schema app")
        connection.execute(
            "create table app.ping (id bigint primary key, note text default 'some text of a usual length')"
        )
        connection.execute("create table app.bare (id bigint)")
        connection.execute("select gdq.create_queue('bench')")
        connection.execute("select gdq.add_table('bench', 'app.ping')")
        connection.execute("select gdq.register_consumer('bench', 'reader')")


def show(runs: list[LatencyRun], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="commit to handler, ms", title_justify="left")
    for name in ("tick", "transactions/s", "p50", "p99", "bare NOTIFY", "bare commit", "load"):
        table.add_column(name, justify="right")
    for run in runs:
        times = [f"{value:.1f}" for value in (run.p50, run.p99, run.bare.notify, run.bare.commit)]
        table.add_row(f"{run.tick_ms} ms", f"{run.made:.0f} of {run.rate}", *times, f"{os.getloadavg()[0]:.1f}")
    console.print(table)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def runs(
    rates: tuple[int, ...], ticks: tuple[int, ...], seconds: float, repeat: int, progress: Callable[[str], None]
) -> list[LatencyRun]:
    """Each rate with each tick, the best of `repeat` runs: on a busy machine the others tell of that machine."""
    measured = []
    with EmbeddedServer(binaries=find_binaries(18), settings=_SETTINGS) as server:
        conninfo = prepare(server)
        for tick in ticks:
            for rate in rates:
                tries = [measure(conninfo, rate, tick, seconds) for _ in range(repeat)]
                measured.append(min(tries, key=lambda run: run.p50))
                progress(f"{rate}/s with a tick of {tick} ms: p50 {measured[-1].p50:.1f} ms")
    return measured


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--rate", "rates", type=int, multiple=True, default=RATES, show_default=True, help="Transactions a second."
)
@click.option(
    "--tick", "ticks", type=int, multiple=True, default=TICKS_MS, show_default=True, help="ticker_max_lag, ms."
)
@click.option("--seconds", type=float, default=5, show_default=True, help="Length of one run.")
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="Best of so many runs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(rates: tuple[int, ...], ticks: tuple[int, ...], seconds: float, repeat: int, as_json: bool) -> None:
    """Measure how long a change takes from its commit to the consumer.

    Times depend on the machine: compare them with the bare NOTIFY. Exit code 3 when the promise is missed: at 200/s
    with a tick of 10 ms p50 below half a tick and two round trips, p99 below four ticks.
    """
    try:
        measured = runs(rates, ticks, seconds, repeat, _progress)
    except (EmbeddedError, psycopg.Error) as error:
        raise click.ClickException(str(error).strip().splitlines()[0]) from error
    if as_json:
        print(json.dumps([asdict(run) for run in measured], indent=2))
    else:
        show(measured, Console())
    if not all(run.met for run in measured if (run.rate, run.tick_ms) == (GOAL_RATE, GOAL_TICK_MS)):
        sys.exit(MISSED)


if __name__ == "__main__":
    main(prog_name="python -m bench.latency")
