"""What is going on: depth, rate and lag of queues, as one function of SQL each says it.

All take a connection and leave the transaction to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from psycopg import Connection

from gdq.call import rows


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """One queue: how fast events come, and what its logs hold."""

    queue_name: str
    last_tick: int | None
    tick_age: timedelta | None
    events_per_second: float | None
    last_event: int | None
    log_bytes: int
    segments: int
    tables: int
    tables_resync: int
    consumers: int
    open_writers: int


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """One consumer of a queue: how far it is behind. A value is None while the consumer or its queue is just going."""

    queue_name: str
    consumer_name: str
    lag: timedelta | None
    unread_events: int | None
    unread_bytes: int
    last_seen: datetime | None
    batch_age: timedelta | None
    tables_resync: int
    retries: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One captured table: its state and the size of its logs."""

    queue_name: str
    table_name: str
    mode: str
    state: Literal["ok", "resync"]
    reason: str | None
    events: int
    log_bytes: int
    segments: int


@dataclass(frozen=True, slots=True)
class ViewStatus:
    """One view: how fresh it is, and how its last refresh went.

    `age`: since the start of the last refresh that was finished, so what the target stands for is at most as old; None
    before the first. `last_action`: full, delta, none or failed; `kind`: none, incremental, by-key or full, what it
    computed, and `delta_rows`: the netted changes that it worked on. `group_name`: the group that it is refreshed with.
    """

    queue_name: str
    view_name: str
    age: timedelta | None
    last_action: Literal["full", "delta", "none", "failed"] | None
    rows_changed: int | None
    error: str | None
    kind: str | None
    delta_rows: int | None
    group_name: str | None

    @property
    def kind_name(self) -> str:
        """The kind, unknown before the first refresh and after one that failed."""
        return self.kind or "unknown"


@dataclass(frozen=True, slots=True)
class Status:
    """All queues, or one, with their consumers, tables and views."""

    queues: list[QueueStatus]
    consumers: list[ConsumerStatus]
    tables: list[TableStatus]
    views: list[ViewStatus]

    def unread(self, queue_name: str) -> tuple[int, int]:
        """Depth of a queue in events and bytes: what its slowest consumer has not finished."""
        rows = [consumer for consumer in self.consumers if consumer.queue_name == queue_name]
        return (
            max((consumer.unread_events or 0 for consumer in rows), default=0),
            max((consumer.unread_bytes for consumer in rows), default=0),
        )


def queue_status(connection: Connection[Any], queue: str | None = None) -> list[QueueStatus]:
    """All queues, or one."""
    return rows(connection, QueueStatus, "select * from gdq.queue_status(%s)", queue)


def consumer_status(connection: Connection[Any], queue: str | None = None) -> list[ConsumerStatus]:
    """The consumers of all queues, or of one."""
    return rows(connection, ConsumerStatus, "select * from gdq.consumer_status(%s)", queue)


def table_status(connection: Connection[Any], queue: str | None = None) -> list[TableStatus]:
    """The captured tables of all queues, or of one."""
    return rows(connection, TableStatus, "select * from gdq.table_status(%s)", queue)


def view_status(connection: Connection[Any], queue: str | None = None) -> list[ViewStatus]:
    """The views of all queues, or of one."""
    return rows(connection, ViewStatus, "select * from gdq.view_status(%s)", queue)


def status(connection: Connection[Any], queue: str | None = None) -> Status:
    """Queues, consumers, tables and views."""
    tables = table_status(connection, queue)
    # their logs need not be looked at twice
    queues = [
        _with_logs(row, tables)
        for row in rows(connection, QueueStatus, "select * from gdq.queue_status(%s, false)", queue)
    ]
    return Status(queues, consumer_status(connection, queue), tables, view_status(connection, queue))


def _with_logs(row: QueueStatus, tables: list[TableStatus]) -> QueueStatus:
    """A queue whose figures are of the event log alone, with those of its tables."""
    own = [table for table in tables if table.queue_name == row.queue_name]
    return replace(
        row,
        log_bytes=row.log_bytes + sum(table.log_bytes for table in own),
        segments=row.segments + sum(table.segments for table in own),
    )
