"""One PostgreSQL server for the session, one database for each test."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest
from psycopg import sql

from gdq.consumers.compare.rules import SLOT_PLUGINS
from gdq.embedded.files import PostgresBinaries, binaries_in, find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError

Role = Literal["owner", "su", "app"]

USERS: dict[Role, str] = {"owner": "gdq_owner", "su": "postgres", "app": "app"}
PASSWORD = "secret of the tests"
TEMPLATE = "gdq_template"
EXTENSIONS = ("citext", "hstore")


@dataclass(frozen=True, slots=True)
class Database:
    """One database of the test server; `dsn`, `su_dsn` and `app_dsn` are the owner's, superuser's and writer's."""

    server: EmbeddedServer
    name: str

    def dsn_of(self, role: Role) -> str:
        return self.server.conninfo(USERS[role], self.name, None if role == "su" else PASSWORD)

    @property
    def dsn(self) -> str:
        return self.dsn_of("owner")

    @property
    def su_dsn(self) -> str:
        return self.dsn_of("su")

    @property
    def app_dsn(self) -> str:
        return self.dsn_of("app")

    def connect(self, role: Role = "owner", *, autocommit: bool = True, **kw: Any) -> psycopg.Connection[Any]:
        """A new connection; the test closes it, most simply with `with`."""
        return psycopg.connect(self.dsn_of(role), autocommit=autocommit, **kw)


class OldServer(EmbeddedServer):
    """A server in use for so long that its transaction numbers need more than 32 bits.

    A new one, `epoch` 0, where the programs of this PostgreSQL cannot make it look old.
    """

    epoch = 0

    def _initialise(self, password_file: Path) -> None:
        super()._initialise(password_file)
        try:
            program = self.binaries.program("pg_resetwal")
        except EmbeddedError:
            return
        self.epoch = 3
        self.account.run(program, f"--epoch={self.epoch}", f"--pgdata={self.data}")


@cache
def chosen_binaries(major: int) -> PostgresBinaries:
    """The PostgreSQL to test with: GDQ_TEST_BIN, else `major` from wherever it is found."""
    folder = os.environ.get("GDQ_TEST_BIN")
    return binaries_in(Path(folder)) if folder else find_binaries(major)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Say in one line that there is no such PostgreSQL, rather than once for each test."""
    try:
        chosen_binaries(session.config.getoption("--pg"))
    except EmbeddedError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str:
    binaries = chosen_binaries(config.getoption("--pg"))
    return f"PostgreSQL {binaries.version} from {binaries.origin}"


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Iterator[EmbeddedServer]:
    """The server of the session, with the roles gdq_owner and app."""
    settings: dict[str, str | float | bool] = {"wal_level": "logical", "max_connections": 200, "log_statement": "ddl"}
    binaries = chosen_binaries(pytestconfig.getoption("--pg"))
    if binaries.knows("output_plugin_libraries"):
        # Minor releases that restrict output plugins refuse what is not named here.
        settings["output_plugin_libraries"] = ", ".join(SLOT_PLUGINS)
    with EmbeddedServer(binaries=binaries, settings=settings, in_memory=True) as started:
        with psycopg.connect(started.conninfo(), autocommit=True) as su:
            for user, rights in (("gdq_owner", "createrole"), ("app", "nocreaterole")):
                su.execute(
                    sql.SQL("create role {} login nosuperuser {} password {}").format(
                        sql.Identifier(user), sql.SQL(rights), sql.Literal(_quick_verifier(PASSWORD))
                    )
                )
            quick = sql.Literal(_quick_verifier(started.password))
            su.execute(sql.SQL("alter role postgres password {}").format(quick))
        yield started


def _quick_verifier(password: str) -> str:
    """A SCRAM verifier (RFC 5803) of one iteration: the usual 4,096 take half of the time of each connection."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    served = hmac.digest(salted, b"Server Key", "sha256")
    salt, stored, served = (base64.b64encode(part) for part in (salt, stored, served))
    return f"SCRAM-SHA-256$1:{salt.decode()}${stored.decode()}:{served.decode()}"


@pytest.fixture(scope="session")
def template(server: EmbeddedServer) -> str:
    """The name of a database with gdq installed by its owner, which tests clone."""
    from gdq.installer.install import install

    database = Database(server, _create(server, TEMPLATE))
    with database.connect("su") as su:
        for extension in EXTENSIONS:
            if su.execute("select from pg_available_extensions where name = %s", [extension]).rowcount:
                su.execute(sql.SQL("create extension {}").format(sql.Identifier(extension)))
    install(database.dsn)
    with database.connect("su") as su:
        su.execute("select gdq.create_event_triggers()")
    return database.name


@pytest.fixture
def db(server: EmbeddedServer, template: str) -> Iterator[Database]:
    """A database of its own for the test, with gdq installed."""
    yield from _temporary(server, template)


@pytest.fixture
def new_db(server: EmbeddedServer, template: str) -> Iterator[Callable[[], Database]]:
    """Makes databases for the test, with gdq installed."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(contextmanager(_temporary)(server, template))


@pytest.fixture(scope="module")
def module_db(server: EmbeddedServer, template: str) -> Iterator[Database]:
    """One database for all tests of a module, where making one takes longer than most of them."""
    yield from _temporary(server, template)


@pytest.fixture
def empty_db(server: EmbeddedServer, template: str) -> Iterator[Database]:
    """A database of its own for the test, without gdq.

    The template comes first: roles of the cluster are to be made by its owner, whatever a test does.
    """
    yield from _temporary(server, "template0")


@pytest.fixture(scope="module")
def module_empty_db(server: EmbeddedServer, template: str) -> Iterator[Database]:
    """One such database for all tests of a module."""
    yield from _temporary(server, "template0")


_ended: list[str] = []


def _temporary(server: EmbeddedServer, template: str) -> Iterator[Database]:
    name = _create(server, f"test_{secrets.token_hex(6)}", template)
    yield Database(server, name)
    # The server waits a tenth of a second for sessions that have just ended, so each database outlives its test by one.
    drop_ended(server)
    _ended.append(name)


def drop_ended(server: EmbeddedServer) -> None:
    """Drop the databases of tests that are over: before a role that has rights in them."""
    with psycopg.connect(server.conninfo(), autocommit=True) as su:
        while _ended:
            su.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(_ended.pop())))


def _create(server: EmbeddedServer, name: str, template: str = "template0") -> str:
    with psycopg.connect(server.conninfo(), autocommit=True) as su:
        su.execute(
            sql.SQL("create database {} owner gdq_owner template {} strategy file_copy").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
    return name
