"""Queues and the tables that they capture: one function for each SQL function of the same name.

All take a connection and leave the transaction to the caller; errors of the server pass through as psycopg.Error,
those with an SQLSTATE of gdq's as the classes in gdq.errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from psycopg import Connection
from psycopg.types.json import Jsonb

from gdq.call import call, rows
from gdq.errors import mapped

Mode = Literal["full", "pk"]
Granularity = Literal["row", "statement"]
Format = Literal["typed", "json"]


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One queue: its last tick, how fast events come, what its logs hold, and its settings.

    `tables_resync`: captured tables with a gap; `open_writers`: transactions that have written to the logs and go on.
    From `ticker_max_count` on: the settings, see create_queue().
    """

    queue_name: str
    queue_id: int
    last_tick: int | None
    tick_age: timedelta | None
    last_event: int | None
    events_since_tick: int | None
    events_per_second: float | None
    log_bytes: int
    segments: int
    tables: int
    tables_resync: int
    consumers: int
    open_writers: int
    paused: bool
    ticker_max_count: int
    ticker_max_lag: timedelta
    ticker_idle_period: timedelta
    rotation_period: timedelta
    rotation_bytes: int
    retention: timedelta
    unlogged: bool
    max_bytes: int | None


@dataclass(frozen=True, slots=True)
class TableInfo:
    """One captured table. `state` is "resync" while capture has a gap that some consumer has not passed.

    `events`: rows written to its logs; `log_bytes`, `segments`: of the log segments that hold rows. From `where` on:
    the options that it was added with, see add_table().
    """

    queue_name: str
    table_name: str
    mode: Mode
    format: Format
    key: list[str] | None
    columns: list[str]
    version: int
    state: Literal["ok", "resync"]
    reason: str | None
    events: int
    log_bytes: int
    segments: int
    where: str | None
    operations: list[str]
    granularity: Granularity
    always: bool
    origin: bool
    pin_search_path: bool
    allow_rls: bool


def create_queue(connection: Connection[Any], queue: str, **settings: Any) -> bool:
    """Make a queue; False when it existed, and is left as it is.

    `settings` are the named arguments of the SQL function: ticker_max_count (events), ticker_max_lag,
    ticker_idle_period, rotation_period, retention (intervals), rotation_bytes, max_bytes, unlogged (change logs
    without WAL: a crash empties them, and all consumers must resync).
    """
    return bool(call(connection, "create_queue", queue, **settings))


def set_queue(connection: Connection[Any], queue: str, **settings: Any) -> bool:
    """Change settings of a queue, named as in create_queue(); False when nothing was other. max_bytes 0: no limit."""
    return bool(call(connection, "set_queue", queue, **settings))


def pause(connection: Connection[Any], queue: str, consumer: str | None = None) -> bool:
    """Stop a queue, or one of its consumers, for the time being; False when it was paused."""
    return bool(call(connection, "pause", queue, consumer))


def resume(connection: Connection[Any], queue: str, consumer: str | None = None) -> bool:
    """Let a queue, or one of its consumers, go on; False when it was not paused."""
    return bool(call(connection, "resume", queue, consumer))


def drop_queue(connection: Connection[Any], queue: str, *, force: bool = False) -> bool:
    """Remove a queue with its logs; False when there was none. With tables or consumers only by `force`."""
    return bool(call(connection, "drop_queue", queue, force=force))


def queue_info(connection: Connection[Any], queue: str | None = None) -> list[QueueInfo]:
    """All queues, or one."""
    return rows(connection, QueueInfo, "select * from gdq.queue_info(%s)", queue, binary=True)


