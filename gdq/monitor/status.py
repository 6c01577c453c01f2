"""The state of queues, consumers, tables, views and rules for new tables, each as its gdq.*_info() function says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumer import ConsumerInfo, consumer_info
from gdq.queue import NewTableInfo, QueueInfo, TableInfo, new_table_info, queue_info, table_info
from gdq.view.view import ViewInfo, view_info


@dataclass(frozen=True, slots=True)
class Status:
    """All queues, or one, with their consumers, tables, views and rules for new tables."""

    queues: list[QueueInfo]
    consumers: list[ConsumerInfo]
    tables: list[TableInfo]
    views: list[ViewInfo]
    new_tables: list[NewTableInfo]

    def unread(self, queue_name: str) -> tuple[int, int]:
        """Depth of a queue in events and bytes: the part that its slowest consumer has not finished."""
        rows = [consumer for consumer in self.consumers if consumer.queue_name == queue_name]
        return (
            max((consumer.unread_events or 0 for consumer in rows), default=0),
            max((consumer.unread_bytes for consumer in rows), default=0),
        )


def status(connection: Connection[Any], queue: str | None = None) -> Status:
    """Queues, consumers, tables and views; the transaction is left to the caller."""
    views = [view for view in view_info(connection) if queue in (None, view.queue_name)]
    return Status(
        queue_info(connection, queue),
        consumer_info(connection, queue),
        table_info(connection, queue),
        views,
        new_table_info(connection, queue),
    )
