"""The command that shows queues, consumers, tables and views at a glance: status."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import click
from psycopg import Connection
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from gdq.cli.base import Seconds, StopSignals, command_session, dsn_option
from gdq.cli.listing import add_row, cell, grid, json_record, json_value
from gdq.json_text import json_text
from gdq.monitor.status import Status
from gdq.monitor.status import status as read
from gdq.ticker import reconnecting
from gdq.units import size

_TABLES_SHOWN = 10


@click.command()
@click.argument("queue", required=False)
@click.option("--watch", is_flag=True, help="Show the status again and again until Ctrl-C.")
@click.option(
    "--interval",
    type=Seconds(0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="With --watch: time between two looks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object with queues, consumers, tables and views.")
@dsn_option
def status_command(queue: str | None, watch: bool, interval: float, as_json: bool, dsn: str | None) -> None:
    """Show depth, rate and lag of queues, and the age of views.

    Of the tables those in resync and those with the largest logs.
    """
    if watch:
        _watch(queue, interval, as_json, dsn)
        return
    with command_session(dsn) as connection:
        found = read(connection, queue)
    _print(found, as_json)


def _watch(queue: str | None, interval: float, as_json: bool, dsn: str | None) -> None:
    """Read and show until a signal comes; reconnect if the connection is lost."""
    stop = StopSignals()
    shown = Live(auto_refresh=False, screen=False) if sys.stdout.isatty() and not as_json else None

    def work(connection: Connection[Any]) -> None:
        while not stop():
            found = read(connection, queue)
            if shown is None:
                _print(found, as_json)
                sys.stdout.flush()
            else:
                shown.update(_tables(found), refresh=True)
            stop.sleep(interval)

    with shown or nullcontext():
        reconnecting(lambda: stop.connect(dsn, "gdq status"), work, stop.sleep)


def _print(found: Status, as_json: bool) -> None:
    if as_json:
        records = {part.name: [json_record(row) for row in getattr(found, part.name)] for part in fields(found)}
        click.echo(json_text(records, json_value))
        return
    # a pipe has no width: nothing may be cut off
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(_tables(found))


def _tables(found: Status) -> Group:
    queues = _table("queue", "depth", "bytes", "events/s", "tick", "log", "segments", "tables", "resync", "writers")
    for queue in found.queues:
        events, unread = found.unread(queue.queue_name)
        sizes = (f"{events:,}", size(unread), *_cells(queue, "events_per_second", "tick_age", "log_bytes", "segments"))
        add_row(queues, [queue.queue_name, *sizes, *_cells(queue, "tables", "tables_resync", "open_writers")])
    consumers = _table(
        "queue", "consumer", "lag", "events", "bytes", "batch open", "retries", "dead", "resync", "last seen"
    )
    for consumer in found.consumers:
        names = ("queue_name", "consumer_name", "lag", "unread_events", "unread_bytes", "batch_age", "retries")
        add_row(consumers, _cells(consumer, *names, "dead_letters", "tables_resync", "last_seen"))
    tables = _table("queue", "table", "mode", "log", "segments", "state", "reason")
    shown = sorted(found.tables, key=lambda table: (table.state == "ok", -table.log_bytes))
    wanting = sum(table.state != "ok" for table in shown)
    for table in shown[: max(wanting, _TABLES_SHOWN)]:
        names = ("queue_name", "table_name", "mode", "log_bytes", "segments", "state", "reason")
        add_row(tables, _cells(table, *names))
    views = _table("queue", "view", "group", "age", "last action", "rows changed", "error")
    for view in found.views:
        wrong = f"differs from its query: {view.diverged}" if view.diverged else view.error or ""
        done = _cells(view, "queue_name", "view_name", "group_name", "age", "last_action", "rows_changed")
        add_row(views, [*done, wrong])
    return Group(*(part for part in (queues, consumers, tables, views) if part.row_count or part is queues))


def _cells(row: Any, *names: str) -> list[str]:
    return [cell(name, getattr(row, name)) for name in names]


def _table(*columns: str) -> Table:
    numbers = {"depth", "bytes", "events/s", "tick", "log", "segments", "tables", "lag", "events", "batch open", "age"}
    numbers |= {"resync", "writers", "retries", "dead", "rows changed"}
    return grid(*((column, column in numbers) for column in columns))
