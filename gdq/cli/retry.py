"""The commands for events that a consumer could not handle: retries and dead letters."""

from __future__ import annotations

import click

import gdq
from gdq.cli.base import CommandFunction, command_session, dsn_option, talk
from gdq.cli.listing import Shape, list_rows, listing_options
from gdq.cli.queue_command import queue_command

_RETRY_COLUMNS = ("consumer_name", "ev_id", "op", "tbl", "key", "retries", "due_at", "reason")
_DEAD_COLUMNS = ("dead_letter_id", "consumer_name", "ev_id", "op", "tbl", "key", "retries", "died_at", "reason")


def chosen_options(command: CommandFunction) -> CommandFunction:
    """The options that choose dead letters: --id, --older-than, --all."""
    command = click.option("--all", "everything", is_flag=True, help="All of them.")(command)
    age = "Only those dead for longer than this, such as '7 days'."
    command = click.option("--older-than", metavar="INTERVAL", help=age)(command)
    ids = "Only this one, a number in the first column of their list. May be repeated."
    return click.option("--id", "ids", type=int, multiple=True, metavar="N", help=ids)(command)


@queue_command("retries")
@click.argument("consumer", required=False)
@listing_options
@dsn_option
def retries_command(queue: str, consumer: str | None, shape: Shape, dsn: str | None) -> None:
    """List the events that wait for a retry."""
    list_rows(dsn, gdq.retry_info, queue, consumer, row_type=gdq.RetryInfo, columns=_RETRY_COLUMNS, shape=shape)


@queue_command("set-retry-limit")
@click.argument("consumer")
@click.argument("limit", type=click.IntRange(min=0))
@dsn_option
def set_retry_limit_command(queue: str, consumer: str, limit: int, dsn: str | None) -> None:
    """Set the number of retries after which an event becomes a dead letter (default 10)."""
    with command_session(dsn) as connection:
        gdq.set_retry_limit(connection, queue, consumer, limit)
    talk(f"events of {consumer} on {queue} are retried {limit} times")


@queue_command("dead-letters")
@click.argument("consumer", required=False)
@listing_options
@dsn_option
def dead_letters_command(queue: str, consumer: str | None, shape: Shape, dsn: str | None) -> None:
    """List the events that consumers gave up, oldest first."""
    list_rows(dsn, gdq.dead_letters, queue, consumer, row_type=gdq.DeadLetterInfo, columns=_DEAD_COLUMNS, shape=shape)


@queue_command("replay-dead-letters")
@click.argument("consumer")
@chosen_options
@dsn_option
def replay_dead_letters_command(
    queue: str, consumer: str, *, ids: tuple[int, ...], older_than: str | None, everything: bool, dsn: str | None
) -> None:
    """Give dead letters to their consumer again, in its next batch."""
    need_choice(ids, older_than, everything)
    with command_session(dsn) as connection:
        number = gdq.replay_dead_letters(connection, queue, consumer, ids or None, older_than=older_than)
    talk(f"replayed {number} of {consumer} on {queue}")


@queue_command("purge-dead-letters")
@click.argument("consumer")
@chosen_options
@dsn_option
def purge_dead_letters_command(
    queue: str, consumer: str, *, ids: tuple[int, ...], older_than: str | None, everything: bool, dsn: str | None
) -> None:
    """Delete dead letters."""
    need_choice(ids, older_than, everything)
    with command_session(dsn) as connection:
        number = gdq.purge_dead_letters(connection, queue, consumer, ids or None, older_than=older_than)
    talk(f"purged {number} of {consumer} on {queue}")


def need_choice(ids: tuple[int, ...], older_than: str | None, everything: bool) -> None:
    """A usage error unless dead letters are chosen one way: all of them, or some."""
    if everything == bool(ids or older_than):
        raise click.UsageError("Give --id, --older-than or --all.")
