"""Copies in chunks as commands make them: the copy, its progress, and what is printed in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from gdq.cli import base
from gdq.cli.listing import json_record
from gdq.cli.progress import shown_progress
from gdq.cli.terminal import printable
from gdq.consumers.copy.chunk import WORKERS, copy_in_chunks
from gdq.json_text import json_text

# The phase in which a table's rows are counted.
_COPYING = "copied"


def copy_chunks(
    dsn: str | None,
    queue: str,
    tables: Sequence[str],
    target: str,
    consumer: str,
    *,
    tick: int | None = None,
    workers: int = WORKERS,
    create: bool = False,
    anew: bool = False,
    as_json: bool = False,
) -> None:
    """Copy tables for a consumer; the copy has the consumer's name."""
    try:
        with shown_progress(as_json=as_json, what="copy of") as progress:
            copied = copy_in_chunks(
                dsn, queue, tables, target,
                copy=consumer, consumer=consumer, tick=tick, workers=workers, create=create, anew=anew,
                progress=_told(progress),
            )  # fmt: skip
    except KeyboardInterrupt:
        raise base.Interrupted("interrupted: the same command goes on where the copy is") from None
    if as_json:
        click.echo(json_text(json_record(copied) | {"tables": [json_record(table) for table in copied.tables]}))
        return
    for table in copied.tables:
        done = "copied before" if copied.done_before else "copied"
        base.talk(printable(f"{done}: {table.rows:,} rows of {table.table_name} for {consumer}"))
    if not copied.done_before:
        base.talk(f"{consumer} of {queue} gets every change after snapshot {copied.snapshot}")
        base.talk(printable(f"position {copied.position}"))


def _told(progress: Callable[[str, str, int, int | None], None] | None) -> Callable[[str, str, int, int | None], None]:
    """A progress function that also says why a table starts again, in a line that stays."""

    def tell(table: str, what: str, rows: int, expected: int | None) -> None:
        if what != _COPYING:
            base.talk(printable(f"copy of {table} {what}"))
        if progress is not None:
            progress(table, "copying", rows, expected)

    return tell
