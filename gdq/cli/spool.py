"""The command that writes a spool: batches as Parquet files, for many readers."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import click
from psycopg import Connection

import gdq.batch_loop
import gdq.ticker
from gdq.cli import base
from gdq.cli.queue_command import queue_command
from gdq.cli.terminal import printable
from gdq.consumers.spool.writer import EVERY_SECONDS, MAX_EVENTS, spool_batches
from gdq.json_text import json_text


@queue_command("spool")
@click.argument("folder")
@click.option("--consumer", metavar="NAME", help="Whose batches are written. Default: the last part of FOLDER.")
@click.option("--once", is_flag=True, help="Write everything committed so far, then exit (forces a tick).")
@click.option(
    "--keep", type=base.Seconds(), metavar="SECONDS", help="Remove batches that were written longer ago. Default: none."
)
@click.option(
    "--max-events",
    type=click.IntRange(min=1),
    default=MAX_EVENTS,
    show_default=True,
    metavar="N",
    help="Join ticks into batches of at most this many events; a single tick is never divided.",
)
@click.option(
    "--every",
    type=base.Seconds(),
    default=EVERY_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="From the begin of a batch to that of the next, at least: more make fewer and larger files.",
)
@click.option("--as-text", metavar="C1,C2", help="Columns whose values Arrow's type cannot hold, to write as text.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each batch.")
@base.dsn_option
def spool_command(
    queue: str,
    folder: str,
    *,
    consumer: str | None,
    once: bool,
    keep: float | None,
    max_events: int,
    every: float,
    as_text: str | None,
    as_json: bool,
    dsn: str | None,
) -> None:
    """Write each batch of a consumer once as Parquet files, which many programs read without the server.

    FOLDER is a path or a URI such as s3://bucket/folder. The consumer of a new FOLDER is registered unless it is, and
    begins with the changes from now. gdq.open_spool() reads the batches in order; a table's files lie in
    FOLDER/schema.table.

    \b
    Example: gdq spool shop /srv/spool --keep 604800
    """
    name = consumer or folder.rstrip("/").rpartition("/")[2]
    stop = base.StopSignals()

    def work(connection: Connection[Any]) -> None:
        batches = spool_batches(
            connection,
            queue,
            name,
            folder,
            once=once,
            stop=stop,
            keep=None if keep is None else timedelta(seconds=keep),
            max_events=max_events,
            every=every,
            as_text=base.split_names(as_text) or (),
        )
        for batch in batches:
            if as_json:
                click.echo(json_text(dataclasses.asdict(batch)))
            else:
                what = f"{batch.rows} rows of {batch.tables} tables, {batch.events} other changes"
                click.echo(printable(f"ticks {batch.tick_from} to {batch.tick_to}: {what} in {batch.seconds:.2f} s"))

    called = gdq.batch_loop.application_name(queue, name)
    try:
        gdq.ticker.reconnecting(lambda: stop.connect(dsn, called), work, stop.sleep)
    except KeyboardInterrupt:
        raise base.Interrupted("interrupted: the batch at hand comes again") from None
