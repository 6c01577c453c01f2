"""Commands for the sequences that a queue publishes."""

from __future__ import annotations

import click

import gdq
from gdq.cli.base import command_session, dsn_option, field_names, json_option, list_rows, talk


@click.command("add-sequence")
@click.argument("queue")
@click.argument("sequence", metavar="SCHEMA.SEQUENCE")
@dsn_option
def add_sequence_command(queue: str, sequence: str, dsn: str | None) -> None:
    """Publish the value of a sequence with each tick of a queue."""
    with command_session(dsn) as connection:
        new = gdq.add_sequence(connection, queue, sequence)
    talk(f"added sequence {sequence} to {queue}" if new else f"already there: {sequence} in {queue}")


@click.command("remove-sequence")
@click.argument("queue")
@click.argument("sequence", metavar="SCHEMA.SEQUENCE")
@dsn_option
def remove_sequence_command(queue: str, sequence: str, dsn: str | None) -> None:
    """Stop publishing a sequence."""
    with command_session(dsn) as connection:
        known = gdq.remove_sequence(connection, queue, sequence)
    talk(f"removed sequence {sequence} from {queue}" if known else f"already gone: {sequence} in {queue}")


@click.command("sequences")
@click.argument("queue", required=False)
@json_option
@dsn_option
def sequences_command(queue: str | None, as_json: bool, dsn: str | None) -> None:
    """List published sequences with their last value."""
    list_rows(dsn, gdq.sequence_info, queue, columns=field_names(gdq.SequenceInfo), as_json=as_json)
