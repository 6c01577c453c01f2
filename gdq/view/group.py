"""Groups of views that are refreshed at one snapshot, their targets moved in one transaction.

The functions take a connection to the source and leave the transaction to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection

from gdq.call import call, rows


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One group with its views, and when and how its last refresh ended."""

    group_name: str
    queue_name: str | None
    views: list[str]
    created_at: datetime
    last_refresh: datetime | None
    error: str | None


def create_group(connection: Connection[Any], name: str, views: Sequence[str]) -> bool:
    """Store a group of views; False when the very same one existed.

    psycopg.errors.FeatureNotSupported for views that do not go together, DuplicateObject for one that is in another
    group, UndefinedObject for one that is not there.
    """
    return bool(call(connection, "create_group", name, list(views)))


def alter_group(connection: Connection[Any], name: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> bool:
    """Put views into a group, take others out; False when nothing changed. Errors as for create_group()."""
    return bool(call(connection, "alter_group", name, list(add), list(remove)))


def drop_group(connection: Connection[Any], name: str) -> bool:
    """Forget a group, not its views; False when there was none."""
    return bool(call(connection, "drop_group", name))


def group_info(connection: Connection[Any], name: str | None = None) -> list[GroupInfo]:
    """All groups, or one. psycopg.errors.UndefinedObject when there is no such group."""
    return rows(connection, GroupInfo, "select * from gdq.group_info(%s)", name)
