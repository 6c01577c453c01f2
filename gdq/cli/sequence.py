"""Commands for the sequences that a queue publishes."""

from __future__ import annotations

import click

import gdq
from gdq.cli.base import command_session, dsn_option, talk
from gdq.cli.listing import Shape, list_rows, listing_options
from gdq.cli.queue_command import queue_command

_SEQUENCE_COLUMNS = ("queue_name", "sequence_name", "last_value", "is_called", "tick", "state")


@queue_command("add-sequence")
@click.argument("sequence", metavar="SCHEMA.SEQUENCE")
@dsn_option
def add_sequence_command(queue: str, sequence: str, dsn: str | None) -> None:
    """Publish the value of a sequence with each tick of a queue."""
    with command_session(dsn) as connection:
        new = gdq.add_sequence(connection, queue, sequence)
    talk(f"added sequence {sequence} to {queue}" if new else f"already there: {sequence} in {queue}")


@queue_command("remove-sequence")
@click.argument("sequence", metavar="SCHEMA.SEQUENCE")
@dsn_option
def remove_sequence_command(queue: str, sequence: str, dsn: str | None) -> None:
    """Stop publishing a sequence."""
    with command_session(dsn) as connection:
        known = gdq.remove_sequence(connection, queue, sequence)
    talk(f"removed sequence {sequence} from {queue}" if known else f"already gone: {sequence} in {queue}")


@click.command("sequences")
@click.argument("queue", required=False)
@listing_options
@dsn_option
def sequences_command(queue: str | None, shape: Shape, dsn: str | None) -> None:
    """List published sequences with their last value."""
    list_rows(dsn, gdq.sequence_info, queue, row_type=gdq.SequenceInfo, columns=_SEQUENCE_COLUMNS, shape=shape)
