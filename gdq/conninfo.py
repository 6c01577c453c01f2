"""Connections: the choice of the database, connection strings, and the check for a pooler."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.sql_text import raw
from gdq.steps import AnyConnection, Statement, Steps, run, run_async

# Off in every session of gdq's own: administrators bound the statements of applications by ALTER ROLE and ALTER
# DATABASE, and gdq waits where it must.
_TIMEOUTS = (
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "lock_timeout",
    "statement_timeout",
    "transaction_timeout",
)
# What has ended a session, or its first statement, where an administrator's timeout is shorter than that takes.
_ENDED_BY = {"57014": "statement_timeout", "57P05": "idle_session_timeout", "25P04": "transaction_timeout"}
# In every session of gdq's own: how SQL text is read and values are written, transactions, and no compiling of plans.
# `datestyle` keeps the order of day and month.
_PINNED = {
    "array_nulls": "on",
    "bytea_output": "hex",
    "datestyle": "ISO",
    "default_transaction_deferrable": "off",
    "default_transaction_isolation": "read committed",
    "exit_on_error": "off",
    "extra_float_digits": "1",
    "intervalstyle": "postgres",
    "jit": "off",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
}

# The session's own, without pg_catalog, which then comes first.
_SEARCH_PATH = """pg_catalog.ltrim(pg_catalog.regexp_replace(
    pg_catalog.current_setting('search_path'), '(^|,)[ ]*"?pg_catalog"?[ ]*(?=,|$)', '', 'g'), ', ')"""

# What needs a session for longer than a call, or one of its own, takes this; None: as for connect().
Connectable = psycopg.Connection[Any] | str | None

# The connections of connect() that somebody still holds.
_opened: weakref.WeakSet[psycopg.Connection[Any]] = weakref.WeakSet()

# libpq 17 may hand the refresher's Kerberos credentials on.
_KNOWS_DELEGATION = any(option.keyword == b"gssdelegation" for option in pq.Conninfo.get_defaults())

# Held while a connection is opened without PGPASSWORD.
_environment_lock = threading.Lock()

_DRIVER = re.compile(r"^(postgres(?:ql)?)\+\w+://")

# What libpq quotes; all of it but "=" is from the connection string.
_QUOTED = re.compile(r'"[^"]*"')
# Ports as libpq reads them: several for several hosts.
_PORTS = re.compile(r"[\d,\s]*")
# A URI's path with a bare @.
_AT_IN_PATH = re.compile(r"^\w+://[^/]*/[^?]*@")


def resolve_conninfo(dsn: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The connection string to use: `dsn`, else GDQ_DSN, else DATABASE_URL, else "" (libpq's PG* and service file).

    An empty value counts as missing. Accepts libpq's key=value form and URIs; SQLAlchemy's postgresql+psycopg:// is
    read as postgresql://. psycopg.ProgrammingError, which quotes no part of it, if libpq cannot parse it, or if PGPORT,
    where it counts, is no number.
    """
    source = next((name for name in ("GDQ_DSN", "DATABASE_URL") if environ.get(name)), None)
    chosen = dsn or environ.get(source or "") or ""
    chosen = _DRIVER.sub(r"\1://", chosen)
    try:
        parameters = conninfo_to_dict(chosen)
        if why := _why_unreadable(chosen, parameters):
            raise psycopg.ProgrammingError(why)
    except psycopg.ProgrammingError as error:
        place = "the connection string" if dsn else f"the connection string in {source}"
        wrong = psycopg.ProgrammingError(f"{place} cannot be read: {_without_quoted(str(error).strip())}")
        wrong.add_note(
            "Hint: Write 'host=HOST dbname=NAME user=ROLE' or postgresql://ROLE@HOST/NAME. Put a value with spaces in"
            " single quotes; in a URI write % and @ / : of a password as %25 and %40 %2F %3A."
        )
        raise wrong from None
    # libpq reads PGPORT where neither the string nor a service names a port
    if not (parameters.keys() & {"port", "service"} or environ.get("PGSERVICE")) and not _PORTS.fullmatch(
        environ.get("PGPORT", "")
    ):
        no_port = psycopg.ProgrammingError("PGPORT is no number")
        no_port.add_note("Hint: Set it to the port of the server, as in PGPORT=5432, or unset it.")
        raise no_port
    return chosen


def _without_quoted(message: str) -> str:
    return _QUOTED.sub(lambda quoted: quoted[0] if quoted[0] == '"="' else "...", message)


