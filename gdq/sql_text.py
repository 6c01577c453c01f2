"""SQL text: quoted names, and text that psycopg takes unchanged.

Values are parameters. Names go through quote() in text, and through sql.Identifier in statements of psycopg.sql. raw()
marks text that a planner or the server has made when it becomes a statement or a part of one. pin_session() has all of
it mean the same in every session.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg import Connection, sql

# Settings under which gdq's own SQL runs. A name, an operator or a function without a schema is PostgreSQL's own:
# nobody else may create in pg_catalog, and operators and functions are never looked up in pg_temp. Row security hides
# rows or runs a policy's code: where a policy would apply, an error comes instead.
PINNED_SETTINGS = {
    "row_security": "off",
    "search_path": "pg_catalog, pg_temp",
    "standard_conforming_strings": "on",
}

# The same as statements, for a session and for a transaction. SET runs no operator and no function.
PIN_SESSION, PIN_TRANSACTION = (
    "; ".join(f"set {scope} {name} = {value}" for name, value in PINNED_SETTINGS.items())
    for scope in ("session", "local")
)


def quote(name: str) -> str:
    """A name as a quoted identifier of PostgreSQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: Any) -> str:
    """A value as a literal of PostgreSQL."""
    return sql.Literal(value).as_string(None)


def is_null(value: str) -> str:
    """Condition that a value of any type is NULL: a composite value whose fields are all NULL is not.

    IS NULL stands in it for indexes.
    """
    return f"({value} is null and pg_catalog.num_nulls({value}) = 1)"


def is_not_null(value: str) -> str:
    """Condition that a value of any type is not NULL: a composite value with a field that is NULL is not."""
    return f"(pg_catalog.num_nulls({value}) = 0)"


def raw(text: str) -> sql.SQL:
    """Trusted SQL text as a statement without parameters, or as a part of one."""
    return sql.SQL(text)


def pin_session(connection: Connection[Any]) -> None:
    """Give a session the settings under which gdq's SQL runs, PINNED_SETTINGS, until it ends or is reset."""
    connection.execute(raw(PIN_SESSION))


@contextmanager
def pinned(connection: Connection[Any]) -> Iterator[None]:
    """Run the block's SQL, in a transaction, under PINNED_SETTINGS; then the session's own come back."""
    query = "select n, pg_catalog.current_setting(n) from pg_catalog.unnest(%s::pg_catalog.text[]) n"
    with connection.transaction():
        own = connection.execute(query, [list(PINNED_SETTINGS)]).fetchall()
        pin_transaction(connection)
        yield
        for name, value in own:
            connection.execute("select pg_catalog.set_config(%s, %s, true)", [name, value])


def pin_transaction(connection: Connection[Any]) -> None:
    """Give a transaction the settings under which gdq's SQL runs, until it ends."""
    connection.execute(raw(PIN_TRANSACTION))
