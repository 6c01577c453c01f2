"""Indexes of the tables of a view that make its refresh faster, and that the server may refuse."""

from __future__ import annotations

import psycopg

from gdq.owner_sql import OwnerSql


def try_index(owned: OwnerSql, statement: str) -> bool:
    """Create an optional index; False if the server refuses it.

    A value may be too long for it (a third of a page), it may have over 32 columns, or a function or type that no index
    can have.
    """
    try:
        with owned.connection.transaction():
            owned.run(statement)
    except (
        psycopg.errors.ProgramLimitExceeded,
        psycopg.errors.TooManyColumns,
        psycopg.errors.InvalidObjectDefinition,
        psycopg.errors.UndefinedObject,
    ):
        return False
    return True
