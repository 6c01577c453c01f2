"""The command that shows queues, consumers, tables and views at a glance: status."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import click
from psycopg import Connection
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gdq.cli.base import Seconds, StopSignals, command_session, dsn_option, json_value
from gdq.cli.terminal import printable
from gdq.json_text import json_text
from gdq.monitor.status import Status
from gdq.monitor.status import status as read
from gdq.ticker import reconnecting

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
        click.echo(json_text(dataclasses.asdict(found), json_value))
        return
    # a pipe has no width: nothing may be cut off
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(_tables(found))


def _tables(found: Status) -> Group:
    queues = _table("queue", "depth", "bytes", "events/s", "tick", "log", "segments", "tables", "resync", "writers")
    for queue in found.queues:
        events, unread = found.unread(queue.queue_name)
        rate = "" if queue.events_per_second is None else f"{queue.events_per_second:,.1f}"
        _add_row(
            queues,
            queue.queue_name,
            f"{events:,}",
            _size(unread),
            rate,
            _age(queue.tick_age),
            _size(queue.log_bytes),
            *map(str, (queue.segments, queue.tables, queue.tables_resync, queue.open_writers)),
        )
    consumers = _table(
        "queue", "consumer", "lag", "events", "bytes", "batch open", "retries", "dead", "resync", "last seen"
    )
    for consumer in found.consumers:
        _add_row(
            consumers,
            consumer.queue_name,
            consumer.consumer_name,
            _age(consumer.lag),
            "" if consumer.unread_events is None else f"{consumer.unread_events:,}",
            _size(consumer.unread_bytes),
            _age(consumer.batch_age),
            *map(str, (consumer.retries, consumer.dead_letters, consumer.tables_resync)),
            "" if consumer.last_seen is None else f"{consumer.last_seen:%Y-%m-%d %H:%M:%S}",
        )
    tables = _table("queue", "table", "mode", "log", "segments", "state", "reason")
    shown = sorted(found.tables, key=lambda table: (table.state == "ok", -table.log_bytes))
    wanting = sum(table.state != "ok" for table in shown)
    for table in shown[: max(wanting, _TABLES_SHOWN)]:
        sizes = (_size(table.log_bytes), str(table.segments))
        _add_row(tables, table.queue_name, table.table_name, table.mode, *sizes, table.state, table.reason or "")
    views = _table("queue", "view", "group", "age", "last action", "rows changed", "error")
    for view in found.views:
        rows = "" if view.rows_changed is None else f"{view.rows_changed:,}"
        wrong = f"differs from its query: {view.diverged}" if view.diverged else view.error or ""
        done = (_age(view.age), view.last_action or "", rows, wrong)
        _add_row(views, view.queue_name, view.view_name, view.group_name or "", *done)
    return Group(*(part for part in (queues, consumers, tables, views) if part.row_count or part is queues))


def _add_row(grid: Table, *cells: str) -> None:
    grid.add_row(*(Text(printable(cell)) for cell in cells))


def _table(*columns: str) -> Table:
    grid = Table(box=None, pad_edge=False, header_style="bold")
    numbers = {"depth", "bytes", "events/s", "tick", "log", "segments", "tables", "lag", "events", "batch open", "age"}
    for column in columns:
        right = column in numbers | {"resync", "writers", "retries", "dead", "rows changed"}
        grid.add_column(column, justify="right" if right else "left", no_wrap=column not in {"reason", "error"})
    return grid


def _size(count: int) -> str:
    """Bytes with a unit, such as 1.2 MB."""
    number = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TB"


def _age(span: timedelta | None) -> str:
    """A span of time with units."""
    if span is None:
        return ""
    seconds = span.total_seconds()
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest} s"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"
