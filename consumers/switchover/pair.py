"""The two databases of a switchover, and the replica between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from psycopg import Connection
from psycopg.rows import namedtuple_row

from gdq.conninfo import connect, is_pooled
from gdq.consumer import ConsumerInfo, consumer_info
from gdq.consumers.replica.sessions import database_identity
from gdq.errors import GdqError
from gdq.queue import table_info
from gdq.sql_text import pin_session


@dataclass(frozen=True, slots=True)
class Pair:
    """Sessions in the source, where the application writes, and in the target, and the replica's queue and name.

    Both sessions are in autocommit, under gdq's settings.
    """

    source: Connection[Any]
    target: Connection[Any]
    queue: str
    replica: str

    def consumer(self) -> ConsumerInfo:
        """The replica's consumer in the source; GdqError without one."""
        found = [info for info in consumer_info(self.source, self.queue) if info.consumer_name == self.replica]
        if not found:
            raise GdqError(
                f'queue {self.queue} has no replica "{self.replica}"',
                hint=f"Make it first: gdq replicate {self.queue} {self.replica} --to ...",
            )
        return found[0]

    def tables(self) -> list[str]:
        """The captured tables that the replica takes, by name."""
        taken = self.consumer().tables
        if taken is not None:
            return sorted(taken)
        return sorted(info.table_name for info in table_info(self.source, self.queue))


@contextmanager
def open_pair(source: str | None, target: str, queue: str, replica: str) -> Iterator[Pair]:
    """Connect to both databases for the block; GdqError if they are one, or behind a pooler."""
    name = "gdq:switchover"
    with (
        connect(source, application_name=name, autocommit=True) as here,
        connect(target, application_name=name, autocommit=True) as there,
    ):
        for connection in (here, there):
            if is_pooled(connection):
                raise GdqError("a switchover needs sessions of its own", hint="Connect past the pooler.")
            pin_session(connection)
        pair = Pair(here, there, queue, replica)
        consumer_info(here, queue)  # says whether queue and rights are there
        if database_identity(here) == database_identity(there):
            raise GdqError("source and target are the same database", hint="--to names the target.")
        yield pair


def named_rows(connection: Connection[Any], query: str, values: Sequence[Any] | None = None) -> list[Any]:
    """All rows of a query, whose columns are attributes."""
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(query.encode(), values).fetchall()


def place(connection: Connection[Any]) -> str:
    """Where a session's database is, for people: host:port/name, without user and password."""
    info = connection.info
    return f"{info.host or 'localhost'}:{info.port}/{info.dbname}"
