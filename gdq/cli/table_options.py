"""The options of `gdq add-table` beside those that choose columns, and `gdq alter-table`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gdq.cli.base import dsn_option, names, retry_locked, talk

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


def capture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--where, --operations, --granularity and the like."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


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
@click.option("--allow-rls/--no-allow-rls", default=None, help="Capture it although it has row level security.")
@click.option("--format", type=click.Choice(["typed", "json"]), help="Log columns by type, or whole rows.")
@click.option(
    "--reset",
    multiple=True,
    type=click.Choice([*_LISTS, *_SWITCHES, *_CHOICES]),
    metavar="OPTION",
    help="Back to its default: --reset where --reset exclude.",
)
@dsn_option
def alter_table(queue: str, table: str, reset: tuple[str, ...], dsn: str | None, **options: Any) -> None:
    """Capture a table with other options from now on; what is not named stays.

    \b
    Example: gdq alter-table orders public.orders --exclude note --reset where
    """
    from gdq import queue as queues  # noqa: PLC0415

    for name in _LISTS:
        options[name] = names(options[name])
    chosen = {name: value for name, value in options.items() if value is not None}
    both = sorted(chosen.keys() & set(reset))
    if both or not (chosen or reset):
        raise click.UsageError(f"{both[0]} is given and reset" if both else "name an option to change")
    chosen |= dict.fromkeys(reset)
    changed = retry_locked(dsn, lambda connection: queues.alter_table_options(connection, queue, table, **chosen))
    talk(f"altered capture of {table} in {queue}" if changed else f"unchanged: {table} in {queue} has these options")
