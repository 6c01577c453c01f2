"""A hosted PostgreSQL: one role for everything, which is no superuser, on a server of its own.

Some services let that role make event triggers. As supautils does it, the role is a superuser while it makes them, and
owns them afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql

from gdq.embedded.server import EmbeddedServer
from tests.support.server import PASSWORD, Database, Role, chosen_binaries

ADMIN = "cloud_admin"


class ManagedDatabase(Database):
    """A database of the role `cloud_admin`; every role that a test connects as is this one, but for `real_su`."""

    def dsn_of(self, role: Role) -> str:  # noqa: ARG002
        return self.server.conninfo(ADMIN, self.name, PASSWORD)

    def real_su(self) -> psycopg.Connection[Any]:
        """A connection of the service's own superuser."""
        return psycopg.connect(self.server.conninfo(dbname=self.name), autocommit=True)

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements as the admin, each in a transaction; gives the rows of the last one."""
        with self.connect() as connection:
            for statement in statements:
                cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


@contextmanager
def superuser_for_a_moment(database: ManagedDatabase) -> Iterator[None]:
    """What a service does around CREATE EVENT TRIGGER of its admin."""
    with database.real_su() as su:
        su.execute(f"alter role {ADMIN} superuser")
        try:
            yield
        finally:
            su.execute(f"alter role {ADMIN} nosuperuser")


@pytest.fixture(scope="module")
def managed_server(pytestconfig: pytest.Config) -> Iterator[EmbeddedServer]:
    """A server with nobody but its superuser and the admin."""
    binaries = chosen_binaries(pytestconfig.getoption("--pg"))
    with EmbeddedServer(binaries=binaries, in_memory=True) as server:
        with psycopg.connect(server.conninfo(), autocommit=True) as su:
            create = sql.SQL("create role {} login createrole createdb password {}")
            su.execute(create.format(sql.Identifier(ADMIN), sql.Literal(PASSWORD)))
        yield server


@pytest.fixture
def managed_db(managed_server: EmbeddedServer) -> Iterator[ManagedDatabase]:
    """A database that the admin has made, without gdq."""
    admin = managed_server.conninfo(ADMIN, "postgres", PASSWORD)
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("create database shop")
    yield ManagedDatabase(managed_server, "shop")
    with psycopg.connect(managed_server.conninfo(), autocommit=True) as su:
        su.execute("drop database shop with (force)")
