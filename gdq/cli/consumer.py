"""The commands for consumers and their members: register, list and move them."""

from __future__ import annotations

from typing import Any

import click
from psycopg import Connection

import gdq
from gdq.cli import base
from gdq.cli.listing import Shape, list_rows, listing_options
from gdq.cli.queue_command import queue_command

_CONSUMER_COLUMNS = (
    "queue_name", "consumer_name", "lag", "unread_events", "last_seen", "retries", "dead_letters", "paused", "reason",
)  # fmt: skip
_MEMBER_COLUMNS = ("queue_name", "consumer_name", "member_name", "batch_id", "held_for")


@queue_command("register-consumer")
@click.argument("consumer")
@click.option("--at", default="now", metavar="TICK|now", show_default=True, help="Get changes after this tick.")
@click.option("--tables", metavar="T1,T2", help="Only these captured tables, and no messages.")
@click.option("--messages", is_flag=True, help="With --tables: also messages.")
@click.option("--member", metavar="M", help="Register this member too: members share the consumer's batches.")
@click.option("--skip-origin", metavar="O1,O2", help="No changes of these origins.")
@base.dsn_option
def register_consumer_command(
    queue: str, consumer: str, *, at: str, messages: bool, member: str | None, dsn: str | None, **lists: str | None
) -> None:
    """Register a consumer, which gets every change from then on, or a further member of it."""
    if at != "now" and not at.isdecimal():
        raise click.BadParameter(f"{at!r}: give the number of a tick, or now", param_hint="--at")
    tick = None if at == "now" else int(at)
    with base.command_session(dsn) as connection:
        if tick is None:
            _look_at_tables(connection, queue)
        tables, skipped = base.split_table_names(lists["tables"]), base.split_names(lists["skip_origin"])
        new = gdq.register_consumer(connection, queue, consumer, at_tick=tick, tables=tables, skip_origin=skipped)
        if new and messages:
            gdq.take_messages(connection, queue, consumer)
        if member is not None:
            new = gdq.register_member(connection, queue, consumer, member)
            consumer = f"{consumer}/{member}"
    base.talk(f"registered consumer {consumer} on {queue}" if new else f"already registered: {consumer} on {queue}")


def register_from_now(
    connection: Connection[Any], queue: str, consumer: str, member: str | None, *, copy: bool = False
) -> None:
    """Register a consumer, and a member of it if one is named, unless both are there; say which is new.

    `copy`: a new consumer must copy its tables first.
    """
    _look_at_tables(connection, queue)
    with connection.transaction():
        new = gdq.register_consumer(connection, queue, consumer)
        if new and copy:
            gdq.require_copy(connection, queue, consumer)
    if new:
        base.talk(f"registered consumer {consumer} on {queue}")
    if member is not None and gdq.register_member(connection, queue, consumer, member):
        base.talk(f"registered consumer {consumer}/{member} on {queue}")


def _look_at_tables(connection: Connection[Any], queue: str) -> None:
    """See DDL that nothing has seen yet: the server refuses a tick after it."""
    with connection.transaction():
        gdq.check_tables(connection, queue)


@queue_command("unregister-consumer")
@click.argument("consumer")
@click.option("--member", metavar="M", help="Only this member; others take over its open batch.")
@base.dsn_option
def unregister_consumer_command(queue: str, consumer: str, member: str | None, dsn: str | None) -> None:
    """Delete a consumer with its position, retries and dead letters, or one member of it."""
    with base.command_session(dsn) as connection:
        if member is None:
            known = gdq.unregister_consumer(connection, queue, consumer)
        else:
            known = gdq.unregister_member(connection, queue, consumer, member)
            consumer = f"{consumer}/{member}"
    base.talk(f"unregistered consumer {consumer} from {queue}" if known else f"already gone: {consumer} on {queue}")


@click.command("consumers")
@click.argument("queue", required=False)
@listing_options
@base.dsn_option
def consumers_command(queue: str | None, shape: Shape, dsn: str | None) -> None:
    """List consumers with their lag in time and events, with --wide also with their tables and options."""
    list_rows(dsn, gdq.consumer_info, queue, row_type=gdq.ConsumerInfo, columns=_CONSUMER_COLUMNS, shape=shape)


@click.command("members")
@click.argument("queue", required=False)
@click.argument("consumer", required=False)
@listing_options
@base.dsn_option
def members_command(queue: str | None, consumer: str | None, shape: Shape, dsn: str | None) -> None:
    """List members of consumers with their open batches."""
    list_rows(dsn, gdq.member_info, queue, consumer, row_type=gdq.MemberInfo, columns=_MEMBER_COLUMNS, shape=shape)


@queue_command("seek")
@click.argument("consumer")
@click.option("--tick", type=click.IntRange(min=1), help="To this tick.")
@click.option("--time", metavar="TIMESTAMP", help="To the last tick at or before this time.")
@click.option("--now", is_flag=True, help="To a tick taken now, past all unread changes.")
@base.dsn_option
def seek_command(queue: str, consumer: str, *, tick: int | None, time: str | None, now: bool, dsn: str | None) -> None:
    """Move a consumer forward or back; refused if changes after the new position are gone.

    \b
    Example: gdq seek orders mirror --time '2026-05-01 12:00+00'
    """
    if (tick is not None) + (time is not None) + now != 1:
        raise click.UsageError("give one of --tick, --time and --now")
    if now:
        with base.command_session(dsn) as connection:
            gdq.check_tables(connection, queue)
    number = base.retry_locked(
        dsn, lambda connection: gdq.seek(connection, queue, consumer, tick=tick, time=time, now=now)
    )
    base.talk(f"moved consumer {consumer} on {queue} to tick {number}")


@queue_command("set-tables", unless="every")
@click.argument("consumer")
@click.argument("tables", required=False, metavar="[T1,T2]")
@click.option("--all", "every", is_flag=True, help="All tables, also those that are added later.")
@base.dsn_option
def set_tables_command(queue: str, consumer: str, tables: str | None, every: bool, dsn: str | None) -> None:
    """Change the tables that a consumer takes from now on.

    \b
    Example: gdq set-tables orders mirror public.orders,public.items
    """
    if (tables is None) != every:
        raise click.UsageError("give a list of tables, or --all")
    names = base.split_table_names(tables)
    changed = base.retry_locked(dsn, lambda connection: gdq.set_tables(connection, queue, consumer, names))
    base.talk(f"changed tables of {consumer} on {queue}" if changed else f"already so: tables of {consumer} on {queue}")


@queue_command("resynced", unless="messages")
@click.argument("consumer")
@click.argument("table", required=False)
@click.option("--messages", is_flag=True, help="Instead of TABLE: go on without the lost messages.")
@click.option("--snapshot", required=True, help="pg_current_snapshot() of the transaction that read the table.")
@base.dsn_option
def resynced_command(
    queue: str, consumer: str, table: str | None, *, messages: bool, snapshot: str, dsn: str | None
) -> None:
    """Record that a consumer has copied a table again, as of a snapshot: it goes on after the gap.

    If the copy is in the same database, call gdq.resynced() instead, in the transaction that stores the copy.

    \b
    Example: gdq resynced orders mirror public.orders --snapshot 741:744:741
    """
    if (table is None) != messages:
        raise click.UsageError("give a table, or --messages")
    with base.command_session(dsn) as connection:
        gdq.resynced(connection, queue, consumer, table, snapshot)
    base.talk(f"resynchronised {table or 'messages'} of {consumer} on {queue}")
