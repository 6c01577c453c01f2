"""Eras and positions: start a new era after a restore, and check positions that consumers keep outside the server.

All take a connection and leave the transaction to the caller, as in gdq.queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from psycopg import Connection

from gdq.call import call, rows


@dataclass(frozen=True, slots=True)
class Rebased:
    """The outcome of a rebase for one consumer's table: copy it again ("resync"), or changes go on ("kept")."""

    queue_name: str
    consumer_name: str
    table_name: str
    outcome: Literal["resync", "kept"]


def rebase(connection: Connection[Any], queue: str | None = None, *, keep: bool = False) -> list[Rebased]:
    """Start a new era of queues, or of one, that were restored from a dump; [] if there was none.

    `keep`: consumers go on at their positions in the dump. Use it only if writers were stopped before the old server's
    last tick and start after this, and consumers read nothing there after the dump: see docs/operations.md.
    psycopg.errors.LockNotAvailable while writers hold a table: nothing is changed, try again.
    """
    return rows(connection, Rebased, "select * from gdq.rebase(%s, keep => %s)", queue, keep)


def position(connection: Connection[Any], queue: str, consumer: str) -> str:
    """A consumer's position as text, to be stored beside the data that the consumer writes outside the server."""
    return str(call(connection, "position", queue, consumer))


def check_position(connection: Connection[Any], queue: str, position: str) -> None:
    """Error unless the server knows this position.

    DivergedPosition if the server lost it in a failover; EraEnded if it is from before a restore; TruncatedPosition if
    the queue no longer keeps the changes after it.
    """
    call(connection, "check_position", queue, position)
