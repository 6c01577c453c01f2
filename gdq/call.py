"""SQL calls for one value or for typed rows, several in one round trip; and retries while others hold a lock."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import Connection, sql
from psycopg.errors import DeadlockDetected, LockNotAvailable
from psycopg.rows import RowFactory

from gdq.errors import InstallError, mapped_errors
from gdq.shown import ShownRows
from gdq.steps import Statement, called, execute

_Row = TypeVar("_Row")
_Result = TypeVar("_Result")


def call(connection: Connection[Any], function: str, *values: Any, **named: Any) -> Any:
    """The result of a SQL function of gdq, see called()."""
    return execute(connection, called(function, *values, **named))


def scalar(connection: Connection[Any], query: str | sql.SQL | sql.Composed, *values: Any) -> Any:
    """The first column of a query's first row; None if the query has no row."""
    return execute(connection, Statement(query, values))


def rows(
    connection: Connection[Any],
    row_type: type[_Row],
    query: str | sql.SQL | sql.Composed,
    *values: Any,
) -> list[_Row]:
    """All rows of a query, see typed()."""
    return ShownRows(execute(connection, typed(row_type, query, *values)))


def typed(row_type: type[_Row], query: str | sql.SQL | sql.Composed, *values: Any) -> Statement:
    """A query whose rows each become a `row_type`, a dataclass whose fields have the columns' names.

    Columns without a field are dropped: a newer gdq's functions have more of them. InstallError for a field without a
    column: the functions are of an older gdq.
    Values come in binary form: in text form times and intervals would follow the session's settings. psycopg reads no
    regclass, pg_snapshot or pg_lsn so; a query casts these to text.
    """
    return Statement(query, values, row=_fields_row(row_type), binary=True)


def _fields_row(row_type: type[_Row]) -> RowFactory[_Row]:
    """A row factory: the fields of the dataclass `row_type` come from the columns by name, but keyword-only ones."""
    fields = [field.name for field in dataclasses.fields(row_type) if not field.kw_only]  # type: ignore[arg-type]

    def factory(cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], _Row]:
        columns = [column.name for column in cursor.description or ()]
        missing = [name for name in fields if columns and name not in columns]
        if missing:
            raise InstallError(
                f"the functions of gdq in this database are of another gdq: no {', '.join(missing)}",
                hint="gdq install upgrades them.",
            )
        positions = [columns.index(name) for name in fields if columns]
        return lambda values: row_type(*(values[position] for position in positions))

    return factory


@contextmanager
def one_round_trip(connection: Connection[Any]) -> Iterator[None]:
    """Send the block's commands to the server together; their first error is raised at the end."""
    with mapped_errors():
        try:
            with connection.pipeline():
                yield
        except psycopg.errors.PipelineAborted as error:
            # commands after an error are aborted, and psycopg may raise that instead of the error
            first = error.__context__
            raise (first if isinstance(first, psycopg.Error) else error) from None


def try_while_locked(action: Callable[[], _Result], seconds: float = 20.0, *, pause_max: float = 3.0) -> _Result:
    """The result of `action`, which must have a short lock_timeout and is retried if others hold its locks.

    A session that waits long for a strong lock blocks all sessions behind it. So the waiting is done in pauses between
    the attempts, growing up to `pause_max` seconds. After `seconds` the next error passes: LockNotAvailable or
    DeadlockDetected of psycopg.errors.
    """
    deadline = time.monotonic() + seconds
    pause = 0.1
    while True:
        try:
            return action()
        except (LockNotAvailable, DeadlockDetected):
            if time.monotonic() >= deadline:
                raise
        pause = min(pause * 2, pause_max)
        time.sleep(pause * random.uniform(0.5, 1))