def _why_unreadable(given: str, parameters: Mapping[str, Any]) -> str | None:
    """What is wrong with a port, or with a URI of whose password libpq takes a part for host, port or database.

    Messages would show that part: the host of postgresql://u:a@b@host/d is b@host to libpq. With a wrong port libpq
    says that the host cannot be resolved.
    """
    uri = "://" in given
    if uri and ("@" in str(parameters.get("host", "")) or _AT_IN_PATH.search(given)):
        return "a character of the password ends the password"
    if _PORTS.fullmatch(str(parameters.get("port", ""))):
        return None
    return "its port is no number" + (", or a character of the password ends the password" if uri else "")


def connect(
    dsn: str | None = None,
    *,
    application_name: str = "gdq",
    autocommit: bool = False,
    kind: type[psycopg.Connection[Any]] = psycopg.Connection,
    **parameters: Any,
) -> psycopg.Connection[Any]:
    """Connect to `dsn`, else GDQ_DSN, else DATABASE_URL; transactions are READ COMMITTED, as gdq's functions require.

    Timeouts and the settings of _PINNED are gdq's, whatever ALTER DATABASE, ALTER ROLE or the server's configuration
    say; a timeout named in the connection string or PGOPTIONS stays. Behind a pooler all settings stay as they are.
    `application_name` is used unless the connection string or PGAPPNAME has one. `kind`: the connection's class.
    `parameters` are libpq's. The client's encoding is always UTF8, the only one in which psycopg reads JSON.
    """
    conninfo = _own_conninfo(dsn, application_name)
    while True:
        connection = None
        try:
            connection = kind.connect(conninfo, autocommit=True, **parameters)
            _settle(connection)
            break
        except psycopg.Error as error:
            patient = _without_timeout(conninfo, error, has_begun=connection is not None)
            if patient is None:
                _add_hint(error, dsn)
                raise
            conninfo = patient
    connection.autocommit = autocommit
    _opened.add(connection)
    return connection


def _settle(connection: psycopg.Connection[Any]) -> None:
    """Give a new session gdq's settings, or close it."""
    try:
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        if not run(connection, _pin(connection)):
            connection.prepare_threshold = None
    except BaseException:
        connection.close()
        raise


async def connect_async(dsn: str | None, *, application_name: str) -> psycopg.AsyncConnection[Any]:
    """As connect(), an async connection in autocommit."""
    conninfo = _own_conninfo(dsn, application_name)
    while True:
        connection = None
        try:
            connection = await psycopg.AsyncConnection.connect(conninfo, autocommit=True)
            await _settle_async(connection)
            return connection
        except psycopg.Error as error:
            patient = _without_timeout(conninfo, error, has_begun=connection is not None)
            if patient is None:
                _add_hint(error, dsn)
                raise
            conninfo = patient


async def _settle_async(connection: psycopg.AsyncConnection[Any]) -> None:
    try:
        await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        if not await run_async(connection, _pin(connection)):
            connection.prepare_threshold = None
    except BaseException:
        await connection.close()
        raise


def _own_conninfo(dsn: str | None, application_name: str) -> str:
    return make_conninfo(resolve_conninfo(dsn), fallback_application_name=application_name, client_encoding="UTF8")


def _without_timeout(conninfo: str, error: psycopg.Error, *, has_begun: bool) -> str | None:
    """The connection string with a timeout off that has ended a new session before gdq could set it; None for others.

    It comes as a startup option then, which a pooler refuses. One that the string names itself stays. `has_begun`: the
    session had.
    """
    timeout = _ENDED_BY.get(error.sqlstate or "")
    if error.sqlstate is None and has_begun:
        timeout = "idle_session_timeout"  # the server's last words may be lost
    elif error.sqlstate is None and "transaction timeout" in str(error):
        timeout = "transaction_timeout"
    options = conninfo_to_dict(conninfo).get("options") or os.environ.get("PGOPTIONS", "")
    if timeout is None or timeout in str(options):
        return None
    return make_conninfo(conninfo, options=f"{options} -c {timeout}=0".strip())


def _add_hint(error: psycopg.Error, dsn: str | None) -> None:
    if isinstance(error, psycopg.OperationalError) and not resolve_conninfo(dsn):
        error.add_note("Hint: No connection string is set. Set DATABASE_URL, GDQ_DSN or libpq's PG* variables.")


def sessions_by_database(application_name: str) -> dict[str, dict[int, bool]]:
    """The processes of the sessions of connect(), and whether a statement runs in them; any thread may call this.

    They stand under a connection string for another session, of that name, in the same database.
    """
    found: dict[str, dict[int, bool]] = {}
    for connection in [one for one in list(_opened) if not one.closed]:
        conninfo = make_conninfo(conninfo_of(connection), application_name=application_name)
        busy = connection.pgconn.transaction_status == pq.TransactionStatus.ACTIVE
        found.setdefault(conninfo, {})[connection.info.backend_pid] = busy
    return found


