"""Copies in chunks as commands make them: the copy, its progress, and what is printed in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gdq.cli import base
from gdq.cli.progress import shown_progress
from gdq.cli.terminal import printable
from gdq.consumers.copy.chunk import copy_in_chunks

# The phase in which a table's rows are counted.
_COPYING = "copied"


def copy_chunks(dsn: str | None, queue: str, tables: Sequence[str], target: str, consumer: str, *, anew: bool) -> None:
    """Copy tables for a consumer; the copy has the consumer's name."""
    try:
        with shown_progress(as_json=False) as progress:
            copied = copy_in_chunks(
                dsn, queue, tables, target, copy=consumer, consumer=consumer, anew=anew, progress=_told(progress)
            )
    except KeyboardInterrupt:
        raise base.Interrupted("interrupted: the same command goes on where the copy is") from None
    for table in copied.tables:
        done = "copied before" if copied.done_before else "copied"
        base.talk(printable(f"{done}: {table.rows:,} rows of {table.table_name} for {consumer}"))
    if not copied.done_before:
        base.talk(f"{consumer} of {queue} gets every change after snapshot {copied.snapshot}")


def _told(progress: Callable[[str, str, int, int | None], None] | None) -> Callable[[str, str, int, int | None], None]:
    """A progress function that also says why a table starts again, in a line that stays."""

    def tell(table: str, what: str, rows: int, expected: int | None) -> None:
        if what != _COPYING:
            base.talk(printable(f"copy of {table} {what}"))
        if progress is not None:
            progress(table, "copying", rows, expected)

    return tell
