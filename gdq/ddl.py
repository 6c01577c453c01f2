"""DDL of captured tables that capture follows without event triggers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection

from gdq.call import call


def apply_ddl(connection: Connection[Any], queue: str, ddl: str, *, lock: Sequence[str] | None = None) -> int:
    """Run DDL commands in the caller's transaction and keep capture in step; how many tables have new columns.

    `lock`: tables that are locked first. WrongIsolation unless READ COMMITTED; psycopg.errors.LockNotAvailable when a
    table is not free within 500 ms: roll back and try again.
    """
    return int(call(connection, "apply_ddl", queue, ddl, None if lock is None else list(lock)))
