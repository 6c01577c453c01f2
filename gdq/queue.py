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

from gdq.call import call, rows, typed
from gdq.shown import Shown, ShownRows
from gdq.steps import Statement, execute

CaptureMode = Literal["full", "pk"]
CaptureGranularity = Literal["row", "statement"]
CaptureUnchanged = Literal["both", "once", "omit"]
CaptureFormat = Literal["typed", "json"]


@dataclass(frozen=True, slots=True, repr=False)
class QueueInfo(Shown):
    """One queue: its last tick, rate of events, size of logs, and settings.

    `tables_resync`: captured tables with a gap; `open_writers`: open transactions that have written to the logs.
    From `ticker_max_count` on: the settings, see create_queue(). `tick_lag`: time between two ticks while changes come:
    ticker_max_lag, or longer if all consumers have a longer pace, see set_pace().
    """

    _shown = "queue_name last_tick tick_age events_since_tick log_bytes tables tables_resync consumers paused"

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
    tick_lag: timedelta


@dataclass(frozen=True, slots=True, repr=False)
class TableInfo(Shown):
    """One captured table. `state` is "resync" while capture has a gap that some consumer has not passed.

    `events`: rows written to its logs; `log_bytes`, `segments`: of the log segments that hold rows. From `where` on:
    its options, see add_table().
    """

    _shown = "queue_name table_name mode state reason events log_bytes"

    queue_name: str
    table_name: str
    mode: CaptureMode
    format: CaptureFormat
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
    granularity: CaptureGranularity
    always: bool
    origin: bool
    pin_search_path: bool
    allow_rls: bool
    unchanged: CaptureUnchanged


@dataclass(frozen=True, slots=True, repr=False)
class NewTableInfo(Shown):
    """One rule for tables that do not exist yet: a pattern, its exceptions, and options of add_table().

    `missing`: tables that match and are not captured, though they were made later; `reason`: why, for the first.
    """

    _shown = "queue_name pattern excepted options missing reason"

    queue_name: str
    pattern: str
    excepted: list[str]
    options: dict[str, Any]
    missing: list[str]
    reason: str | None


def create_queue(connection: Connection[Any], queue: str, **settings: Any) -> bool:
    """Create a queue; False if it existed, and then unchanged.

    `settings` are the named arguments of the SQL function: ticker_max_count (events), ticker_max_lag,
    ticker_idle_period, rotation_period, retention (intervals), rotation_bytes, max_bytes, unlogged (change logs
    without WAL: a crash empties them, and all consumers must resync).
    """
    return bool(call(connection, "create_queue", queue, **settings))


def set_queue(connection: Connection[Any], queue: str, **settings: Any) -> bool:
    """Change settings of a queue, named as in create_queue(); False if nothing changed. max_bytes 0: no limit."""
    return bool(call(connection, "set_queue", queue, **settings))


def pause(connection: Connection[Any], queue: str, consumer: str | None = None) -> bool:
    """Pause a queue or one of its consumers; False if it was paused."""
    return bool(call(connection, "pause", queue, consumer))


def resume(connection: Connection[Any], queue: str, consumer: str | None = None) -> bool:
    """Resume a paused queue or consumer; False if it was not paused."""
    return bool(call(connection, "resume", queue, consumer))


def drop_queue(connection: Connection[Any], queue: str, *, force: bool = False) -> bool:
    """Drop a queue with its logs; False if there was none. `force`: also with tables, consumers and views."""
    return bool(call(connection, "drop_queue", queue, force=force))


def queue_info(connection: Connection[Any], queue: str | None = None) -> list[QueueInfo]:
    """All queues, or one."""
    return ShownRows(execute(connection, queue_statement(queue)))


def queue_statement(queue: str | None = None) -> Statement:
    """The statement of queue_info()."""
    return typed(QueueInfo, "select * from gdq.queue_info(%s)", queue)


