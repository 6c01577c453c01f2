"""The database that tests of consumers share."""

from __future__ import annotations

import pytest

from tests.support.server import Database


@pytest.fixture
def shop(db: Database) -> Database:
    """A queue q that captures orders, with the consumer c and a table of what was consumed."""
    with db.connect() as connection:
        connection.execute(
            "create table orders (id int primary key, note text); create table seen (ev_id bigint, op text)"
        )
        connection.execute("select gdq.create_queue('q')")
        connection.execute("select gdq.add_table('q', 'orders')")
        connection.execute("select gdq.register_consumer('q', 'c')")
    return db
