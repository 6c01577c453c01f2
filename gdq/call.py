"""Calls of SQL: for one value or typed rows, with the errors of gdq.errors, and again while others hold a lock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from psycopg import Connection, sql
from psycopg.errors import DeadlockDetected, LockNotAvailable
from psycopg.rows import class_row, scalar_row

from gdq.errors import mapped

Row = TypeVar("Row")
Result = TypeVar("Result")


def call(connection: Connection[Any], function: str, *values: Any, **named: Any) -> Any:
    """The result of a SQL function of gdq: call(connection, "pause", "orders") is `select gdq.pause('orders')`.

    `values` go by position, `named` by the names of the function's arguments. The function must have one signature
    only: the server takes the types from it.
    """
    arguments: list[sql.Composable] = [sql.Placeholder()] * len(values)
    arguments += [sql.SQL("{} => %s").format(sql.Identifier(name)) for name in named]
    query = sql.SQL("select gdq.{}({})").format(sql.Identifier(function), sql.SQL(", ").join(arguments))
    return scalar(connection, query, *values, *named.values())


def scalar(connection: Connection[Any], query: str | sql.SQL | sql.Composed, *values: Any) -> Any:
    """The first column of a query's first row; None when the query has no row."""
    with mapped(), connection.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(query, values or None).fetchone()


def rows(
    connection: Connection[Any],
    row_type: type[Row],
    query: str | sql.SQL | sql.Composed,
    *values: Any,
    binary: bool = False,
) -> list[Row]:
    """All rows of a query, each as a `row_type` whose fields are named as the columns.

    `binary`: the server sends binary values, which are quicker to read; psycopg knows no binary form of some types.
    """
    with mapped(), connection.cursor(row_factory=class_row(row_type), binary=binary) as cursor:
        return cursor.execute(query, values or None).fetchall()


def try_while_locked(action: Callable[[], Result], seconds: float = 20.0, *, pause_max: float = 3.0) -> Result:
    """The result of `action`, which gives up soon where others hold what it locks, and is tried again then.

    Whoever queues long for a strong lock stops everybody behind; so the waiting is done between the tries, in pauses
    that grow up to `pause_max` seconds. After `seconds` the error of the next try passes: LockNotAvailable or
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
