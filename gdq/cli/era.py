"""Commands for use after a restore or a failover."""

from __future__ import annotations

import click

import gdq
from gdq.cli.base import FoundWanting, command_session, dsn_option, retry_locked, talk
from gdq.cli.listing import Shape, listing_options, print_rows
from gdq.cli.queue_command import queue_command
from gdq.era import Rebased
from gdq.errors import DivergedPosition, EraEnded, TruncatedPosition


@click.command()
@click.argument("queue", required=False)
@click.option("--keep", is_flag=True, help="Consumers go on at their positions in the dump; see gdq docs operations.")
@listing_options
@dsn_option
def rebase_command(queue: str | None, keep: bool, shape: Shape, dsn: str | None) -> None:
    """Start a new era of a queue, or of all queues, that were restored from a dump.

    Recreates capture, and every consumer must copy its tables again.
    """
    rows = retry_locked(dsn, lambda connection: gdq.rebase(connection, queue, keep=keep))
    if rows or shape == "json":
        print_rows(rows, Rebased, ("queue_name", "consumer_name", "table_name", "outcome"), shape)
    else:
        talk("no consumer is concerned")


@queue_command("position")
@click.argument("consumer")
@dsn_option
def position_command(queue: str, consumer: str, dsn: str | None) -> None:
    """Print a consumer's position, as text to keep outside the server."""
    with command_session(dsn) as connection:
        click.echo(gdq.position(connection, queue, consumer))


@queue_command("check-position")
@click.argument("position")
@dsn_option
def check_position_command(queue: str, position: str, dsn: str | None) -> None:
    """Check that the server knows a position; exit code 3 if it does not."""
    with command_session(dsn) as connection:
        try:
            gdq.check_position(connection, queue, position)
        except (DivergedPosition, EraEnded, TruncatedPosition) as error:
            raise FoundWanting(str(error), error.detail, error.hint) from error
    talk("known")
