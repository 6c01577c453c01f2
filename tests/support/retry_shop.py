"""A queue whose batches are opened, read and finished as SQL does it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from gdq import register_member
from tests.support.server import Database


class RetryShop:
    """A queue q that captures orders, with the consumer c; batches are opened, read and finished as SQL does it."""

    def __init__(self, db: Database, connection: psycopg.Connection[Any]) -> None:
        self.db = db
        self.connection = connection

    def insert(self, *keys: int) -> None:
        """One row, and one event, a key."""
        for key in keys:
            self.connection.execute("insert into orders values (%s, 'n')", [key])
        self.value("select gdq.force_tick('q')")

    def value(self, query: str, *values: Any) -> Any:
        row = self.connection.execute(query.encode(), values or None).fetchone()
        return row[0] if row else None

    def open(self) -> tuple[int, str] | None:
        return self.connection.execute("select batch_id, token::text from gdq.next_batch('q', 'c')").fetchone()

    def opened(self) -> tuple[int, str]:
        batch = self.open()
        assert batch
        return batch

    def fresh(self, batch: tuple[int, str]) -> list[tuple[int, int]]:
        """Number and key of the events of a batch that come for the first time."""
        return self.connection.execute("select ev_id, (key->>'id')::int from gdq.get_batch(%s, %s)", batch).fetchall()

    def again(self, batch: tuple[int, str]) -> list[tuple[int, int, str | None]]:
        """Key, retries and reason of the events of a batch that were put aside before."""
        query = "select (key->>'id')::int, retries, reason from gdq.get_retries(%s, %s)"
        return self.connection.execute(query.encode(), batch).fetchall()

    def put(self, batch: tuple[int, str], key: int, delay: str = "0", reason: str | None = None) -> bool:
        """Put the event of a key aside."""
        query = """select ev_id from (select ev_id, key from gdq.get_batch(%(id)s, %(token)s)
                     union all select ev_id, key from gdq.get_retries(%(id)s, %(token)s)) e
                    where (key->>'id')::int = %(key)s"""
        row = self.connection.execute(query, {"id": batch[0], "token": batch[1], "key": key}).fetchone()
        assert row
        return bool(self.value("select gdq.retry_event(%s, %s, %s, %s, %s)", *batch, row[0], delay, reason))

    def finish(self, batch: tuple[int, str]) -> bool:
        return bool(self.value("select gdq.finish_batch(%s, %s)", *batch))

    def refusal(self, query: str, *values: Any) -> str | None:
        """The SQLSTATE of an error."""
        with pytest.raises(psycopg.Error) as error:
            self.connection.execute(query.encode(), values or None)
        return error.value.sqlstate

    def seen(self) -> int:
        return int(self.value("select count(*) from seen"))


@pytest.fixture
def retry_shop(db: Database) -> Iterator[RetryShop]:
    with open_shop(db) as opened:
        yield opened


@pytest.fixture
def crew(retry_shop: RetryShop) -> RetryShop:
    """Members a and b with a batch each, of one row and one message."""
    for member in "ab":
        register_member(retry_shop.connection, "q", "c", member)
    for key in (1, 2):
        retry_shop.connection.execute("select gdq.insert_event('q', 'note', %s)", [f"m{key}"])
        retry_shop.insert(key)
    return retry_shop


@contextlib.contextmanager
def open_shop(db: Database) -> Iterator[RetryShop]:
    with db.connect() as connection:
        connection.execute("create table orders (id int primary key, note text); create table seen (ev_id bigint)")
        connection.execute("select gdq.create_queue('q', rotation_period => '1 microsecond')")
        connection.execute("select gdq.add_table('q', 'orders')")
        connection.execute("select gdq.register_consumer('q', 'c')")
        yield RetryShop(db, connection)