def add_table(
    connection: Connection[Any],
    queue: str,
    table: str,
    mode: Mode = "full",
    *,
    key: Sequence[str] | None = None,
    include: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    allow_rls: bool = False,
    where: str | None = None,
    operations: Sequence[str] | None = None,
    granularity: Granularity = "row",
    always: bool = False,
    origin: bool = False,
    pin_search_path: bool = False,
    format: Format | None = None,  # noqa: A002 (its name in SQL)
) -> None:
    """Capture a table from the end of this transaction on.

    `mode` full logs both images of a change (of `columns`, or all but `exclude`); pk the key, and old and new values
    of the columns in `include`. `key`: the identifying columns when they are not the primary key.
    `where`: a condition on the row; one that comes to match is an insert, one that no longer does a delete.
    `operations`: those to capture of insert, update, delete, truncate; None for all. `granularity` statement is for
    bulk loads: an update is then a delete and an insert. `always`: with session_replication_role = replica too.
    `origin`: log the session setting gdq.origin with each change. `pin_search_path`: for sessions that change theirs
    for every request. `format` typed gives the log a column for each column; json logs the whole row as one value,
    which no DDL makes fail; None: typed where the event triggers follow DDL, else json.
    psycopg.errors.LockNotAvailable when writers hold the table: nothing is changed, try again.
    """
    lists = {"key": key, "include": include, "columns": columns, "exclude": exclude, "operations": operations}
    options: dict[str, Any] = {name: list(value) for name, value in lists.items() if value is not None}
    options |= {"allow_rls": allow_rls, "where": where, "granularity": granularity, "always": always}
    options |= {"origin": origin, "pin_search_path": pin_search_path, "format": format}
    call(connection, "add_table", queue, table, mode=mode, **options)


def alter_table_options(connection: Connection[Any], queue: str, table: str, **options: Any) -> bool:
    """Capture a table with other options of add_table() from now on; False when it has these already.

    Options that are not named stay; None stands for the default. Nothing that is unread is lost: consumers get a ddl
    event, and rows before and after it with the options of their time; a resync too where they need what no event
    brings (columns that were not logged, another `where`, more operations, another key in mode pk).
    psycopg.errors.LockNotAvailable when writers hold the table, ObjectInUse when a view reads it.
    """
    return bool(call(connection, "alter_table_options", queue, table, Jsonb(options)))


def remove_table(connection: Connection[Any], queue: str, table: str, *, force: bool = False) -> None:
    """Stop capturing a table and drop its logs; its consumers get an event that says so.

    psycopg.errors.ObjectInUse when a consumer has not read all of them, unless by `force`: then it meets a gap.
    """
    call(connection, "remove_table", queue, table, force=force)


def table_info(connection: Connection[Any], queue: str | None = None) -> list[TableInfo]:
    """The captured tables of all queues, or of one."""
    return rows(connection, TableInfo, "select * from gdq.table_info(%s)", queue)


def check_tables(connection: Connection[Any], queue: str | None = None) -> int:
    """Switch capture off for tables that were altered and no event trigger saw it; how many. maintain() mends them."""
    return int(call(connection, "check_tables", queue))


def force_tick(connection: Connection[Any], queue: str) -> int:
    """Take a tick now, due or not; its id. WrongIsolation when the transaction has written already.

    Without event triggers it is refused after DDL that check_tables() has not looked at; take_tick() calls both.
    """
    return int(call(connection, "force_tick", queue))


def ticker(connection: Connection[Any], queue: str | None = None) -> int:
    """Take a tick that is due, of one queue or all; how many were made: call again until 0."""
    return int(call(connection, "ticker", queue))


def tick_and_pause(
    connection: Connection[Any],
    queue: str | None = None,
    *,
    longest: timedelta = timedelta(seconds=0.05),
    ahead: timedelta = timedelta(0),
) -> tuple[int, float]:
    """As ticker(), and where it made none the seconds, at most `longest`, until it should be called again; else 0.

    `ahead`: the time that a tick takes until it is committed; the tick is begun that much earlier.
    """
    with mapped(), connection.cursor(binary=True) as cursor:
        # a tick that was made is not kept from its commit by looking for the next one
        query = """select made, case when made = 0 then gdq.tick_pause(%s, %s, %s) else 0 end
                     from gdq.ticker(%s, %s) made"""
        row = cursor.execute(query, [queue, longest, ahead, queue, ahead]).fetchone()
    assert row is not None
    return row[0], row[1]


def maintain(connection: Connection[Any]) -> bool:
    """Rotate and empty logs, in a transaction of its own; True when more is due: call again."""
    return bool(call(connection, "maintain"))
