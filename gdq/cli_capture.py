"""The options of `gdq add-table` beside those that choose columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

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
