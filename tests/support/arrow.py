"""Captured tables and their next batch, for tests of typed values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from gdq import Consumer
from gdq.batch import Batch
from tests.support.server import Database


def capture(database: Database, columns: str, mode: str = "full", **options: Any) -> psycopg.Connection[Any]:
    """A table t captured by queue q, with the consumer c; the connection of its owner."""
    connection = database.connect()
    connection.execute(f"create table t ({columns})")
    connection.execute("select gdq.create_queue('q')")
    include = options.get("include")
    connection.execute("select gdq.add_table('q', 't', %s, include => %s::text[])", [mode, include])
    connection.execute("select gdq.register_consumer('q', 'c')")
    return connection


def one_batch(database: Database) -> Iterator[Batch]:
    with Consumer(database.dsn, "q", "c") as consumer:
        yield from consumer.batches(once=True)
