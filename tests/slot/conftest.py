"""The superuser of a database in which slots are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from gdq.consumers.slot.slot import slot_info
from tests.support.server import Database
from tests.support.slot_reader import drop_when_free, prepare


@pytest.fixture
def su(db: Database) -> Iterator[psycopg.Connection[Any]]:
    """The superuser; table item with the slot c of queue q, and where its copy goes."""
    with db.connect("su") as connection:
        prepare(connection)
        yield connection
        drop_when_free(connection, "c")
        assert slot_info(connection) == []
