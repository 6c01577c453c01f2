"""Commands for the sequences that a queue publishes."""

from __future__ import annotations

import click

import gdq
from gdq.cli.base import dsn_option, fields, json_option, list_rows, session, talk


@click.command("add-sequence")
@click.argument("queue")
@click.argument("sequence", metavar="SCHEMA.SEQUENCE")
@dsn_option
def add_sequence(queue: str, sequence: str, dsn: str | None) -> None:
    """Publish the value of a sequence with each tick of a queue."""
    with session(dsn) as connection:
        new = gdq.add_sequence(connection, queue, sequence)
    talk(f"added sequence {sequence} to {queue}" if new else f"already there: {sequence} in {queue}")


@click.command("remove-sequence")
@click.argument("queue")
@click.argument("sequence", metavar="SCHEMA.SEQUENCE")
@dsn_option
def remove_sequence(queue: str, sequence: str, dsn: str | None) -> None:
    """Stop publishing a sequence."""
    with session(dsn) as connection:
        known = gdq.remove_sequence(connection, queue, sequence)
    talk(f"removed sequence {sequence} from {queue}" if known else f"already gone: {sequence} in {queue}")


@click.command("sequences")
@click.argument("queue", required=False)
@json_option
@dsn_option
def sequences(queue: str | None, as_json: bool, dsn: str | None) -> None:
    """List published sequences with their last value."""
    list_rows(dsn, gdq.sequence_info, queue, columns=fields(gdq.SequenceInfo), as_json=as_json)
