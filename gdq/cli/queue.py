"""The commands for whole queues: create, drop, list, change, pause and resume them."""

from __future__ import annotations

from typing import Any

import click

import gdq
from gdq.cli.base import command_session, dsn_option, retry_locked, talk
from gdq.cli.listing import Shape, list_rows, listing_options
from gdq.cli.queue_command import queue_command

_QUEUE_COLUMNS = (
    "queue_name", "tables", "consumers", "tick_age", "events_since_tick", "events_per_second", "log_bytes", "paused",
)  # fmt: skip

QUEUE_SETTINGS = (
    "ticker_max_count",
    "ticker_max_lag",
    "ticker_idle_period",
    "rotation_period",
    "rotation_bytes",
    "retention",
    "max_bytes",
)

# unlogged cannot be changed later: an existing queue keeps its logs.
NEW_QUEUE_SETTINGS = (*QUEUE_SETTINGS, "unlogged")


def _settings_of(pairs: tuple[str, ...], known: tuple[str, ...] = QUEUE_SETTINGS) -> dict[str, Any]:
    """The settings of a queue from KEY=VALUE arguments."""
    settings: dict[str, Any] = dict(pair.partition("=")[::2] for pair in pairs)
    for name, value in settings.items():
        if name not in known or not value:
            raise click.BadParameter(f"{name!r}: want KEY=VALUE with a key of {', '.join(known)}")
    return settings


@click.command("create-queue")
@click.argument("queue")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=f"One of {', '.join(NEW_QUEUE_SETTINGS)}.")
@dsn_option
def create_queue_command(queue: str, settings: tuple[str, ...], dsn: str | None) -> None:
    """Create a queue.

    \b
    Example: gdq create-queue orders --set ticker_max_lag='1 s' --set retention='1 day'
    """
    pairs = _settings_of(settings, NEW_QUEUE_SETTINGS)
    with command_session(dsn) as connection:
        made = gdq.create_queue(connection, queue, **pairs)
    talk(f"created queue {queue}" if made else f"already there: queue {queue}")


@queue_command("set-queue")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@dsn_option
def set_queue_command(queue: str, settings: tuple[str, ...], dsn: str | None) -> None:
    """Change settings of a queue: those of create-queue.

    max_bytes=0 takes the limit away.

    \b
    Example: gdq set-queue orders retention='2 days' max_bytes=20000000000
    """
    values = _settings_of(settings)
    with command_session(dsn) as connection:
        changed = gdq.set_queue(connection, queue, **values)
    talk(f"changed queue {queue}" if changed else f"already so: queue {queue}")


@click.command("drop-queue")
@click.argument("queue")
@click.option("--force", is_flag=True, help="Even with tables, consumers and views.")
@dsn_option
def drop_queue_command(queue: str, force: bool, dsn: str | None) -> None:
    """Drop a queue with its logs."""
    dropped = retry_locked(dsn, lambda connection: gdq.drop_queue(connection, queue, force=force))
    talk(f"dropped queue {queue}" if dropped else f"already gone: queue {queue}")


@click.command("queues")
@listing_options
@dsn_option
def queues_command(shape: Shape, dsn: str | None) -> None:
    """List queues with the age of their last tick, with --wide also with their settings."""
    list_rows(dsn, gdq.queue_info, row_type=gdq.QueueInfo, columns=_QUEUE_COLUMNS, shape=shape)


@queue_command("pause")
@click.argument("consumer", required=False)
@dsn_option
def pause_command(queue: str, consumer: str | None, dsn: str | None) -> None:
    """Pause a queue, which stops its ticks and batches, or one consumer. Capture goes on."""
    with command_session(dsn) as connection:
        new = gdq.pause(connection, queue, consumer)
    talk(f"{'paused' if new else 'already paused:'} {_named(queue, consumer)}")


@queue_command("resume")
@click.argument("consumer", required=False)
@dsn_option
def resume_command(queue: str, consumer: str | None, dsn: str | None) -> None:
    """Resume a paused queue or consumer."""
    with command_session(dsn) as connection:
        paused = gdq.resume(connection, queue, consumer)
    talk(f"{'resumed' if paused else 'not paused:'} {_named(queue, consumer)}")


def _named(queue: str, consumer: str | None) -> str:
    return f"queue {queue}" if consumer is None else f"consumer {consumer} on {queue}"
