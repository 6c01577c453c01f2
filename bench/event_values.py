"""`python -m bench.event_values`: what an event costs its consumer and the server, all of it or one column."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import click
import psycopg
from psycopg import Connection
from rich import box
from rich.console import Console
from rich.table import Table

from bench.latency import prepare
from bench.small_batch import ServerTime
from gdq.batch import Batch
from gdq.consumer import Consumer
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError

_TABLE = """create table app.sale (id bigint primary key, customer int, amount numeric(12,2), at timestamptz,
              status text, note text, ratio float8, paid bool)"""
_INSERT = """insert into app.sale
             select i, i % 100, i * 1.25, now(), 'new', 'some text of a usual length', i / 7.0, true
               from generate_series(1, %s::int) i"""
_REFERENCE = "JSON by SQL"


def _by_sql(batch: Batch) -> int:
    """What a program without gdq's Python reads: get_events() through a cursor."""
    with batch.connection.cursor("by_sql") as cursor:
        cursor.itersize = 500
        return sum(1 for _ in cursor.execute("select * from gdq.get_events(%s, %s)", [batch.id, batch.token]))


READS: dict[str, Callable[[Batch], int]] = {
    _REFERENCE: _by_sql,
    "events()": lambda batch: sum(1 for _ in batch.events()),
    'events(images="new", columns=["customer"])': lambda batch: sum(
        1 for _ in batch.events(images="new", columns=["customer"])
    ),
    "events(), in_json()": lambda batch: len([event.in_json() for event in batch.events()]),
}


def measure(conninfo: str, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of processor time an event, of client and server, by way of reading; medians of `rounds`."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        _write(connection, rows)
    used: dict[str, dict[str, list[float]]] = {name: {"client": [], "server": []} for name in READS}
    with Consumer(conninfo, "bench", "reader", max_events=10 * rows) as consumer:
        server = ServerTime(consumer.connection.info.backend_pid)
        for batch in consumer.batches(once=True):
            for _ in range(rounds):
                for name, read in READS.items():
                    server.clear()
                    before = time.process_time()
                    with server.step(name):
                        events = read(batch)
                    assert events >= 2 * rows
                    used[name]["client"].append((time.process_time() - before) * 1e6 / events)
                    used[name]["server"].append(server.medians()[name] * 1000 / events)
    return {name: {side: median(times) for side, times in sides.items()} for name, sides in used.items()}


def _write(connection: Connection[Any], rows: int) -> None:
    connection.execute(_TABLE.encode())
    connection.execute("select gdq.add_table('bench', 'app.sale')")
    connection.execute(_INSERT, [rows])
    connection.execute("update app.sale set status = 'sent', ratio = ratio + 1")


def show(used: dict[str, dict[str, float]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="processor time of an event, µs", title_justify="left")
    for name in ("read by", "client", "server", "client x", "server x"):
        table.add_column(name, justify="left" if name == "read by" else "right")
    reference = used[_REFERENCE]
    for name, sides in used.items():
        ratios = [f"{sides[side] / reference[side]:.2f}" for side in ("client", "server")]
        table.add_row(name, *(f"{sides[side]:.1f}" for side in ("client", "server")), *ratios)
    console.print(table)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", type=click.IntRange(1), default=20_000, show_default=True, help="Rows, each of two events.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Reads of each kind.")
@click.option("--pg", type=int, default=18, show_default=True, help="Major version of PostgreSQL.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(rows: int, rounds: int, pg: int, as_json: bool) -> None:
    """Measure events of rows of eight columns in one large batch, beside the same events as JSON by SQL."""
    try:
        settings: dict[str, str | float | bool] = {"autovacuum": False, "synchronous_commit": False}
        with EmbeddedServer(binaries=find_binaries(pg), settings=settings) as server:
            used = measure(prepare(server), rows, rounds)
    except (EmbeddedError, psycopg.Error) as error:
        raise click.ClickException(str(error).strip().splitlines()[0]) from error
    if as_json:
        print(json.dumps(used, indent=2))
    else:
        show(used, Console())


if __name__ == "__main__":
    main(prog_name="python -m bench.event_values")
