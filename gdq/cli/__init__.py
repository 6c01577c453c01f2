"""The command `gdq`: each command parses, calls one function of the library, and prints."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import click

from gdq import __version__
from gdq.cli.base import (
    Group,
    dsn_option,
    json_option,
    names,
    print_rows,
    retry_locked,
    session,
    sql_option,
    table_names,
    talk,
)
from gdq.cli.compare import compare
from gdq.cli.control import NEW_QUEUE_SETTINGS, settings_of
from gdq.cli.control import commands as control_commands
from gdq.cli.ddl import apply_ddl
from gdq.cli.era import commands as era_commands
from gdq.cli.group import commands as group_commands
from gdq.cli.message import commands as message_commands
from gdq.cli.monitor import commands as monitor_commands
from gdq.cli.refresh import commands as refresh_commands
from gdq.cli.retry import commands as retry_commands
from gdq.cli.run import consume, peek, ticker
from gdq.cli.sequence import commands as sequence_commands
from gdq.cli.slot import commands as slot_commands
from gdq.cli.table_options import alter_table, capture_options
from gdq.cli.view import commands as view_commands

if TYPE_CHECKING:
    from gdq.queue import Mode

# The lists show what was chosen; how things are going is in `gdq status`.
_QUEUE_COLUMNS = (
    "queue_name", "tables", "consumers", "last_tick", "tick_age", "events_since_tick",
    "ticker_max_count", "ticker_max_lag", "ticker_idle_period", "rotation_period", "rotation_bytes", "retention",
    "unlogged", "max_bytes", "paused",
)  # fmt: skip
_TABLE_COLUMNS = (
    "queue_name", "table_name", "mode", "format", "key", "columns", "version", "state", "reason", "log_bytes",
    "where", "operations", "granularity", "always", "origin", "pin_search_path", "allow_rls",
)  # fmt: skip
_CONSUMER_COLUMNS = (
    "queue_name", "consumer_name", "lag", "unread_events", "last_seen", "last_tick", "tables", "skip_origin",
    "owner_role", "paused", "resync", "reason",
)  # fmt: skip


class _Logfmt(logging.Formatter):
    """One line of key=value pairs, for a log collector."""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'time={self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z")} level={record.levelname.lower()} msg="{message}"'


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="gdq")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(verbose: bool, quiet: bool, debug: bool) -> None:  # noqa: ARG001 (read from the context)
    """A queue of row changes inside PostgreSQL, and the consumers that read it.

    Exit codes: 0 done or already so, 1 failed, 2 wrong usage, 3 checked and found wanting.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s") if sys.stderr.isatty() else _Logfmt())
    level = logging.DEBUG if verbose else logging.ERROR if quiet else logging.INFO
    logger = logging.getLogger("gdq")
    logger.handlers[:] = [handler]
    logger.setLevel(level)


@main.command()
@dsn_option
@sql_option
def install(dsn: str | None, as_sql: bool) -> None:
    """Install gdq in the database, or upgrade it."""
    from gdq.installer import install  # noqa: PLC0415

    if as_sql:
        click.echo(install.script(), nl=False)
        return
    result = install.install(dsn)
    for notice in result.notices:
        talk(notice)
    talk(
        "format of captured tables: typed, as the event triggers follow DDL"
        if result.event_triggers
        else "format of captured tables: json, as no event triggers follow DDL"
    )
    talk(f"{'installed' if result.changed else 'already at'} {result.revision}")


@main.command()
@dsn_option
@sql_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def uninstall(dsn: str | None, as_sql: bool, yes: bool) -> None:
    """Remove gdq with all queues and logs; the tables stay as they are, and so do slots, which are named."""
    from gdq.consumers.slot.slot import slot_info  # noqa: PLC0415
    from gdq.installer import install  # noqa: PLC0415

    if as_sql:
        click.echo(install.uninstall_script(), nl=False)
        return
    if not yes:
        click.confirm("Remove gdq with all its queues, consumers and unread changes?", abort=True, err=True)
    talk(
        "uninstalled"
        if retry_locked(dsn, install.uninstall, any_version=True)
        else "already gone: gdq is not installed here"
    )
    with session(dsn, autocommit=True) as connection:
        slots = [one.slot_name for one in slot_info(connection)]
    if slots:
        talk(f"slots are still there and keep the write-ahead log: drop them with gdq drop-slot: {', '.join(slots)}")


@main.command("create-event-triggers")
@dsn_option
def create_event_triggers(dsn: str | None) -> None:
    """Make the event triggers that keep capture in step with DDL.

    Most servers let only a superuser make them: connect as one, after `gdq install`.
    """
    from gdq.installer import install  # noqa: PLC0415

    with session(dsn) as connection:
        made = install.create_event_triggers(connection)
    talk("created event triggers" if made else "already on: the event triggers of gdq")


@main.command("create-queue")
@click.argument("queue")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=f"One of {', '.join(NEW_QUEUE_SETTINGS)}.")
@dsn_option
def create_queue(queue: str, settings: tuple[str, ...], dsn: str | None) -> None:
    """Create a queue.

    \b
    Example: gdq create-queue orders --set ticker_max_lag='1 s' --set retention='1 day'
    """
    from gdq import queue as queues  # noqa: PLC0415

    pairs = settings_of(settings, NEW_QUEUE_SETTINGS)
    with session(dsn) as connection:
        made = queues.create_queue(connection, queue, **pairs)
    talk(f"created queue {queue}" if made else f"already there: queue {queue}")


@main.command("drop-queue")
@click.argument("queue")
@click.option("--force", is_flag=True, help="Also with tables, consumers and views.")
@dsn_option
def drop_queue(queue: str, force: bool, dsn: str | None) -> None:
    """Drop a queue with its logs."""
    from gdq import queue as queues  # noqa: PLC0415

    dropped = retry_locked(dsn, lambda connection: queues.drop_queue(connection, queue, force=force))
    talk(f"dropped queue {queue}" if dropped else f"already gone: queue {queue}")


