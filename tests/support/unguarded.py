"""A database whose event triggers are gone, as where a server refuses them, as a fixture."""

from __future__ import annotations

import pytest
from psycopg import sql

from tests.support.events import Tap

GUARDS = ("!gdq_ddl", "!gdq_drop", "!gdq_rewrite", "!gdq_capture_role")


def drop_guards(tap: Tap) -> None:
    with tap.db.connect("su") as su:
        for name in GUARDS:
            su.execute(sql.SQL("drop event trigger if exists {}").format(sql.Identifier(name)))


@pytest.fixture
def bare(tap: Tap) -> Tap:
    """No event triggers; the application may apply DDL."""
    drop_guards(tap)
    tap.owner.execute("grant usage on schema gdq to app")
    tap.owner.execute(
        "grant execute on function gdq.apply_ddl(text, text, regclass[]), gdq.begin_ddl(text, text),"
        " gdq.end_ddl(text, text) to app"
    )
    return tap
