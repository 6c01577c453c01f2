"""The installed schema is the one that tests/install/schema.txt shows."""

from __future__ import annotations

import os
from pathlib import Path

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
