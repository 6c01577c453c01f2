"""The two databases of a switchover, and the replica between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
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
    def loss_named(self, *more: Connection[Any]) -> Iterator[None]:
        """GdqError that names the side if the block fails since a session is lost. `more`: other sessions of both."""
        try:
            yield
        except psycopg.OperationalError as error:
            lost = self.lost(*more)
            if lost is None:
                raise
            raise GdqError(
                f"the connection to {lost} was lost: {str(error).strip().splitlines()[0]}",
                hint="Run the same command again when it is there: it says where the switch is, and goes on.",
            ) from error

    def lost(self, *more: Connection[Any]) -> str | None:
        """The side whose session is lost; None if there is none. `more`: other sessions of both sides."""
        for side, own in (("source", self.source), ("target", self.target)):
            others = [one for one in more if place(one) == place(own)]
            if any(_is_lost(one) for one in (own, *others)):
                return f"the {side} ({place(own)})"
        return None


@contextmanager
def open_pair(
    source: str | None, target: str, queue: str, replica: str, *, unreached: str | None = None
) -> Iterator[Pair]:
    """Connect to both databases for the block; GdqError if they are one, or behind a pooler.

    An error of the block names the side that was lost. `unreached`: what to do if there is one that cannot be reached.
    """
    with ExitStack() as stack:
        here, there = (
            _connected(stack, side, conninfo, unreached) for side, conninfo in (("source", source), ("target", target))
        )
        pair = Pair(here, there, queue, replica)
        with pair.loss_named():
            consumer_info(here, queue)  # says whether queue and rights are there
            if database_identity(here) == database_identity(there):
                raise GdqError("source and target are the same database", hint="--to names the target.")
            yield pair


def _connected(stack: ExitStack, side: str, conninfo: str | None, unreached: str | None) -> Connection[Any]:
    """A session in one of the databases, which ends with `stack`."""
    try:
        connection = connect(conninfo, application_name="gdq:switchover", autocommit=True)
    except psycopg.OperationalError as error:
        why = str(error).strip().splitlines()[0]
        raise GdqError(f"{why} (the {side}; nothing was changed)", hint=unreached) from error
    stack.enter_context(connection)
    if is_pooled(connection):
        raise GdqError("a switchover needs sessions of its own", hint="Connect past the pooler.")
    pin_session(connection)
    return connection


def _is_lost(connection: Connection[Any]) -> bool:
    """True if the server is not there any more for a session; it may not know this yet."""
    with suppress(psycopg.Error):
        connection.execute("select 1")
    return connection.closed


def named_rows(connection: Connection[Any], query: str, values: Sequence[Any] | None = None) -> list[Any]:
    """All rows of a query, whose columns are attributes."""
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(query.encode(), values).fetchall()


def place(connection: Connection[Any]) -> str:
    """Where a session's database is, for people: host:port/name, without user and password."""
    info = connection.info
    return f"{info.host or 'localhost'}:{info.port}/{info.dbname}"
