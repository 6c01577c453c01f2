"""Groups of views that are refreshed at one snapshot, with one transaction for all targets.

The functions take a connection to the source and leave the transaction to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection

from gdq.call import call, rows
from gdq.shown import Shown


@dataclass(frozen=True, slots=True, repr=False)
class GroupInfo(Shown):
    """One group with its views, and the time and error of its last refresh."""

    group_name: str
    queue_name: str | None
    views: list[str]
    created_at: datetime
    last_refresh: datetime | None
    error: str | None


def create_group(connection: Connection[Any], name: str, views: Sequence[str]) -> bool:
    """Store a group of views; False if the same group existed.

    psycopg.errors.FeatureNotSupported for views that cannot be refreshed together, DuplicateObject for a view of
    another group, UndefinedObject for an unknown view.
    """
    return bool(call(connection, "create_group", name, list(views)))


def alter_group(connection: Connection[Any], name: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> bool:
    """Add views to a group and remove others; False if nothing changed. Errors as for create_group()."""
    return bool(call(connection, "alter_group", name, list(add), list(remove)))


def drop_group(connection: Connection[Any], name: str) -> bool:
    """Delete a group, not its views; False if there was none."""
    return bool(call(connection, "drop_group", name))


def group_info(connection: Connection[Any], name: str | None = None) -> list[GroupInfo]:
    """All groups, or one; psycopg.errors.UndefinedObject if there is no such group."""
    return rows(connection, GroupInfo, "select * from gdq.group_info(%s)", name)
