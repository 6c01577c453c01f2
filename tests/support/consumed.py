"""A queue of one table, and what a consumer of it has done."""

from __future__ import annotations

from typing import Any

from gdq import Consumer
from tests.support.server import Database


def insert(database: Database, first: int, last: int) -> None:
    with database.connect() as connection:
        connection.execute("insert into orders select i, 'n' || i from generate_series(%s::int, %s) i", [first, last])


def consumed(database: Database) -> list[tuple[str, Any]]:
    """What is left for the consumer: op and new image of every event; all of it is finished."""
    with Consumer(database.dsn, "q", "c") as consumer:
        return [(event.op, event.new) for batch in consumer.batches(once=True) for event in batch.events()]


def seen(database: Database) -> int:
    with database.connect() as connection:
        return connection.execute("select from seen").rowcount
