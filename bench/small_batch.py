"""`python -m bench.small_batch`: what one changed row costs the server on its way to a consumer that ticks itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
import psycopg
from rich.console import Console

from bench.latency import prepare
from gdq.consumer import Consumer
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError

_WARM_UP = 50
_NANOSECONDS = 1_000_000  # in a millisecond
_NEXT = "select * from gdq.next_events('bench', 'reader')"
_FINISH = "select gdq.finish_batch(%s, %s)"


class ServerTime:
    """Milliseconds of processor time of one server process, added up by step."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/schedstat")
        self.steps: dict[str, list[float]] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        before = self._nanoseconds()
        yield
        self.steps.setdefault(name, []).append((self._nanoseconds() - before) / _NANOSECONDS)

    def clear(self) -> None:
        """Forget what was measured."""
        self.steps.clear()

    def medians(self) -> dict[str, float]:
        """The median of each step: on a busy machine the others tell of caches that were lost."""
        return {name: median(times) for name, times in self.steps.items()}

    def _nanoseconds(self) -> int:
        return int(self._path.read_text().split()[0])


def by_statement(conninfo: str, rounds: int, tables: int) -> dict[str, float]:
    """Milliseconds of the server for each statement of a batch that holds one row of each of `tables` tables."""
    with (
        psycopg.connect(conninfo, autocommit=True) as writer,
        psycopg.connect(conninfo, autocommit=True) as reader,
    ):
        time = ServerTime(reader.info.backend_pid)
        for number in range(rounds + _WARM_UP):
            if number == _WARM_UP:
                time.clear()
            _write(writer, number, tables)
            with time.step("tick"):
                reader.execute("select gdq.force_tick('bench')", prepare=True)
            with reader.transaction():
                with time.step("next_events"):
                    *events, batch = reader.execute(_NEXT, prepare=True).fetchall()
                assert len(events) >= tables
                with time.step("finish_batch"):
                    reader.execute(_FINISH, batch[:2], prepare=True)
        return time.medians()


def by_consumer(conninfo: str, rounds: int, tables: int) -> float:
    """Milliseconds of the server for a batch of a Consumer that no ticker helps."""
    with psycopg.connect(conninfo, autocommit=True) as writer, Consumer(conninfo, "bench", "reader") as consumer:
        time = ServerTime(consumer.connection.info.backend_pid)
        number = 0
        _write(writer, number, tables)
        step: Any = None
        for batch in consumer.batches():
            assert sum(1 for _ in batch.events()) >= tables
            batch.commit()
            if step is not None:
                step.__exit__(None, None, None)
            number += 1
            if number == _WARM_UP:
                time.clear()
            elif number == rounds + _WARM_UP:
                break
            _write(writer, number, tables)
            step = time.step("batch")
            step.__enter__()
        return time.medians()["batch"]


def _write(writer: psycopg.Connection[Any], number: int, tables: int) -> None:
    with writer.transaction():
        for table in range(tables):
            writer.execute(f"update app.ping{table or ''} set note = %s where id = 1".encode(), [f"note {number}"])


def prepare_tables(conninfo: str, tables: int) -> None:
    """Tables with one row each, captured and maintained; a ticker's lag of 1 ms."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("select gdq.set_queue('bench', ticker_max_lag => '1 ms')")
        for table in range(tables):
            if table:
                connection.execute(f"create table app.ping{table} (like app.ping including all)".encode())
                connection.execute("select gdq.add_table('bench', %s::regclass)", [f"app.ping{table}"])
            connection.execute(f"insert into app.ping{table or ''} values (1)".encode())
        # as a ticker does: it makes the readers of the logs
        while connection.execute("select gdq.maintain()").fetchone() == (True,):
            pass


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(1), default=500, show_default=True, help="Batches of each kind.")
@click.option("--tables", type=click.IntRange(1), default=1, show_default=True, help="Tables with a row in each batch.")
@click.option("--pg", type=int, default=18, show_default=True, help="Major version of PostgreSQL.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def main(rounds: int, tables: int, pg: int, as_json: bool) -> None:
    """Measure the server's processor time, in ms, of a tick and a batch of one row: by statement, and by a Consumer."""
    try:
        settings: dict[str, str | float | bool] = {"autovacuum": False, "synchronous_commit": False}
        with EmbeddedServer(binaries=find_binaries(pg), settings=settings) as server:
            conninfo = prepare(server)
            prepare_tables(conninfo, tables)
            used = by_statement(conninfo, rounds, tables)
            used["all statements"] = sum(used.values())
            used["Consumer, one batch"] = by_consumer(conninfo, rounds, tables)
    except (EmbeddedError, psycopg.Error) as error:
        raise click.ClickException(str(error).strip().splitlines()[0]) from error
    if as_json:
        print(json.dumps(used, indent=2))
        return
    console = Console()
    console.print(f"PostgreSQL {pg}, load {os.getloadavg()[0]:.1f}")
    for name, milliseconds in used.items():
        console.print(f"{name}: {milliseconds:.3f} ms")


if __name__ == "__main__":
    main(prog_name="python -m bench.small_batch")
