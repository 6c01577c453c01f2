"""The commands for captured tables: add, alter, remove and list them, and DDL without event triggers."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, Any

import click

import gdq
from gdq.cli.base import dsn_option, json_option, list_rows, retry_locked, split_names, split_table_names, talk
from gdq.queue import CaptureMode

# The list shows the chosen options; `gdq status` shows the state.
_TABLE_COLUMNS = (
    "queue_name", "table_name", "mode", "format", "key", "columns", "version", "state", "reason", "log_bytes",
    "where", "operations", "granularity", "always", "origin", "pin_search_path", "allow_rls",
)  # fmt: skip

_OPTIONS = (
    click.option("--where", metavar="CONDITION", help="Only rows that match: \"region = 'EU' and not test\"."),
    click.option("--operations", metavar="O1,O2", help="Only these of insert, update, delete, truncate."),
    click.option(
        "--granularity",
        type=click.Choice(["row", "statement"]),
        default="row",
        show_default=True,
        help="statement: for bulk loads; an update is a delete and an insert.",
    ),
    click.option("--always", is_flag=True, help="Also with session_replication_role = replica."),
    click.option("--origin", is_flag=True, help="Log the session setting gdq.origin with each change."),
    click.option("--format", type=click.Choice(["typed", "json"]), help="Log columns by type, or whole rows."),
    click.option("--pin-search-path", is_flag=True, help="For sessions that change their search_path all the time."),
)


def _capture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--where, --operations, --granularity and the like."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command("add-table")
@click.argument("queue")
@click.argument("table")
@click.option(
    "--mode", type=click.Choice(["full", "pk"]), default="full", show_default=True, help="Row images or keys."
)
@click.option("--key", metavar="C1,C2", help="Identifying columns, if not the primary key.")
@click.option("--include", metavar="C1,C2", help="pk: log old and new values of these too.")
@click.option("--columns", metavar="C1,C2", help="full: log only these.")
@click.option("--exclude", metavar="C1,C2", help="full: log all but these.")
@click.option("--allow-rls", is_flag=True, help="Capture a table with row level security.")
@_capture_options
@dsn_option
def add_table_command(queue: str, table: str, mode: CaptureMode, dsn: str | None, **options: Any) -> None:
    """Capture a table from now on.

    \b
    Example: gdq add-table orders public.orders --mode pk --include status
    """
    for name in ("key", "include", "columns", "exclude", "operations"):
        options[name] = split_names(options[name])
    retry_locked(dsn, lambda connection: gdq.add_table(connection, queue, table, mode, **options))
    talk(f"added table {table} to {queue}")


_LISTS = ("key", "include", "columns", "exclude", "operations")
_SWITCHES = ("always", "origin", "pin_search_path", "allow_rls")
_CHOICES = ("mode", "granularity", "format", "where")


@click.command("alter-table")
@click.argument("queue")
@click.argument("table")
@click.option("--mode", type=click.Choice(["full", "pk"]), help="Row images or keys.")
@click.option("--key", metavar="C1,C2", help="Identifying columns.")
@click.option("--include", metavar="C1,C2", help="pk: log old and new values of these too.")
@click.option("--columns", metavar="C1,C2", help="full: log only these.")
@click.option("--exclude", metavar="C1,C2", help="full: log all but these.")
@click.option("--where", metavar="CONDITION", help="Only rows that match.")
@click.option("--operations", metavar="O1,O2", help="Only these of insert, update, delete, truncate.")
@click.option("--granularity", type=click.Choice(["row", "statement"]), help="statement: for bulk loads.")
@click.option("--always/--no-always", default=None, help="Also with session_replication_role = replica.")
@click.option("--origin", is_flag=True, default=None, help="Log the session setting gdq.origin with each change.")
@click.option("--pin-search-path/--no-pin-search-path", default=None, help="For sessions that change theirs.")
@click.option("--allow-rls/--no-allow-rls", default=None, help="Capture a table with row level security.")
@click.option("--format", type=click.Choice(["typed", "json"]), help="Log columns by type, or whole rows.")
@click.option(
    "--reset",
    multiple=True,
    type=click.Choice([*_LISTS, *_SWITCHES, *_CHOICES]),
    metavar="OPTION",
    help="Set an option to its default: --reset where --reset exclude.",
)
@dsn_option
def alter_table_command(queue: str, table: str, reset: tuple[str, ...], dsn: str | None, **options: Any) -> None:
    """Capture a table with other options from now on; options that are not named stay.

    \b
    Example: gdq alter-table orders public.orders --exclude note --reset where
    """
    for name in _LISTS:
        options[name] = split_names(options[name])
    chosen = {name: value for name, value in options.items() if value is not None}
    both = sorted(chosen.keys() & set(reset))
    if both or not (chosen or reset):
        raise click.UsageError(f"{both[0]} is both set and reset" if both else "name an option to change")
    chosen |= dict.fromkeys(reset)
    changed = retry_locked(dsn, lambda connection: gdq.alter_table_options(connection, queue, table, **chosen))
    talk(f"altered capture of {table} in {queue}" if changed else f"unchanged: {table} in {queue} has these options")


@click.command("remove-table")
@click.argument("queue")
@click.argument("table")
@click.option("--force", is_flag=True, help="Even with unread changes: their consumers meet a gap.")
@dsn_option
def remove_table_command(queue: str, table: str, force: bool, dsn: str | None) -> None:
    """Stop capturing a table and drop its logs."""
    retry_locked(dsn, lambda connection: gdq.remove_table(connection, queue, table, force=force))
    talk(f"removed table {table} from {queue}")


@click.command("tables")
@click.argument("queue", required=False)
@json_option
@dsn_option
def tables_command(queue: str | None, as_json: bool, dsn: str | None) -> None:
    """List captured tables."""
    list_rows(dsn, gdq.table_info, queue, columns=_TABLE_COLUMNS, as_json=as_json)


@click.command("apply-ddl")
@click.argument("queue")
@click.option("-f", "--file", required=True, type=click.File(), help="File with the commands; - for stdin.")
@click.option("--lock", metavar="T1,T2", help="Lock these tables first.")
@dsn_option
def apply_ddl_command(queue: str, file: IO[str], lock: str | None, dsn: str | None) -> None:
    """Run DDL and keep capture in step with it, in one transaction.

    Use it to alter captured tables if there are no event triggers. Tries again while writers hold a table.

    \b
    Example: gdq apply-ddl shop -f add_column.sql --lock public.orders
    """
    text = file.read()
    count = retry_locked(dsn, lambda connection: gdq.apply_ddl(connection, queue, text, lock=split_table_names(lock)))
    talk(f"applied: {count} captured table(s) with new columns")
