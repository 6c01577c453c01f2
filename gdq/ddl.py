"""DDL on captured tables that capture follows without event triggers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection

from gdq.call import call


def apply_ddl(connection: Connection[Any], queue: str, ddl: str, *, lock: Sequence[str] | None = None) -> int:
    """Run DDL commands in the caller's transaction and update capture; returns the number of tables with new columns.

    `lock`: tables to lock first. WrongIsolation unless READ COMMITTED; psycopg.errors.LockNotAvailable if a table is
    not free within 500 ms: roll back and try again.
    """
    return int(call(connection, "apply_ddl", queue, ddl, None if lock is None else list(lock)))