@main.command("queues")
@json_option
@dsn_option
def list_queues(as_json: bool, dsn: str | None) -> None:
    """List queues with their settings and the age of the last tick."""
    from gdq import queue as queues  # noqa: PLC0415

    with session(dsn) as connection:
        rows = queues.queue_info(connection)
    print_rows(rows, _QUEUE_COLUMNS, as_json=as_json)


@main.command("add-table")
@click.argument("queue")
@click.argument("table")
@click.option(
    "--mode", type=click.Choice(["full", "pk"]), default="full", show_default=True, help="Row images or keys."
)
@click.option("--key", metavar="C1,C2", help="Identifying columns, when not the primary key.")
@click.option("--include", metavar="C1,C2", help="pk: log old and new values of these too.")
@click.option("--columns", metavar="C1,C2", help="full: log only these.")
@click.option("--exclude", metavar="C1,C2", help="full: log all but these.")
@click.option("--allow-rls", is_flag=True, help="Capture a table with row level security.")
@capture_options
@dsn_option
def add_table(queue: str, table: str, mode: Mode, dsn: str | None, **options: Any) -> None:
    """Capture a table from now on.

    \b
    Example: gdq add-table orders public.orders --mode pk --include status
    """
    from gdq import queue as queues  # noqa: PLC0415

    for name in ("key", "include", "columns", "exclude", "operations"):
        options[name] = names(options[name])
    retry_locked(dsn, lambda connection: queues.add_table(connection, queue, table, mode, **options))
    talk(f"added table {table} to {queue}")


@main.command("remove-table")
@click.argument("queue")
@click.argument("table")
@click.option("--force", is_flag=True, help="Also with changes that consumers have not read: they are told.")
@dsn_option
def remove_table(queue: str, table: str, force: bool, dsn: str | None) -> None:
    """Stop capturing a table and drop its logs."""
    from gdq import queue as queues  # noqa: PLC0415

    retry_locked(dsn, lambda connection: queues.remove_table(connection, queue, table, force=force))
    talk(f"removed table {table} from {queue}")


@main.command("tables")
@click.argument("queue", required=False)
@json_option
@dsn_option
def list_tables(queue: str | None, as_json: bool, dsn: str | None) -> None:
    """List captured tables."""
    from gdq import queue as queues  # noqa: PLC0415

    with session(dsn) as connection:
        rows = queues.table_info(connection, queue)
    print_rows(rows, _TABLE_COLUMNS, as_json=as_json)


@main.command("register-consumer")
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
    from gdq import consumer as consumers  # noqa: PLC0415
    from gdq import member as members  # noqa: PLC0415
    from gdq.message import take_messages  # noqa: PLC0415
    from gdq.queue import check_tables  # noqa: PLC0415

    if at != "now" and not at.isdecimal():
        raise click.BadParameter(f"{at!r}: want the number of a tick, or now", param_hint="--at")
    tick = None if at == "now" else int(at)
    with session(dsn) as connection:
        if tick is None:
            # the tick taken now would be refused after DDL that nobody has looked at
            with connection.transaction():
                check_tables(connection, queue)
        tables, skipped = table_names(lists["tables"]), names(lists["skip_origin"])
        new = consumers.register_consumer(connection, queue, consumer, at_tick=tick, tables=tables, skip_origin=skipped)
        if new and messages:
            take_messages(connection, queue, consumer)
        if member is not None:
            new = members.register_member(connection, queue, consumer, member)
            consumer = f"{consumer}/{member}"
    talk(f"registered consumer {consumer} on {queue}" if new else f"already registered: {consumer} on {queue}")


@main.command("unregister-consumer")
@click.argument("queue")
@click.argument("consumer")
@click.option("--member", metavar="M", help="Only this member; others take up what it leaves.")
@dsn_option
def unregister_consumer(queue: str, consumer: str, member: str | None, dsn: str | None) -> None:
    """Forget a consumer with its position, retries and dead letters, or one member of it."""
    from gdq import consumer as consumers  # noqa: PLC0415
    from gdq import member as members  # noqa: PLC0415

    with session(dsn) as connection:
        if member is None:
            known = consumers.unregister_consumer(connection, queue, consumer)
        else:
            known = members.unregister_member(connection, queue, consumer, member)
            consumer = f"{consumer}/{member}"
    talk(f"unregistered consumer {consumer} from {queue}" if known else f"already gone: {consumer} on {queue}")


@main.command("consumers")
@click.argument("queue", required=False)
@json_option
@dsn_option
def list_consumers(queue: str | None, as_json: bool, dsn: str | None) -> None:
    """List consumers with their lag in time and events."""
    from gdq import consumer as consumers  # noqa: PLC0415

    with session(dsn) as connection:
        rows = consumers.consumer_info(connection, queue)
    print_rows(rows, _CONSUMER_COLUMNS, as_json=as_json)


@main.command()
@click.argument("queue")
@dsn_option
def tick(queue: str, dsn: str | None) -> None:
    """Take a tick now and print its number."""
    from gdq.ticker import take_tick  # noqa: PLC0415

    with session(dsn, autocommit=True) as connection:
        number = take_tick(connection, queue)
    click.echo(number)


for _command in (
    alter_table,
    apply_ddl,
    compare,
    ticker,
    consume,
    peek,
    *control_commands,
    *message_commands,
    *retry_commands,
    *sequence_commands,
    *view_commands,
    *group_commands,
    *refresh_commands,
    *slot_commands,
    *era_commands,
    *monitor_commands,
):
    main.add_command(_command)
