"""The commands for events that a consumer could not handle: retries and dead letters."""

from __future__ import annotations

import click

import gdq
from gdq.cli.base import dsn_option, fields, json_option, print_rows, session, talk

_ID_HELP = "Only this event, a number in the first column of gdq dead-letters. May be repeated."
_AGE_HELP = "Only events dead for longer than this, such as '7 days'."


@click.command("retries")
@click.argument("queue")
@click.argument("consumer", required=False)
@json_option
@dsn_option
def retries(queue: str, consumer: str | None, as_json: bool, dsn: str | None) -> None:
    """List the events that wait to come again."""
    with session(dsn) as connection:
        rows = gdq.retry_info(connection, queue, consumer)
    print_rows(rows, fields(gdq.RetryInfo), as_json=as_json)


@click.command("set-retry-limit")
@click.argument("queue")
@click.argument("consumer")
@click.argument("limit", type=click.IntRange(min=0))
@dsn_option
def set_retry_limit(queue: str, consumer: str, limit: int, dsn: str | None) -> None:
    """Set how often an event is retried before it becomes a dead letter; 10 unless set."""
    with session(dsn) as connection:
        gdq.set_retry_limit(connection, queue, consumer, limit)
    talk(f"events of {consumer} on {queue} are retried {limit} times")


@click.command("dead-letters")
@click.argument("queue")
@click.argument("consumer", required=False)
@json_option
@dsn_option
def dead_letters(queue: str, consumer: str | None, as_json: bool, dsn: str | None) -> None:
    """List the events that consumers gave up, oldest first."""
    with session(dsn) as connection:
        rows = gdq.dead_letters(connection, queue, consumer)
    print_rows(rows, fields(gdq.DeadLetterInfo), as_json=as_json)


@click.command("replay-dead-letters")
@click.argument("queue")
@click.argument("consumer")
@click.option("--id", "ids", type=int, multiple=True, metavar="N", help=_ID_HELP)
@click.option("--older-than", metavar="INTERVAL", help=_AGE_HELP)
@click.option("--all", "everything", is_flag=True, help="All of them.")
@dsn_option
def replay_dead_letters(
    queue: str, consumer: str, *, ids: tuple[int, ...], older_than: str | None, everything: bool, dsn: str | None
) -> None:
    """Hand dead letters to their consumer again, in its next batch."""
    _need_choice(ids, older_than, everything)
    with session(dsn) as connection:
        number = gdq.replay_dead_letters(connection, queue, consumer, ids or None, older_than=older_than)
    talk(f"replayed {number} of {consumer} on {queue}")


@click.command("purge-dead-letters")
@click.argument("queue")
@click.argument("consumer")
@click.option("--id", "ids", type=int, multiple=True, metavar="N", help=_ID_HELP)
@click.option("--older-than", metavar="INTERVAL", help=_AGE_HELP)
@click.option("--all", "everything", is_flag=True, help="All of them.")
@dsn_option
def purge_dead_letters(
    queue: str, consumer: str, *, ids: tuple[int, ...], older_than: str | None, everything: bool, dsn: str | None
) -> None:
    """Forget dead letters."""
    _need_choice(ids, older_than, everything)
    with session(dsn) as connection:
        number = gdq.purge_dead_letters(connection, queue, consumer, ids or None, older_than=older_than)
    talk(f"purged {number} of {consumer} on {queue}")


def _need_choice(ids: tuple[int, ...], older_than: str | None, everything: bool) -> None:
    if everything == bool(ids or older_than):
        raise click.UsageError("Give --id, --older-than or --all.")
