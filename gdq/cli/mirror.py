"""Commands for mirrors: captured tables that are kept equal as Delta, Iceberg or Parquet tables."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import click

from gdq.cli import base
from gdq.cli.follow import keep_following
from gdq.cli.listing import Shape, list_rows, listing_options, print_rows
from gdq.cli.queue_command import queue_command
from gdq.cli.terminal import printable
from gdq.consumers.mirror.mirror_info import MirrorInfo, drop_mirror, mirror_info
from gdq.json_text import json_text
from gdq.lock_waits import told_waits

if TYPE_CHECKING:
    from gdq.consumers.mirror.mirror import Mirror, MirroredBatch
    from gdq.consumers.mirror.state import History

_BATCH_COLUMNS = ("mirror_name", "tick", "tables", "rows", "seconds")
_MIRROR_COLUMNS = (
    "mirror_name",
    "queue_name",
    "target",
    "history",
    "tables",
    "state",
    "tick",
    "updated_at",
    "lag",
    "unread_events",
)


@queue_command("mirror")
@click.argument("tables", nargs=-1, required=True, metavar="TABLE|SCHEMA...")
@click.option(
    "--target",
    required=True,
    metavar="KIND:FOLDER",
    help="delta:/folder, iceberg:/folder, iceberg:CATALOG or parquet:/folder, for Delta and Parquet also a URI such as "
    "s3://bucket/folder; a table is schema.table in it.",
)
@click.option("--name", metavar="NAME", help="Of the mirror and its consumer. Default: the last part of the target.")
@click.option(
    "--history",
    type=click.Choice(["feed", "scd2"]),
    help="Keep what has been. feed: a table in the lake is the change feed of its table, to which rows are only added; "
    "scd2: it has every version of each row, with the ticks from which and up to which it held.",
)
@click.option(
    "--on-column",
    "columns",
    multiple=True,
    metavar="KIND=WORD",
    help="What becomes of columns that change: added=add|stop, widened=widen|stop, renamed=rename|keep|stop, "
    "dropped=drop|keep|stop, retyped=copy|stop (of a history keep|stop). Default: as the table has them; a history "
    "keeps columns that are dropped, and stops at another type.",
)
@click.option(
    "--keep",
    type=base.Seconds(),
    metavar="SECONDS",
    help="Remove versions of the lake tables that are older. Default: an hour for Parquet, a week for others.",
)
@click.option(
    "--engine",
    type=click.Choice(["arrow", "spark"]),
    default="arrow",
    show_default=True,
    help="arrow: this process copies and changes all tables. spark: Spark does so with those of more than 512 MB.",
)
@click.option("--follow", is_flag=True, help="Go on with every change, until SIGTERM or Ctrl-C.")
@listing_options
@base.dsn_option
def mirror_command(
    queue: str,
    tables: tuple[str, ...],
    *,
    target: str,
    name: str | None,
    history: History | None,
    columns: tuple[str, ...],
    keep: float | None,
    engine: str,
    follow: bool,
    shape: Shape,
    dsn: str | None,
) -> None:
    """Bring tables of a lake up to the present: copy captured tables, then apply their changes.

    A TABLE is schema.table. A SCHEMA stands for its captured tables, those that are made later too.

    \b
    Example: gdq mirror shop public --target delta:/srv/lake --follow
    """
    from gdq.consumers.mirror.mirror import Mirror, MirroredBatch  # noqa: PLC0415 (loads pyarrow, an extra)

    tell = base.talk_of_threads()
    stop = base.StopSignals()
    called = name or target.rstrip("/").rpartition("/")[2].rpartition(":")[2]

    def start() -> Mirror:
        with stop.nothing_at_hand():
            age = None if keep is None else timedelta(seconds=keep)
            return Mirror(
                dsn,
                queue,
                called,
                target,
                tables,
                history=history,
                columns=columns,
                keep=age,
                spark=engine == "spark",
                tell=tell,
            )

    with told_waits(tell):
        if follow:
            keep_following(stop, start, partial(_apply, stop=stop, as_json=shape == "json"))
            return
        with start() as mirror:
            applied = list(mirror.run(stop=stop))
    print_rows(applied, MirroredBatch, _BATCH_COLUMNS, shape)


def _apply(mirror: Mirror, *, stop: base.StopSignals, as_json: bool) -> None:
    for batch in mirror.run(once=False, stop=stop):
        _report(batch, as_json=as_json)


def _report(batch: MirroredBatch, *, as_json: bool) -> None:
    if as_json:
        click.echo(json_text(dataclasses.asdict(batch)))
    else:
        line = f"{batch.mirror_name}: tick {batch.tick}, {batch.rows} rows of {batch.tables} tables"
        click.echo(printable(f"{line} in {batch.seconds:.2f} s"))


@click.command("mirrors")
@listing_options
@base.dsn_option
def mirrors_command(shape: Shape, dsn: str | None) -> None:
    """List mirrors, with their lag in time and events."""
    list_rows(dsn, mirror_info, row_type=MirrorInfo, columns=_MIRROR_COLUMNS, shape=shape)


@queue_command("drop-mirror")
@click.argument("name")
@base.dsn_option
def drop_mirror_command(queue: str, name: str, dsn: str | None) -> None:
    """Delete a mirror and its consumer, with the files of a load that is not done. The tables in the lake stay."""
    with base.command_session(dsn, autocommit=True) as connection:
        known = drop_mirror(connection, queue, name, base.talk)
    base.talk(f"dropped mirror {name} of {queue}" if known else f"already gone: mirror {name} of {queue}")
