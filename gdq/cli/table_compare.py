"""The commands that compare tables with those of another database, and repair what differs there."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import click

from gdq.cli import base
from gdq.cli.base import CommandFunction
from gdq.cli.listing import print_json, print_rows
from gdq.cli.progress import shown_progress
from gdq.cli.queue_command import only_queue
from gdq.cli.replicate import triggers_option
from gdq.cli.terminal import printable
from gdq.consumers.replica.table import OnTriggers
from gdq.consumers.table_compare.compare import CompareProgress, TableComparison, compare_each
from gdq.consumers.table_compare.repair import TableRepair, repair_each
from gdq.consumers.table_compare.sides import Link
from gdq.json_text import json_text
from gdq.lock_waits import told_waits

_COMPARED_COLUMNS = ("table_name", "rows", "different", "missing", "extra", "tick", "seconds")
_REPAIRED_COLUMNS = ("table_name", "inserted", "updated", "deleted", "tick", "seconds")

_Result = TypeVar("_Result")


def _sides_options(command: CommandFunction) -> CommandFunction:
    """What both commands take: the replica, the target, and which tables and rows."""
    for option in (
        click.option("--where", metavar="CONDITION", help="Only rows that match: \"region = 'EU'\"."),
        click.option("--tables", metavar="T1,T2", help="Only these tables. Default: all that the replica has copied."),
        click.option("--to", "target", required=True, metavar="CONNINFO", help="The target's connection."),
        click.argument("replica", nargs=-1, metavar="[[QUEUE] REPLICA]"),
    ):
        command = option(command)
    return command


@click.command("compare-tables")
@_sides_options
@click.option("--columns", metavar="C1,C2", help="Only these columns, beside the key.")
@click.option(
    "--examples",
    type=click.IntRange(0, 10_000),
    default=10,
    show_default=True,
    metavar="N",
    help="Name this many rows of a table that differ.",
)
@click.option(
    "--wait",
    type=base.Seconds(),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Without REPLICA: look again at rows that differ for so long. With it: wait so long for it to pass DDL.",
)
@base.json_option
@base.dsn_option
def compare_tables_command(
    replica: tuple[str, ...],
    target: str,
    tables: str | None,
    where: str | None,
    columns: str | None,
    *,
    examples: int,
    wait: float,
    as_json: bool,
    dsn: str | None,
) -> None:
    """Compare tables with those of another database, while both are written to. Exit code 3 if they differ.

    The tables of a REPLICA are compared with the source as of the tick that the replica stands at. Without REPLICA the
    databases need no link, and no gdq: rows that differ are looked at again for a while.

    \b
    Examples: gdq compare-tables shop mirror --to "$COPY_DSN"
              gdq compare-tables --to "$COPY_DSN" --tables public.orders,public.customer
    """
    link = _link(replica, tables, dsn)
    compared: list[TableComparison] = []
    interrupted = _collect(
        compared,
        lambda progress: compare_each(
            dsn, target, base.split_table_names(tables), link=link, columns=base.split_names(columns),
            where=where, examples=examples, wait_seconds=wait, progress=progress,
        ),
        as_json=as_json,
        what="comparison of",
    )  # fmt: skip
    _print(compared, as_json=as_json)
    if interrupted:
        raise base.Interrupted("interrupted: the tables above were compared")
    unequal = [table.table_name for table in compared if not table.equal]
    if unequal:
        raise base.FoundWanting(
            f"{len(unequal)} of {len(compared)} tables differ: {', '.join(unequal)}",
            hint="gdq repair-tables with the same arguments makes these rows equal."
            if link is None
            else f"gdq repair-tables {link.queue} {link.replica} ... makes these rows equal, "
            f"gdq replicate {link.queue} {link.replica} ... --copy-again replaces a copy.",
        )


@click.command("repair-tables")
@_sides_options
@click.option("--columns", metavar="C1,C2", help="Compare and update only these columns, beside the key.")
@click.option("--dry-run", is_flag=True, help="Write nothing. Exit code 3 if there is something to repair.")
@triggers_option
@click.option(
    "--wait",
    type=base.Seconds(),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait so long for the REPLICA to pass DDL.",
)
@base.json_option
@base.dsn_option
def repair_tables_command(
    replica: tuple[str, ...],
    target: str,
    tables: str | None,
    where: str | None,
    columns: str | None,
    *,
    dry_run: bool,
    triggers: OnTriggers,
    wait: float,
    as_json: bool,
    dsn: str | None,
) -> None:
    """Make the rows of another database that differ from those here equal to them, while both are written to.

    The rows are found as by `gdq compare-tables`, and no others are touched. Those of a REPLICA become what the source
    had at the tick that the replica stands at. Without REPLICA they become what the source has now.

    \b
    Examples: gdq repair-tables shop mirror --to "$COPY_DSN" --dry-run
              gdq repair-tables --to "$COPY_DSN" --tables public.orders,public.customer
    """
    link = _link(replica, tables, dsn)
    repaired: list[TableRepair] = []
    try:
        interrupted = _collect(
            repaired,
            lambda progress: repair_each(
                dsn, target, base.split_table_names(tables), link=link, columns=base.split_names(columns),
                where=where, dry_run=dry_run, wait_seconds=wait, triggers=triggers, progress=progress,
            ),
            as_json=as_json,
            what="repair of",
        )  # fmt: skip
    except Exception:
        if repaired:
            _print_repaired(repaired, as_json=as_json)
        raise
    _print_repaired(repaired, as_json=as_json)
    if interrupted:
        raise base.Interrupted("interrupted: the tables above were repaired; what was repaired of another one stays")
    unequal = [table.table_name for table in repaired if not table.nothing]
    if dry_run and unequal:
        raise base.FoundWanting(f"{len(unequal)} of {len(repaired)} tables would be repaired: {', '.join(unequal)}")


def _collect(
    found: list[_Result],
    each: Callable[[CompareProgress | None], Iterator[_Result]],
    *,
    as_json: bool,
    what: str,
) -> bool:
    """Take the results of all tables into a list, with progress shown; True if a signal ended it."""
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with told_waits(base.talk_of_threads()), shown_progress(as_json=as_json, what=what) as progress:
            found.extend(each(progress))
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGTERM, terminate)
    return False


def _link(replica: tuple[str, ...], tables: str | None, dsn: str | None) -> Link | None:
    """The replica that the arguments name; None without one."""
    if len(replica) > 2:
        raise click.UsageError(f"at most QUEUE and REPLICA: {' '.join(replica)}")
    if not replica:
        if tables is None:
            raise click.UsageError("name the tables, --tables T1,T2, or the replica")
        return None
    if len(replica) == 2:
        return Link(*replica)
    with base.command_session(dsn) as connection:
        return Link(only_queue(connection), replica[0])


def _print(compared: Sequence[TableComparison], *, as_json: bool) -> None:
    if as_json:
        print_json(compared)
        return
    print_rows(compared, TableComparison, _COMPARED_COLUMNS, None)
    for table in compared:
        for line in _differences(table):
            click.echo(printable(f"{table.table_name}: {line}"))


def _print_repaired(repaired: Sequence[TableRepair], *, as_json: bool) -> None:
    print_rows(repaired, TableRepair, _REPAIRED_COLUMNS, "json" if as_json else None)


def _differences(table: TableComparison) -> Iterator[str]:
    """What differs, a line for each column and row that is named."""
    if table.lacking:
        yield f"the target lacks {', '.join(table.lacking)}"
    for example in table.examples:
        named = "rows without a key" if example["key"] is None else json_text(example["key"])
        times = f" {example['rows']}" if example["rows"] > 1 or example["key"] is None else ""
        columns = f": {', '.join(example['columns'])}" if example["columns"] else ""
        yield f"{example['kind']}{times} {named}{columns}"
