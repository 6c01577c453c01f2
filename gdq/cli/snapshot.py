"""The command that copies tables at one snapshot: snapshot."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import click
from click.core import ParameterSource

from gdq.cli import base
from gdq.cli.chunked import copy_chunks
from gdq.cli.listing import json_record, print_rows
from gdq.cli.progress import shown_progress
from gdq.cli.terminal import printable
from gdq.consumers.copy.pieces import CopyChoice
from gdq.consumers.copy.snapshot import FILE_FORMATS, CopiedTable, SnapshotCopy, copy_tables
from gdq.json_text import json_text
from gdq.lock_waits import told_waits
from gdq.table_choice import choose_tables

# Options of a copy at one snapshot.
_WHOLE_ONLY = ("truncate", "where", "columns", "as_text")


@click.command()
@click.argument("tables", nargs=-1, metavar="[TABLE|PATTERN]...")
@click.option("--all", "every", is_flag=True, help="All tables but those of extensions, gdq and views.")
@click.option("--except", "excepted", multiple=True, metavar="PATTERN", help="But not these tables. May be repeated.")
@click.option(
    "--to",
    "target",
    metavar="TARGET",
    required=True,
    help="A database by its connection string, or files: parquet:FOLDER, arrow:FOLDER.",
)
@click.option("--create", is_flag=True, help="Create tables that the target lacks: columns and primary key.")
@click.option("--truncate", is_flag=True, help="Empty the target's tables first.")
@click.option("--where", metavar="CONDITION", help="Only rows of the one TABLE that match: \"region = 'EU'\".")
@click.option("--columns", metavar="C1,C2", help="Only these columns of the one TABLE.")
@click.option("--as-text", metavar="C1,C2", help="Files hold PostgreSQL's text of these columns of the one TABLE.")
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
@click.option("--chunked", is_flag=True, help="Copy in short transactions; after a kill the same command goes on.")
@click.option(
    "--anew", is_flag=True, help="With --chunked: delete what an earlier command has copied, and begin again."
)
@click.option("--tick", type=int, metavar="N", help="With --chunked: arrive at this earlier tick of the queue.")
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
    as_text: str | None,
    workers: int,
    queue: str | None,
    consumer: str | None,
    chunked: bool,
    anew: bool,
    tick: int | None,
    as_json: bool,
    dsn: str | None,
) -> None:
    """Copy tables at one snapshot to another database or into files: all of them, or none.

    The application may write meanwhile; its DDL on these tables waits. A database has tables of the same names, with
    no rows, or gets them by --create. A FOLDER is a new one, with a folder of files for each table; it is there when
    all files are. A PATTERN is that of `gdq add-table`.

    With -q QUEUE --register CONSUMER the consumer, new or not, has the tables as of the snapshot: it gets every change
    after it, and none before it.

    With --chunked no transaction is long. The tables are captured by QUEUE, CONSUMER is named, and the tables arrive at
    one tick of the queue, from which CONSUMER goes on. With --tick that is an earlier tick, such as the one that
    another table's consumer is at.

    \b
    Examples: gdq snapshot public.orders 'shop.*' --to "$COPY_DSN" --create
              gdq snapshot public.orders --to "$COPY_DSN" --truncate -q orders --register mirror
              gdq snapshot public.orders --to parquet:/lake/2026-11-25 -q orders
              gdq snapshot --all --to "$COPY_DSN" --create -q orders --register mirror --chunked
    """
    if every == bool(tables):
        raise click.UsageError("give TABLE or PATTERN, or --all")
    _check_options(target, queue, consumer, chunked=chunked, anew=anew, tick=tick)
    with base.command_session(dsn) as connection:
        found = choose_tables(connection, tables, every=every, excepted=excepted)
        names = [table.table_name for table in found]
    if len(names) > 1 and not (where is None and columns is None and as_text is None):
        raise click.UsageError(f"--where, --columns and --as-text are for one table: {len(names)} are chosen")
    choices = [CopyChoice(name, where, base.split_names(columns), base.split_names(as_text) or ()) for name in names]
    with told_waits(base.talk_of_threads()), _sigterm_interrupts():
        if chunked and queue is not None and consumer is not None:
            copy_chunks(
                dsn, queue, names, target, consumer,
                tick=tick, workers=workers, create=create, anew=anew, as_json=as_json,
            )  # fmt: skip
            return
        try:
            with shown_progress(as_json=as_json, what="copy of") as progress:
                copied = copy_tables(
                    dsn, choices, target, workers=workers, create=create, truncate=truncate,
                    queue=queue, consumer=consumer, progress=progress,
                )  # fmt: skip
        except KeyboardInterrupt:
            raise base.Interrupted("interrupted: the copy was taken back") from None
    _print(copied, as_json=as_json)


def _check_options(
    target: str, queue: str | None, consumer: str | None, *, chunked: bool, anew: bool, tick: int | None
) -> None:
    """UsageError for options that do not go together."""
    if consumer is not None and queue is None:
        raise click.UsageError("--register needs the queue: -q QUEUE")
    for name, chosen in (("--anew", anew), ("--tick", tick is not None)):
        if chosen and not chunked:
            raise click.UsageError(f"{name} needs --chunked")
    if not chunked:
        return
    source = click.get_current_context().get_parameter_source
    given = [name for name in _WHOLE_ONLY if source(name) is not ParameterSource.DEFAULT]
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise click.UsageError(f"{names} cannot go with --chunked")
    if target.partition(":")[0] in FILE_FORMATS:
        raise click.UsageError("--chunked needs a database: the rows that it has copied follow the changes")
    if queue is None or consumer is None:
        raise click.UsageError("--chunked needs -q QUEUE and --register CONSUMER")


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
