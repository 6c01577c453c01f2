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

# Such a statement runs outside of a transaction because it must, and changes nothing that capture is made for.
_CONCURRENT = re.compile(r"\s*((create|drop)\s+(unique\s+)?index|reindex\b.*)\s+concurrently\b", re.IGNORECASE)

# Whether gdq's event trigger follows DDL.
_EVENT_TRIGGER = """select exists (select from pg_catalog.pg_event_trigger
                                    where evtname operator(pg_catalog.=) '!gdq_ddl'
                                      and evtenabled operator(pg_catalog.=) 'A')"""


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
        if not self._is_watched(statement):
            return False
        return self._try("select gdq.begin_ddl(null, {}) where not gdq.event_triggers_on()", statement)

    def end(self, statement: str) -> None:
        """Have capture follow what the statement did."""
        self._try("select gdq.end_ddl(null, {})", statement)

    def leave(self, statement: str) -> None:
        """Say that nobody follows a statement outside of a transaction, if it may concern capture."""
        if _CONCURRENT.match(statement) or not self._is_watched(statement):
            return
        # the catalog, which every role may read: an error here could fail a transaction that the tool does not know of
        if not self._run(_EVENT_TRIGGER, None)[0]:
            _warn(statement, "it is outside of a transaction")

    def _is_watched(self, statement: str) -> bool:
        return may_be_ddl(statement) and self._run("select pg_catalog.to_regnamespace('gdq') is not null", None)[0]

    def _try(self, query: str, statement: str) -> bool:
        try:
            with self._savepoint():
                return self._run(query, statement) is not None
        except Exception as error:
            _warn(statement, str(error.__cause__ or error).partition("\n")[0])
            return False


def _warn(statement: str, cause: str) -> None:
    # a logger made at import would be off: Alembic's env.py has fileConfig() disable those that exist
    logging.getLogger("gdq.ddl").warning("capture does not follow %r: %s", statement.strip().partition("\n")[0], cause)
