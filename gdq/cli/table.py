"""The commands for captured tables: add, alter, remove and list them, and DDL without event triggers."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, Any

import click
from psycopg import Connection

import gdq
from gdq.cli.base import dsn_option, retry_locked, split_names, split_table_names, talk
from gdq.cli.listing import Shape, list_rows, listing_options
from gdq.cli.queue_command import queue_command
from gdq.cli.terminal import printable
from gdq.table_choice import ChosenTable, add_tables, choose_tables

_TABLE_COLUMNS = (
    "queue_name", "table_name", "mode", "format", "key", "events", "log_bytes", "state", "reason",
)  # fmt: skip
_RULE_COLUMNS = ("queue_name", "pattern", "excepted", "options", "missing", "reason")

# None stands for an option that is not given: only those that are given are compared with those of a captured table.
_OPTIONS = (
    click.option("--mode", type=click.Choice(["full", "pk"]), help="Row images or keys; default: full."),
    click.option("--key", metavar="C1,C2", help="Identifying columns, if not the primary key."),
    click.option("--include", metavar="C1,C2", help="pk: log old and new values of these too."),
    click.option("--columns", metavar="C1,C2", help="full: log only these."),
    click.option("--exclude", metavar="C1,C2", help="full: log all but these."),
    click.option("--allow-rls", is_flag=True, default=None, help="Capture a table with row level security."),
    click.option("--where", metavar="CONDITION", help="Only rows that match: \"region = 'EU' and not test\"."),
    click.option("--operations", metavar="O1,O2", help="Only these of insert, update, delete, truncate."),
    click.option(
        "--granularity",
        type=click.Choice(["row", "statement"]),
        help="statement: for bulk loads; an update is a delete and an insert. Default: row.",
    ),
    click.option("--always", is_flag=True, default=None, help="Also with session_replication_role = replica."),
    click.option("--origin", is_flag=True, default=None, help="Log the session setting gdq.origin with each change."),
    click.option("--format", type=click.Choice(["typed", "json"]), help="Log columns by type, or whole rows."),
    click.option("--pin-search-path", is_flag=True, default=None, help="For sessions that change theirs all the time."),
    click.option(
        "--unchanged",
        type=click.Choice(["both", "once", "omit"]),
        help="once: log a large value that an update leaves as it was once, not in both images; omit: not at all, and "
        "readers get no value of it. Default: both.",
    ),
)


def _capture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--mode, --where, --operations and the like."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@queue_command("add-table", unless="every")
@click.argument("tables", nargs=-1, metavar="[TABLE|PATTERN]...")
@click.option("--all", "every", is_flag=True, help="All tables but those of extensions, gdq and views.")
@click.option("--except", "excepted", multiple=True, metavar="PATTERN", help="But not these tables. May be repeated.")
@click.option("--new-tables", is_flag=True, help="Not the tables that exist, but those that are created later.")
@click.option("--backfill", metavar="CONNINFO", help="Copy the rows that are there, in chunks, to this database.")
@click.option("--register", "consumer", metavar="CONSUMER", help="--backfill: gets all later changes.")
@_capture_options
@dsn_option
def add_table_command(
    queue: str,
    tables: tuple[str, ...],
    *,
    every: bool,
    excepted: tuple[str, ...],
    backfill: str | None,
    consumer: str | None,
    dsn: str | None,
    **options: Any,
) -> None:
    """Capture tables from now on: all of them in one transaction, or none.

    In a PATTERN, * is any text and ? any character, as in psql: 'shop.*'. Without a schema it matches the tables of the
    search_path. It leaves out tables of extensions and targets of views, as --all does. Partitioned tables are captured
    at their root, with all partitions.

    --new-tables makes each PATTERN a rule of the queue: tables that match it are captured when they are created. The
    same pattern again changes the rule. `gdq tables --new-tables` lists the rules.

    --backfill copies the tables to tables of the same names in short transactions. The consumer, new or not, then has
    the tables as of one tick, and gets every change after it. If it is interrupted, the same command goes on.

    \b
    Examples: gdq add-table orders public.orders --mode pk --include status
              gdq add-table orders 'shop.*' public.prices
              gdq add-table orders --all --except 'audit.*'
              gdq add-table orders --new-tables 'shop.*' --except 'shop.tmp_*'
              gdq add-table orders public.items --backfill "$COPY_DSN" --register mirror
    """
    if every == bool(tables):
        raise click.UsageError("give TABLE or PATTERN, or --all")
    new_tables = options.pop("new_tables")
    if (backfill is None) != (consumer is None):
        raise click.UsageError("--backfill CONNINFO and --register CONSUMER go together")
    if new_tables and backfill is not None:
        raise click.UsageError("--backfill goes with tables that exist, not with --new-tables")
    given = {
        name: split_names(value) if name in _LISTS else value for name, value in options.items() if value is not None
    }
    if new_tables:
        patterns = ("*.*",) if every else tables
        _add_rules(dsn, queue, patterns, excepted, given)
        return

    def add(connection: Connection[Any]) -> list[tuple[ChosenTable, bool]]:
        chosen = choose_tables(connection, tables, every=every, excepted=excepted)
        return list(zip(chosen, add_tables(connection, queue, chosen, given), strict=True))

    added = retry_locked(dsn, add)
    for table, new in added:
        name = printable(table.table_name)
        talk(f"added table {name} to {queue}" if new else f"already captured: {name} in {queue}")
    if backfill is not None and consumer is not None:
        from gdq.cli.chunked import copy_chunks  # noqa: PLC0415 (the command starts quicker without it)

        copy_chunks(dsn, queue, [table.table_name for table, _ in added], backfill, consumer, anew=False)


def _add_rules(
    dsn: str | None, queue: str, patterns: tuple[str, ...], excepted: tuple[str, ...], options: dict[str, Any]
) -> None:
    changed = retry_locked(
        dsn, lambda connection: gdq.add_new_tables(connection, queue, patterns, excepted=excepted, **options)
    )
    for pattern in patterns:
        talk(f"{queue} captures new tables {pattern}" if changed else f"unchanged: new tables {pattern} in {queue}")


_LISTS = ("key", "include", "columns", "exclude", "operations")
_SWITCHES = ("always", "origin", "pin_search_path", "allow_rls")
_CHOICES = ("mode", "granularity", "format", "where", "unchanged")


@queue_command("alter-table")
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
    "--unchanged", type=click.Choice(["both", "once", "omit"]), help="Large values that updates leave as they were."
)
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


@queue_command("remove-table")
@click.argument("table")
@click.option("--force", is_flag=True, help="Even with unread changes: their consumers meet a gap.")
@click.option("--new-tables", is_flag=True, help="Remove the rule with this pattern; captured tables stay.")
@dsn_option
def remove_table_command(queue: str, table: str, force: bool, new_tables: bool, dsn: str | None) -> None:
    """Stop capturing a table and drop its logs.

    \b
    Examples: gdq remove-table orders public.orders
              gdq remove-table orders --new-tables 'shop.*'
    """
    if new_tables:
        if force:
            raise click.UsageError("--force goes with a table, not with --new-tables")
        retry_locked(dsn, lambda connection: gdq.remove_new_tables(connection, queue, [table]))
        talk(f"{queue} does not capture new tables {table} any more")
        return
    retry_locked(dsn, lambda connection: gdq.remove_table(connection, queue, table, force=force))
    talk(f"removed table {table} from {queue}")


@click.command("tables")
@click.argument("queue", required=False)
@click.option("--new-tables", is_flag=True, help="List the rules for tables that are created later.")
@listing_options
@dsn_option
def tables_command(queue: str | None, new_tables: bool, shape: Shape, dsn: str | None) -> None:
    """List captured tables, with --wide also with their options."""
    if new_tables:
        list_rows(dsn, gdq.new_table_info, queue, row_type=gdq.NewTableInfo, columns=_RULE_COLUMNS, shape=shape)
        return
    list_rows(dsn, gdq.table_info, queue, row_type=gdq.TableInfo, columns=_TABLE_COLUMNS, shape=shape)


@queue_command("apply-ddl")
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
