"""Connections: which database to connect to, and whether a pooler stands before it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

_DRIVER = re.compile(r"^(postgres(?:ql)?)\+\w+://")


def resolve(dsn: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The connection string to use: `dsn`, else GDQ_DSN, else DATABASE_URL, else "" (libpq's PG* and service file).

    An empty value counts as not given. Takes libpq's key=value form and URIs; SQLAlchemy's postgresql+psycopg:// is
    read as postgresql://. psycopg.ProgrammingError when libpq cannot parse it.
    """
    chosen = dsn or environ.get("GDQ_DSN") or environ.get("DATABASE_URL") or ""
    chosen = _DRIVER.sub(r"\1://", chosen)
    conninfo_to_dict(chosen)
    return chosen


def connect(
    dsn: str | None = None, *, application_name: str = "gdq", autocommit: bool = False, **parameters: Any
) -> psycopg.Connection[Any]:
    """Connect to `dsn`, else GDQ_DSN, else DATABASE_URL; transactions are READ COMMITTED, as gdq's functions demand.

    `application_name` counts unless the connection string or PGAPPNAME has one. `parameters` are libpq's. The client's
    encoding is UTF8 whatever the database's: psycopg reads JSON in no other.
    """
    conninfo = make_conninfo(resolve(dsn), fallback_application_name=application_name, client_encoding="UTF8")
    connection = psycopg.connect(conninfo, autocommit=True, **parameters)
    try:
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        if is_pooled(connection):
            connection.prepare_threshold = None
        connection.autocommit = autocommit
    except BaseException:
        connection.close()
        raise
    return connection


def take_utf8(connection: psycopg.Connection[Any]) -> None:
    """Set the encoding of a caller's connection to UTF8. Needs an idle autocommit connection."""
    if connection.info.parameter_status("client_encoding") != "UTF8":
        connection.execute("set client_encoding = 'UTF8'")


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Whether a pooler such as PgBouncer stands between: it may give every transaction another session of the server.

    Then nothing outlives a transaction: no LISTEN, no prepared statement, no SET. A pooler invents the process id that
    it tells its client. Needs an idle autocommit connection.
    """
    row = connection.execute("select pg_catalog.pg_backend_pid()").fetchone()
    return row is not None and row[0] != connection.info.backend_pid


def conninfo_of(connection: psycopg.Connection[Any]) -> str:
    """The connection string of a live connection, with its password: for a second connection to the same database.

    Of a list of servers it names the one that is connected, since psycopg asks them one after the other: another may
    not have what this one has committed.
    """
    info = connection.info
    parameters: dict[str, Any] = info.get_parameters()
    if info.password:
        parameters["password"] = info.password
    return make_conninfo(**parameters)


@contextlib.contextmanager
def without_password(dsn: str) -> Iterator[str]:
    """`dsn` with its password in a file that only this account can read, for plans, logs and worker processes.

    The file is removed when the block ends. A connection string without a password stays as it is: workers on other
    machines find theirs by PGPASSFILE or a connection service.
    """
    parameters: dict[str, Any] = dict(conninfo_to_dict(dsn))
    password = parameters.pop("password", None)
    if not password:
        yield dsn
        return
    with tempfile.TemporaryDirectory(prefix="gdq-") as folder:
        path = Path(folder) / "pgpass"
        path.touch(mode=0o600)
        escaped = str(password).replace("\\", "\\\\").replace(":", "\\:")
        path.write_text(f"*:*:*:*:{escaped}{os.linesep}")
        yield make_conninfo(**(parameters | {"passfile": str(path)}))


def for_other_machines(dsn: str, given: str) -> str:
    """What without_password() made, for machines that have no file of this one's.

    A password that libpq found here in a file or the environment they find by what they have themselves. One that was
    `given`, in the user's own connection string, stays in the file: it is good for workers on this machine only.
    """
    parameters: dict[str, Any] = dict(conninfo_to_dict(dsn))
    if not {"password", "passfile"} & conninfo_to_dict(given).keys():
        parameters.pop("passfile", None)
    return make_conninfo(**parameters)