def end_commit_waits() -> None:
    """Let sessions of connect() go on that wait for a synchronous standby after a COMMIT; needs another thread.

    Their transactions are committed on this server already, and nothing else can end such a wait.
    """
    query = """select pg_catalog.pg_cancel_backend(a.pid) from pg_catalog.pg_stat_activity a
                where a.pid operator(pg_catalog.=) any (%s) and a.wait_event operator(pg_catalog.=) 'SyncRep'"""
    for dsn, sessions in sessions_by_database("gdq").items():
        with contextlib.suppress(psycopg.Error), psycopg.connect(dsn, autocommit=True) as other:
            other.execute(query, [list(sessions)])


def _pin(connection: AnyConnection) -> Steps[bool]:
    """Pin the settings of a new session by one small statement; False behind a pooler, see is_pooled().

    A pooler would hand the settings on to its other clients.
    """
    info = connection.info
    settings = _PINNED | {name: "0" for name in _TIMEOUTS if name not in info.options}
    if info.server_version < 170000:
        settings.pop("transaction_timeout", None)
    values = {name: f"'{value}'" for name, value in settings.items()} | {"search_path": _SEARCH_PATH}
    listed = ", ".join(f"pg_catalog.set_config('{name}', {value}, false)" for name, value in values.items())
    query = f"""select pid, case when pid operator(pg_catalog.=) {info.backend_pid} then array[{listed}] end
                  from pg_catalog.pg_backend_pid() p(pid)"""
    pid = yield Statement(raw(query), prepare=False)
    return bool(pid == info.backend_pid)


@contextlib.contextmanager
def target_conninfo(dsn: str) -> Iterator[str]:
    """The connection string of a view's target, which takes no password from this process's environment.

    The target's host was named by whoever made the view: PGPASSWORD and PGSERVICE are the refresher's. A password comes
    from a connection service that `dsn` names, or from the password file, which says which host may have it.
    """
    parameters: dict[str, Any] = dict(conninfo_to_dict(dsn))
    if "service" not in parameters:
        # an empty password is taken for none, and keeps libpq from looking into environment and service
        yield make_conninfo(
            **({"password": "", "gssdelegation": "0"} if _KNOWS_DELEGATION else {"password": ""}) | parameters
        )
        return
    with _environment_lock:
        taken = os.environ.pop("PGPASSWORD", None)
        try:
            yield dsn
        finally:
            if taken is not None:
                os.environ["PGPASSWORD"] = taken


def take_utf8(connection: AnyConnection) -> Steps[None]:
    """Set the encoding of a caller's connection to UTF8. Needs an idle autocommit connection."""
    if connection.info.parameter_status("client_encoding") != "UTF8":
        yield Statement("set client_encoding = 'UTF8'", result=False)


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """True behind a pooler, see pooled_steps(). Needs an idle autocommit connection."""
    return run(connection, pooled_steps(connection))


def pooled_steps(connection: AnyConnection) -> Steps[bool]:
    """True behind a pooler such as PgBouncer, which may give every transaction another session of the server.

    Then nothing outlives a transaction: no LISTEN, no prepared statement, no SET. The test: a pooler gives its client
    another process id than the server's.
    """
    return bool((yield Statement("select pg_catalog.pg_backend_pid()")) != connection.info.backend_pid)


def conninfo_of(connection: AnyConnection) -> str:
    """The connection string of a live connection, with its password: for a second connection to the same database.

    If several servers were listed, it names the connected one: another may lack its commits.
    """
    info = connection.info
    parameters: dict[str, Any] = info.get_parameters()
    if info.password:
        parameters["password"] = info.password
    return make_conninfo(**parameters)


def conninfo_from(connection: Connectable) -> str | None:
    """The connection string for a session of one's own: that of a live connection, or the given one."""
    return conninfo_of(connection) if isinstance(connection, psycopg.Connection) else connection


@contextlib.contextmanager
def conninfo_without_password(dsn: str) -> Iterator[str]:
    """`dsn` with its password moved to a file that only this account can read: for plans, logs and worker processes.

    The file is removed after the block. A connection string without a password stays unchanged: workers on other
    machines use their own PGPASSFILE or connection service.
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


def conninfo_for_other_machines(dsn: str, given: str) -> str:
    """The result of conninfo_without_password() for other machines, which lack this machine's password file.

    A password that libpq found in a file or the environment is left out: other machines use their own. A password in
    the user's connection string `given` stays in the file, which serves workers on this machine only.
    """
    parameters: dict[str, Any] = dict(conninfo_to_dict(dsn))
    if not {"password", "passfile"} & conninfo_to_dict(given).keys():
        parameters.pop("passfile", None)
    return make_conninfo(**parameters)
