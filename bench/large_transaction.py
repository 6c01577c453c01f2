"""`python -m bench.large_transaction`: memory of writer, reader and server for one huge transaction.

One transaction writes `--rows` rows into a captured table, and a consumer takes them as one batch, event by event and
as Arrow batches (`--arrow-only`: as these alone). Prints the largest anonymous memory of each process. Exit code 3 when
one passes the limit or a row is missing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import psycopg
from rich.console import Console

from gdq import Consumer
from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install

MISSED = 3


@dataclass(slots=True)
class Peak:
    """The largest anonymous memory seen of one process, in kB."""

    kilobytes: int = 0


@contextmanager
def watched(pid: int | str) -> Iterator[Peak]:
    """Samples a process's anonymous memory ten times a second while the block runs."""
    peak, done = Peak(), threading.Event()
    status = Path(f"/proc/{pid}/status")

    def sample() -> None:
        while not done.wait(0.1):
            line = next((x for x in status.read_text().splitlines() if x.startswith("RssAnon:")), "RssAnon: 0 kB")
            peak.kilobytes = max(peak.kilobytes, int(line.split()[1]))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def measure(
    server: EmbeddedServer, rows: int, console: Console, *, events_too: bool = True
) -> dict[str, tuple[int, int]]:
    """{step: (rows, peak kB)} of writing, of reading events (client, server) and of reading Arrow batches (both)."""
    conninfo = server.conninfo()
    install(conninfo)
    found: dict[str, tuple[int, int]] = {}
    with psycopg.connect(conninfo, autocommit=True) as writer:
        writer.execute("create table big (id bigint primary key, amount int, note text)")
        writer.execute("select gdq.create_queue('big'), gdq.add_table('big', 'big')")
        writer.execute("select gdq.register_consumer('big', 'reader')")
        console.print(f"writing {rows:,} rows in one transaction")
        with watched(writer.info.backend_pid) as peak:
            writer.execute("insert into big select g, 1, 'row ' || g from generate_series(1, %s) g", [rows])
        found["write, server"] = (rows, peak.kilobytes)
        writer.execute("select gdq.force_tick('big')")
    with Consumer(conninfo, "big", "reader") as consumer:
        for batch in consumer.batches(once=True):
            console.print(f"batch of ticks {batch.tick_from} to {batch.tick_to}")
            with watched("self") as client, watched(batch.connection.info.backend_pid) as backend:
                events = sum(1 for _ in batch.events()) if events_too else 0
            if events:
                found["events, client"] = (events, client.kilobytes)
                found["events, server"] = (events, backend.kilobytes)
            with watched("self") as client, watched(batch.connection.info.backend_pid) as backend:
                read = sum(part.num_rows for table in batch.tables() for part in batch.arrow_batches(table))
            if read:
                found["arrow, client"] = (read, client.kilobytes)
                found["arrow, server"] = (read, backend.kilobytes)
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", default=10_000_000, show_default=True, help="Rows of the transaction.")
@click.option("--limit-mb", default=512, show_default=True, help="Anonymous memory that no reading process may pass.")
@click.option("--arrow-only", is_flag=True, help="Do not read event by event, which takes longest.")
def main(rows: int, limit_mb: int, *, arrow_only: bool) -> None:
    """Memory of every process while one huge transaction is captured and consumed."""
    console = Console(stderr=True)
    with EmbeddedServer(18) as server:
        found = measure(server, rows, console, events_too=not arrow_only)
    for step, (seen, kilobytes) in found.items():
        print(f"{step}: {seen:,} rows, {kilobytes / 1024:.0f} MB at most")
    reading = [step for step in found if not step.startswith("write")]
    missing = len(reading) < (2 if arrow_only else 4)
    if missing or any(found[s][0] != rows or found[s][1] > limit_mb * 1024 for s in reading):
        sys.exit(MISSED)


if __name__ == "__main__":
    main()