def add_table(
    connection: Connection[Any],
    queue: str,
    table: str,
    mode: CaptureMode = "full",
    *,
    key: Sequence[str] | None = None,
    include: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    allow_rls: bool = False,
    where: str | None = None,
    operations: Sequence[str] | None = None,
    granularity: CaptureGranularity = "row",
    always: bool = False,
    origin: bool = False,
    pin_search_path: bool = False,
    format: CaptureFormat | None = None,  # noqa: A002 (its name in SQL)
    unchanged: CaptureUnchanged = "both",
) -> None:
    """Capture a table from the end of this transaction on.

    `mode`: full logs both images of a change (of `columns`, or all but `exclude`); pk logs the key, and old and new
    values of the columns in `include`. `key`: the identifying columns, if not the primary key.
    `where`: a condition on the row; an update after which the row matches for the first time is an insert, one after
    which it no longer matches a delete. `operations`: insert, update, delete, truncate, or some of them; None for all.
    `granularity`: statement is for bulk loads, an update is then a delete and an insert. `always`: capture also with
    session_replication_role = replica. `origin`: log the session setting gdq.origin with each change.
    `pin_search_path`: for sessions that change their search_path for every request. `format`: typed gives the log one
    column per column; json logs the whole row as one value, which no DDL makes fail; None takes typed if the event
    triggers follow DDL, else json. `unchanged`: once logs a large value that an update leaves as it was in the new
    image only; readers see it in both. omit does not log it: Event.unchanged names its column.
    psycopg.errors.LockNotAvailable while writers hold the table: try again.
    """
    lists = {"key": key, "include": include, "columns": columns, "exclude": exclude, "operations": operations}
    options: dict[str, Any] = {name: list(value) for name, value in lists.items() if value is not None}
    options |= {"allow_rls": allow_rls, "where": where, "granularity": granularity, "always": always}
    options |= {"origin": origin, "pin_search_path": pin_search_path, "format": format, "unchanged": unchanged}
    call(connection, "add_table", queue, table, mode=mode, **options)


def add_new_tables(
    connection: Connection[Any], queue: str, patterns: Sequence[str], *, excepted: Sequence[str] = (), **options: Any
) -> bool:
    """Capture tables that match a pattern when they are made; False if the queue has these rules already.

    `patterns`, `excepted`: SCHEMA.TABLE, where * is any text and ? any character. `options`: of add_table(). Tables
    that exist are not captured; a pattern that is a rule of the queue gets these exceptions and options from now on.
    With the event triggers, rows that the transaction of CREATE TABLE writes are captured too; else a ticker captures
    the table, and consumers get a resync for it. They also get one for CREATE TABLE AS.
    """
    return bool(call(connection, "add_new_tables", queue, list(patterns), list(excepted), Jsonb(options)))


def remove_new_tables(connection: Connection[Any], queue: str, patterns: Sequence[str] | None = None) -> int:
    """Remove rules of add_new_tables(), all if `patterns` is None; returns their number. Captured tables stay."""
    return int(call(connection, "remove_new_tables", queue, None if patterns is None else list(patterns)))


def new_table_info(connection: Connection[Any], queue: str | None = None) -> list[NewTableInfo]:
    """The rules for tables that do not exist yet, of all queues or of one."""
    return rows(connection, NewTableInfo, "select * from gdq.new_table_info(%s)", queue)


def alter_table_options(connection: Connection[Any], queue: str, table: str, **options: Any) -> bool:
    """Capture a table with other options of add_table() from now on; False if it has these already.

    Options that are not named stay; None sets the default. No unread change is lost: consumers get a ddl event, and
    rows before and after it with the options of their time. They also get a resync if they need values that no event
    has (columns that were not logged, another `where`, more operations, another key in mode pk).
    psycopg.errors.LockNotAvailable while writers hold the table, ObjectInUse if a view reads it.
    """
    return bool(call(connection, "alter_table_options", queue, table, Jsonb(options)))


def remove_table(connection: Connection[Any], queue: str, table: str, *, force: bool = False) -> None:
    """Stop capturing a table and drop its logs; its consumers get an event about it.

    psycopg.errors.ObjectInUse if a consumer has not read all logs. `force`: drop them anyway; the consumer gets a gap.
    """
    call(connection, "remove_table", queue, table, force=force)


def table_info(connection: Connection[Any], queue: str | None = None) -> list[TableInfo]:
    """The captured tables of all queues, or of one."""
    return rows(connection, TableInfo, "select * from gdq.table_info(%s)", queue)


def check_tables(connection: Connection[Any], queue: str | None = None) -> int:
    """Switch capture off for tables altered without an event trigger; returns their number. maintain() repairs them."""
    return int(call(connection, "check_tables", queue))
