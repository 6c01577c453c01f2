"""The commands about retries, dead letters and members."""

from __future__ import annotations

import click

from gdq.cli.base import dsn_option, fields, json_option, print_rows, session, talk

_ID_HELP = "Only these: numbers in the first column of gdq dead-letters. May be repeated."
_AGE_HELP = "Only those that have been dead for so long, such as '7 days'."


@click.command("retries")
@click.argument("queue")
@click.argument("consumer", required=False)
@json_option
@dsn_option
def retries(queue: str, consumer: str | None, as_json: bool, dsn: str | None) -> None:
    """List the events that wait to come again."""
    from gdq import retry  # noqa: PLC0415

    with session(dsn) as connection:
        rows = retry.retry_info(connection, queue, consumer)
    print_rows(rows, fields(retry.RetryInfo), as_json=as_json)


@click.command("set-retry-limit")
@click.argument("queue")
@click.argument("consumer")
@click.argument("limit", type=click.IntRange(min=0))
@dsn_option
def set_retry_limit(queue: str, consumer: str, limit: int, dsn: str | None) -> None:
    """Set how often an event is retried before it becomes a dead letter; 10 unless set."""
    from gdq import retry  # noqa: PLC0415

    with session(dsn) as connection:
        retry.set_retry_limit(connection, queue, consumer, limit)
    talk(f"events of {consumer} on {queue} are retried {limit} times")


@click.command("dead-letters")
@click.argument("queue")
@click.argument("consumer", required=False)
@json_option
@dsn_option
def dead_letters(queue: str, consumer: str | None, as_json: bool, dsn: str | None) -> None:
    """List the events that consumers gave up, oldest first."""
    from gdq import retry  # noqa: PLC0415

    with session(dsn) as connection:
        rows = retry.dead_letters(connection, queue, consumer)
    print_rows(rows, fields(retry.DeadLetterInfo), as_json=as_json)


@click.command("replay-dead-letters")
@click.argument("queue")
@click.argument("consumer")
@click.option("--id", "ids", type=int, multiple=True, metavar="N", help=_ID_HELP)
@click.option("--older-than", metavar="INTERVAL", help=_AGE_HELP)
@click.option("--all", "everything", is_flag=True, help="All of them.")
@dsn_option
def replay(
    queue: str, consumer: str, *, ids: tuple[int, ...], older_than: str | None, everything: bool, dsn: str | None
) -> None:
    """Hand dead letters to their consumer again, in its next batch."""
    from gdq import retry  # noqa: PLC0415

    _need_choice(ids, older_than, everything)
    with session(dsn) as connection:
        number = retry.replay_dead_letters(connection, queue, consumer, ids or None, older_than=older_than)
    talk(f"replayed {number} of {consumer} on {queue}")


@click.command("purge-dead-letters")
@click.argument("queue")
@click.argument("consumer")
@click.option("--id", "ids", type=int, multiple=True, metavar="N", help=_ID_HELP)
@click.option("--older-than", metavar="INTERVAL", help=_AGE_HELP)
@click.option("--all", "everything", is_flag=True, help="All of them.")
@dsn_option
def purge(
    queue: str, consumer: str, *, ids: tuple[int, ...], older_than: str | None, everything: bool, dsn: str | None
) -> None:
    """Forget dead letters."""
    from gdq import retry  # noqa: PLC0415

    _need_choice(ids, older_than, everything)
    with session(dsn) as connection:
        number = retry.purge_dead_letters(connection, queue, consumer, ids or None, older_than=older_than)
    talk(f"purged {number} of {consumer} on {queue}")


@click.command("members")
@click.argument("queue", required=False)
@click.argument("consumer", required=False)
@json_option
@dsn_option
def members(queue: str | None, consumer: str | None, as_json: bool, dsn: str | None) -> None:
    """List members of consumers with the batches that they hold."""
    from gdq import member  # noqa: PLC0415

    with session(dsn) as connection:
        rows = member.member_info(connection, queue, consumer)
    print_rows(rows, fields(member.MemberInfo), as_json=as_json)


def _need_choice(ids: tuple[int, ...], older_than: str | None, everything: bool) -> None:
    if everything == bool(ids or older_than):
        raise click.UsageError("say which: --id or --older-than, or --all")


commands = (retries, set_retry_limit, dead_letters, replay, purge, members)
