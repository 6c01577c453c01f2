"""The installed schema is the one that tests/install/schema.txt shows."""

from __future__ import annotations

import os
from pathlib import Path

import psycopg
import pytest

from tests.support.installed_schema import installed_schema
from tests.support.server import Database

pytestmark = pytest.mark.server

_FILE = Path(__file__).parent / "schema.txt"


def test_installed_schema_is_the_one_in_the_file(db: Database) -> None:
    with db.connect("su") as connection:
        found = installed_schema(connection)
    if "GDQ_WRITE_SCHEMA" in os.environ:
        _FILE.write_text(found, encoding="utf-8")
    assert found.splitlines() == _FILE.read_text(encoding="utf-8").splitlines(), "make schema writes it anew"


def test_every_body_compiles(db: Database) -> None:
    """The install checks no body, since a function may stand before those that it calls."""
    with db.connect() as connection:
        made = connection.execute(
            "select p.oid::regprocedure::text, pg_get_functiondef(p.oid) from pg_proc p"
            " where p.pronamespace = 'gdq'::regnamespace and p.prokind in ('f', 'p')"
        ).fetchall()
        assert len(made) > 300
        failures = []
        for name, definition in made:
            try:
                with connection.transaction(force_rollback=True):
                    connection.execute("set local check_function_bodies = on")
                    connection.execute(definition.encode())
            except psycopg.Error as error:
                failures.append((name, str(error).splitlines()[0]))
        assert failures == []
