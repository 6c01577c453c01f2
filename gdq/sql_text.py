"""SQL text: names in quotes, and text that psycopg takes as it is.

Values are parameters. Names go through quote() in text, and through sql.Identifier in statements of psycopg.sql. Text
that a planner or the server has made is marked by raw() where it becomes a statement or a part of one.
"""

from __future__ import annotations

from psycopg import sql


def quote(name: str) -> str:
    """A name as a quoted identifier of PostgreSQL."""
    return '"' + name.replace('"', '""') + '"'


def raw(text: str) -> sql.SQL:
    """SQL that was checked or made here, for a statement without parameters or for a place in one."""
    return sql.SQL(text)
