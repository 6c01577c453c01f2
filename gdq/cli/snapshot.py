"""The command that copies tables at one snapshot: snapshot."""

from __future__ import annotations

import signal

import click

from gdq.cli import base
from gdq.cli.listing import json_record, print_rows
from gdq.cli.progress import shown_progress
from gdq.cli.terminal import printable
from gdq.consumers.copy.pieces import CopyChoice
from gdq.consumers.copy.snapshot import CopiedTable, SnapshotCopy, copy_tables
from gdq.json_text import json_text
from gdq.table_choice import choose_tables


@click.command()
@click.argument("tables", nargs=-1, metavar="[TABLE|PATTERN]...")
@click.option("--all", "every", is_flag=True, help="All tables but those of extensions, gdq and views.")
@click.option("--except", "excepted", multiple=True, metavar="PATTERN", help="But not these tables. May be repeated.")
@click.option("--to", "target", metavar="CONNINFO", required=True, help="The database that the rows go to.")
@click.option("--create", is_flag=True, help="Create tables that the target lacks: columns and primary key.")
@click.option("--truncate", is_flag=True, help="Empty the target's tables first.")
@click.option("--where", metavar="CONDITION", help="Only rows of the one TABLE that match: \"region = 'EU'\".")
@click.option("--columns", metavar="C1,C2", help="Only these columns of the one TABLE.")
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    metavar="N",
    help="Copy with this many sessions on either side.",
)
@click.option("-q", "--queue", metavar="QUEUE", help="Take a tick of this queue at the snapshot.")
@click.option("--register", "consumer", metavar="CONSUMER", help="With -q: this consumer gets all later changes.")
@base.json_object_option
@base.dsn_option
def snapshot_command(
    *,
    tables: tuple[str, ...],
    every: bool,
    excepted: tuple[str, ...],
    target: str,
    create: bool,
    truncate: bool,
    where: str | None,
    columns: str | None,
    workers: int,
    queue: str | None,
    consumer: str | None,
    as_json: bool,
    dsn: str | None,
) -> None:
    """Copy tables at one snapshot to another database: all of them, or none.

    The application may write meanwhile; its DDL on these tables waits. The target has tables of the same names, with
    no rows, or gets them by --create. A PATTERN is that of `gdq add-table`.

    With -q QUEUE --register CONSUMER the consumer, new or not, has the tables as of the snapshot: it gets every change
    after it, and none before it.

    \b
    Examples: gdq snapshot public.orders 'shop.*' --to "$COPY_DSN" --create
              gdq snapshot public.orders --to "$COPY_DSN" --truncate -q orders --register mirror
    """
    if every == bool(tables):
        raise click.UsageError("give TABLE or PATTERN, or --all")
    if consumer is not None and queue is None:
        raise click.UsageError("--register needs the queue: -q QUEUE")
    with base.command_session(dsn) as connection:
        found = choose_tables(connection, tables, every=every, excepted=excepted)
        names = [table.table_name for table in found]
    if len(names) > 1 and not (where is None and columns is None):
        raise click.UsageError(f"--where and --columns are for one table: {len(names)} are chosen")
    choices = [CopyChoice(name, where, base.split_names(columns)) for name in names]
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with shown_progress(as_json=as_json, what="copy of") as progress:
            copied = copy_tables(
                dsn, choices, target, workers=workers, create=create, truncate=truncate,
                queue=queue, consumer=consumer, progress=progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise base.Interrupted("interrupted: the copy was taken back") from None
    finally:
        signal.signal(signal.SIGTERM, terminate)
    _print(copied, as_json=as_json)


def _print(copied: SnapshotCopy, *, as_json: bool) -> None:
    if as_json:
        click.echo(json_text(json_record(copied) | {"tables": [json_record(table) for table in copied.tables]}))
        return
    print_rows(copied.tables, CopiedTable, ("table_name", "rows", "copied_bytes"), None)
    rows = sum(table.rows for table in copied.tables)
    base.talk(
        f"{rows:,} rows in {copied.seconds:.1f} s, {rows / max(copied.seconds, 1e-3):,.0f} rows/s,"
        f" at snapshot {copied.snapshot}"
    )
    if copied.position is not None:
        base.talk(printable(f"position {copied.position}"))
