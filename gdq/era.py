"""Eras and positions: what a queue knows again after a restore, and what a consumer keeps outside the server.

All take a connection and leave the transaction to the caller, as in gdq.queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from psycopg import Connection

from gdq.call import call, rows


@dataclass(frozen=True, slots=True)
class Rebased:
    """The outcome of a rebase for one consumer's table: copy it anew ("resync"), or changes go on ("kept")."""

    queue_name: str
    consumer_name: str
    table_name: str
    outcome: Literal["resync", "kept"]


def rebase(connection: Connection[Any], queue: str | None = None, *, keep: bool = False) -> list[Rebased]:
    """Start a new era of a queue, or of all, that was restored from a dump; [] when there was none.

    `keep`: consumers go on where the dump has them. Only if writers were stopped before the last tick of the old
    server and begin after this, and consumers read nothing there after the dump: see docs/operations.md.
    psycopg.errors.LockNotAvailable when writers hold a table: nothing is changed, try again.
    """
    return rows(connection, Rebased, "select * from gdq.rebase(%s, keep => %s)", queue, keep)


def position(connection: Connection[Any], queue: str, consumer: str) -> str:
    """The position of a consumer as text, to be stored beside the data that the consumer has written elsewhere."""
    return str(call(connection, "position", queue, consumer))


def check_position(connection: Connection[Any], queue: str, position: str) -> None:
    """Error unless the server knows this position.

    DivergedPosition when the server lost it in a failover; EraEnded when it is from before a restore;
    TruncatedPosition when it is older than what the queue keeps.
    """
    call(connection, "check_position", queue, position)
