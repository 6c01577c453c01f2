"""DDL on captured tables that capture follows without event triggers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from psycopg import Connection

from gdq.call import call

# Anything that such a word is in, as an INSERT of a text, is followed too: that finds nothing and takes milliseconds.
_MAY_BE_DDL = re.compile(r"\b(alter|create|drop)\b|(^|;)\s*(do|call)\b", re.IGNORECASE)


def apply_ddl(connection: Connection[Any], queue: str, ddl: str, *, lock: Sequence[str] | None = None) -> int:
    """Run DDL commands in the caller's transaction and update capture; returns the number of tables with new columns.

    `lock`: tables to lock first. WrongIsolation unless READ COMMITTED; psycopg.errors.LockNotAvailable if a table is
    not free within 500 ms: roll back and try again.
    """
    return int(call(connection, "apply_ddl", queue, ddl, None if lock is None else list(lock)))


def may_be_ddl(statement: str) -> bool:
    """Whether a statement may change what capture is made for."""
    return _MAY_BE_DDL.search(statement) is not None


class Follower:
    """What apply_ddl() does before and after the commands, around each statement that a migration tool runs itself.

    `run`: runs a query of at most one value, which is {} in it, in the statement's transaction; gives the first row.
    `savepoint`: a savepoint there. An error of gdq is a warning, since no migration may fail because of gdq; the next
    tick finds that nobody has followed.
    """

    def __init__(
        self, run: Callable[[str, str | None], Any], savepoint: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._run = run
        self._savepoint = savepoint

    def begin(self, statement: str) -> bool:
        """Prepare for a statement; True if end() is to be called after it."""
        if not may_be_ddl(statement) or not self._run("select pg_catalog.to_regnamespace('gdq') is not null", None)[0]:
            return False
        return self._try("select gdq.begin_ddl(null, {}) where not gdq.event_triggers_on()", statement)

    def end(self, statement: str) -> None:
        """Have capture follow what the statement did."""
        self._try("select gdq.end_ddl(null, {})", statement)

    def _try(self, query: str, statement: str) -> bool:
        try:
            with self._savepoint():
                return self._run(query, statement) is not None
        except Exception as error:
            cause = str(error.__cause__ or error).partition("\n")[0]
            # a logger made at import would be off: Alembic's env.py has fileConfig() disable those that exist
            logging.getLogger("gdq.ddl").warning(
                "capture does not follow %r: %s", statement.strip().partition("\n")[0], cause
            )
            return False
