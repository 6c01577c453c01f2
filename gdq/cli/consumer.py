"""The commands for consumers and their members: registering and listing them, and moving what they read."""

from __future__ import annotations

import click

import gdq
from gdq.cli.base import dsn_option, fields, json_option, list_rows, names, retry_locked, session, table_names, talk

# The list shows what was chosen; how things are going is in `gdq status`.
_CONSUMER_COLUMNS = (
    "queue_name", "consumer_name", "lag", "unread_events", "last_seen", "last_tick", "tables", "skip_origin",
    "owner_role", "paused", "resync", "reason",
)  # fmt: skip


@click.command("register-consumer")
@click.argument("queue")
@click.argument("consumer")
@click.option("--at", default="now", metavar="TICK|now", show_default=True, help="Changes after this tick.")
@click.option("--tables", metavar="T1,T2", help="Only these captured tables, and no messages.")
@click.option("--messages", is_flag=True, help="With --tables: messages too.")
@click.option("--member", metavar="M", help="Register this member too: members share the consumer's batches.")
@click.option("--skip-origin", metavar="O1,O2", help="No changes of these origins.")
@dsn_option
def register_consumer(
    queue: str, consumer: str, *, at: str, messages: bool, member: str | None, dsn: str | None, **lists: str | None
) -> None:
    """Register a consumer, which gets every change from then on, or one more member of it."""
    if at != "now" and not at.isdecimal():
        raise click.BadParameter(f"{at!r}: want the number of a tick, or now", param_hint="--at")
    tick = None if at == "now" else int(at)
    with session(dsn) as connection:
        if tick is None:
            # the tick taken now would be refused after DDL that nobody has looked at
            with connection.transaction():
                gdq.check_tables(connection, queue)
        tables, skipped = table_names(lists["tables"]), names(lists["skip_origin"])
        new = gdq.register_consumer(connection, queue, consumer, at_tick=tick, tables=tables, skip_origin=skipped)
        if new and messages:
            gdq.take_messages(connection, queue, consumer)
        if member is not None:
            new = gdq.register_member(connection, queue, consumer, member)
            consumer = f"{consumer}/{member}"
    talk(f"registered consumer {consumer} on {queue}" if new else f"already registered: {consumer} on {queue}")


@click.command("unregister-consumer")
@click.argument("queue")
@click.argument("consumer")
@click.option("--member", metavar="M", help="Only this member; others take up what it leaves.")
@dsn_option
def unregister_consumer(queue: str, consumer: str, member: str | None, dsn: str | None) -> None:
    """Forget a consumer with its position, retries and dead letters, or one member of it."""
    with session(dsn) as connection:
        if member is None:
            known = gdq.unregister_consumer(connection, queue, consumer)
        else:
            known = gdq.unregister_member(connection, queue, consumer, member)
            consumer = f"{consumer}/{member}"
    talk(f"unregistered consumer {consumer} from {queue}" if known else f"already gone: {consumer} on {queue}")


@click.command("consumers")
@click.argument("queue", required=False)
@json_option
@dsn_option
def consumers(queue: str | None, as_json: bool, dsn: str | None) -> None:
    """List consumers with their lag in time and events."""
    list_rows(dsn, gdq.consumer_info, queue, columns=_CONSUMER_COLUMNS, as_json=as_json)


@click.command("members")
@click.argument("queue", required=False)
@click.argument("consumer", required=False)
@json_option
@dsn_option
def members(queue: str | None, consumer: str | None, as_json: bool, dsn: str | None) -> None:
    """List members of consumers with the batches that they hold."""
    list_rows(dsn, gdq.member_info, queue, consumer, columns=fields(gdq.MemberInfo), as_json=as_json)


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
