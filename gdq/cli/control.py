"""The commands that control a running queue: seek, resynced, set-queue, set-tables, pause, resume."""

from __future__ import annotations

from typing import Any

import click

import gdq
from gdq.cli.base import dsn_option, retry_locked, session, table_names, talk

QUEUE_SETTINGS = (
    "ticker_max_count",
    "ticker_max_lag",
    "ticker_idle_period",
    "rotation_period",
    "rotation_bytes",
    "retention",
    "max_bytes",
)

# An existing queue keeps the logs that it has.
NEW_QUEUE_SETTINGS = (*QUEUE_SETTINGS, "unlogged")


def settings_of(pairs: tuple[str, ...], known: tuple[str, ...] = QUEUE_SETTINGS) -> dict[str, Any]:
    """KEY=VALUE arguments as the settings of a queue."""
    settings: dict[str, Any] = dict(pair.partition("=")[::2] for pair in pairs)
    for name, value in settings.items():
        if name not in known or not value:
            raise click.BadParameter(f"{name!r}: want KEY=VALUE with a key of {', '.join(known)}")
    return settings


@click.command("set-queue")
@click.argument("queue")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@dsn_option
def set_queue(queue: str, settings: tuple[str, ...], dsn: str | None) -> None:
    """Change settings of a queue: those of create-queue. max_bytes=0 takes the limit away.

    \b
    Example: gdq set-queue orders retention='2 days' max_bytes=20000000000
    """
    values = settings_of(settings)
    with session(dsn) as connection:
        changed = gdq.set_queue(connection, queue, **values)
    talk(f"changed queue {queue}" if changed else f"already so: queue {queue}")


@click.command()
@click.argument("queue")
@click.argument("consumer")
@click.option("--tick", type=click.IntRange(min=1), help="To this tick.")
@click.option("--time", metavar="TIMESTAMP", help="To the last tick at or before this time.")
@click.option("--now", is_flag=True, help="To a tick taken now: past all that is unread.")
@dsn_option
def seek(queue: str, consumer: str, *, tick: int | None, time: str | None, now: bool, dsn: str | None) -> None:
    """Move a consumer, forward or back. Refused where changes are gone.

    \b
    Example: gdq seek orders mirror --time '2026-05-01 12:00+00'
    """
    if (tick is not None) + (time is not None) + now != 1:
        raise click.UsageError("want one of --tick, --time and --now")
    if now:
        with session(dsn) as connection:
            gdq.check_tables(connection, queue)
    number = retry_locked(dsn, lambda connection: gdq.seek(connection, queue, consumer, tick=tick, time=time, now=now))
    talk(f"moved consumer {consumer} on {queue} to tick {number}")


@click.command()
@click.argument("queue")
@click.argument("consumer")
@click.argument("table", required=False)
@click.option("--messages", is_flag=True, help="Instead of TABLE: go on without the messages that were lost.")
@click.option("--snapshot", required=True, help="pg_current_snapshot() of the transaction that read the table.")
@dsn_option
def resynced(queue: str, consumer: str, table: str | None, *, messages: bool, snapshot: str, dsn: str | None) -> None:
    """Say that a consumer has copied a table anew, as of a snapshot: it goes on past the gap.

    Where the copy is in the same database, call gdq.resynced() in the transaction that stores it instead.

    \b
    Example: gdq resynced orders mirror public.orders --snapshot 741:744:741
    """
    if (table is None) != messages:
        raise click.UsageError("want a table, or --messages")
    with session(dsn) as connection:
        gdq.resynced(connection, queue, consumer, table, snapshot)
    talk(f"resynchronised {table or 'messages'} of {consumer} on {queue}")


@click.command("set-tables")
@click.argument("queue")
@click.argument("consumer")
@click.argument("tables", required=False, metavar="[T1,T2]")
@click.option("--all", "every", is_flag=True, help="All tables, also those that are added later.")
@dsn_option
def set_tables(queue: str, consumer: str, tables: str | None, every: bool, dsn: str | None) -> None:
    """Change which tables a consumer takes, from now on.

    \b
    Example: gdq set-tables orders mirror public.orders,public.items
    """
    if (tables is None) != every:
        raise click.UsageError("want a list of tables, or --all")
    names = table_names(tables)
    changed = retry_locked(dsn, lambda connection: gdq.set_tables(connection, queue, consumer, names))
    talk(f"changed tables of {consumer} on {queue}" if changed else f"already so: tables of {consumer} on {queue}")


@click.command()
@click.argument("queue")
@click.argument("consumer", required=False)
@dsn_option
def pause(queue: str, consumer: str | None, dsn: str | None) -> None:
    """Stop ticks and batches of a queue, or the batches of one consumer; capture goes on."""
    with session(dsn) as connection:
        new = gdq.pause(connection, queue, consumer)
    talk(f"{'paused' if new else 'already paused:'} {_named(queue, consumer)}")


@click.command()
@click.argument("queue")
@click.argument("consumer", required=False)
@dsn_option
def resume(queue: str, consumer: str | None, dsn: str | None) -> None:
    """Let a paused queue or consumer go on."""
    with session(dsn) as connection:
        paused = gdq.resume(connection, queue, consumer)
    talk(f"{'resumed' if paused else 'not paused:'} {_named(queue, consumer)}")


def _named(queue: str, consumer: str | None) -> str:
    return f"queue {queue}" if consumer is None else f"consumer {consumer} on {queue}"


commands = (set_queue, seek, resynced, set_tables, pause, resume)
