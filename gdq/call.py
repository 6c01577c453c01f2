"""Calls of SQL that return one value or typed rows; the server's errors come as the classes in gdq.errors."""

from __future__ import annotations

from typing import Any, TypeVar

from psycopg import Connection, sql
from psycopg.rows import class_row, scalar_row

from gdq.errors import mapped

Row = TypeVar("Row")


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
