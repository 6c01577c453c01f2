"""Commands for what a restore or a failover asks for."""

from __future__ import annotations

import click

import gdq
from gdq.cli.base import Wanting, dsn_option, json_option, print_rows, retry_locked, session, talk
from gdq.errors import DivergedPosition, EraEnded, TruncatedPosition


@click.command()
@click.argument("queue", required=False)
@click.option("--keep", is_flag=True, help="Consumers go on where the dump has them; see docs/operations.md.")
@json_option
@dsn_option
def rebase(queue: str | None, keep: bool, as_json: bool, dsn: str | None) -> None:
    """Start a new era of queues that were restored from a dump; of all without QUEUE.

    Capture is made anew and every consumer is told to read its tables afresh.
    """
    rows = retry_locked(dsn, lambda connection: gdq.rebase(connection, queue, keep=keep))
    if rows or as_json:
        print_rows(rows, ("queue_name", "consumer_name", "table_name", "outcome"), as_json=as_json)
    else:
        talk("no consumer is concerned")


@click.command()
@click.argument("queue")
@click.argument("consumer")
@dsn_option
def position(queue: str, consumer: str, dsn: str | None) -> None:
    """Print where a consumer stands, as text to be kept outside the server."""
    with session(dsn) as connection:
        click.echo(gdq.position(connection, queue, consumer))


@click.command("check-position")
@click.argument("queue")
@click.argument("position")
@dsn_option
def check_position(queue: str, position: str, dsn: str | None) -> None:
    """Check that the server knows a position; exit code 3 when it does not."""
    with session(dsn) as connection:
        try:
            gdq.check_position(connection, queue, position)
        except (DivergedPosition, EraEnded, TruncatedPosition) as error:
            raise Wanting(str(error), error.detail, error.hint) from error
    talk("known")
