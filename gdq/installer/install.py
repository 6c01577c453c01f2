"""Install, upgrade and remove gdq's schemas: Alembic revisions for tables, repeatable files for functions.

One transaction holds everything. The same statements are run online by install() and printed by install_script().
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psycopg

from gdq.call import call, scalar, try_while_locked
from gdq.conninfo import Connectable, connect, conninfo_from
from gdq.errors import InstallError, notice_line
from gdq.installer import version
from gdq.qualified_sql import qualified

if TYPE_CHECKING:
    from alembic.config import Config

_FOLDER = Path(__file__).parent.parent

# Alembic keeps the migration at hand in module globals: one at a time in a process.
_ALEMBIC = threading.Lock()


def _sql(name: str) -> str:
    return (Path(__file__).parent / "sql" / f"{name}.sql").read_text(encoding="utf-8")


_PREFLIGHT = _sql("preflight")

# perform, so that psql prints nothing.
_LOCK = """do $lock$
begin
  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq schema', 0));
end
$lock$"""

# The files run in name order, so a body may name a function that comes later. Notices of revisions reach the user, the
# server's own notices about functions do not.
_SETTINGS = """set local search_path = pg_catalog, pg_temp;
set local check_function_bodies = off;
set local standard_conforming_strings = on"""
# A session that waits for a strong lock blocks all sessions behind it, and the DDL guard waits 100 ms. So an upgrade
# gives up sooner and tries again. It holds the lock above meanwhile, so other installs wait.
_LOCK_TIMEOUT = "set local lock_timeout = '80ms'"
_PATIENCE_SECONDS = 60.0
_QUIET = "set local client_min_messages = warning"
_LOUD = "set local client_min_messages = notice"

_GRANT_ROLES = """do $roles$
begin
  perform gdq.grant_roles();
end
$roles$"""

# After GRANT, since it is for the functions that roles may call.
_PIN_SETTINGS = """do $pin$
begin
  perform gdq.pin_settings();
end
$pin$"""

# Regenerates the functions of the existing queues; maintain() makes their readers.
_WRITERS = """do $writers$
begin
  perform gdq.replace_writers();
  perform gdq.drop_readers();
end
$writers$"""

# The last step, since it blocks DDL on these tables.
_RENEW = """do $renew$
begin
  perform gdq.renew_capture(nullif(pg_catalog.current_setting('gdq.sound_tables', true), '')::integer[]);
end
$renew$"""


@dataclass(frozen=True, slots=True)
class InstallResult:
    """Result of install(). `changed`: something was written; `event_triggers`: they exist.

    `notices`: the server's messages for the user.
    """

    revision: str
    changed: bool
    event_triggers: bool
    notices: tuple[str, ...]


def install(connection: Connectable = None, *, patience: float = _PATIENCE_SECONDS) -> InstallResult:
    """Install or upgrade gdq in one transaction; safe beside writers, consumers and other installs.

    Writers never wait for it. Consumers, tickers and DDL wait only while it has its locks, not while it waits for them:
    if others hold a lock, it tries again for `patience` seconds. A given connection only names the database.
    Writes: schemas gdq and gdq_log; the roles gdq_capture, gdq_admin, gdq_consumer and gdq_reader and the event
    triggers if it may create them. Changed functions are recreated and keep the users' GRANTs.
    InstallError if a newer gdq installed the schema, or gdq is busy; psycopg.Error if the server refuses.
    """
    dsn = conninfo_from(connection)
    try:
        return try_while_locked(lambda: _install(dsn), patience, pause_max=0.3)
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
        raise InstallError(
            f"gdq is busy: {_holders(dsn)} what the upgrade changes; nothing was changed",
            hint="Let that end, or end it, and install again.",
        ) from error


def _install(dsn: str | None) -> InstallResult:
    from sqlalchemy import NullPool, create_engine  # noqa: PLC0415 (slow to load)

    notices: list[str] = []

    def creator() -> psycopg.Connection[Any]:
        connection = connect(dsn, application_name="gdq install")
        connection.add_notice_handler(lambda diag: notices.append(notice_line(diag)))
        return connection

    engine = create_engine("postgresql+psycopg://", creator=creator, poolclass=NullPool)
    with _native_errors(), engine.begin() as connection:
        raw = cast("psycopg.Connection[Any]", connection.connection.driver_connection)
        _run(raw, _LOCK, _LOCK_TIMEOUT, _SETTINGS, _sql("check_owner"), _PREFLIGHT)
        config = _config()
        head, before = _head(config), _revision(raw)
        changed = before != head or version.installed_mark(raw) != version.version_mark()
        if changed:
            config.attributes["connection"] = connection
            if raw.execute(
                qualified("select from pg_catalog.pg_proc where pronamespace = 'gdq'::regnamespace limit 1")
            ).rowcount:
                # what changes is known when it has been done once
                _run(raw, "savepoint gdq_trial")
                _replace(raw, config, before)
                new = raw.execute(_sql("signatures")).fetchone()
                _run(raw, "rollback to savepoint gdq_trial", "release savepoint gdq_trial")
                raw.execute(qualified("select set_config('gdq.signatures', %s, true)"), new)
                # a very old one knows no faults
                with contextlib.suppress(psycopg.ProgrammingError), raw.transaction():
                    raw.execute(_sql("sound_tables"))
                notices.clear()
            _replace(raw, config, before)
        _run(raw, _QUIET, _sql("event_triggers"))
        event_triggers = bool(scalar(raw, "select gdq.event_triggers_on()"))
        return InstallResult(head, changed, event_triggers, tuple(notices))


def _holders(dsn: str | None) -> str:
    """The sessions that hold locks on gdq's tables, as text: "pid 12 (gdq ticker) holds"."""
    query = qualified("""
        select distinct a.pid, case when a.application_name <> '' then a.application_name else a.usename end
                 from pg_catalog.pg_locks l join pg_catalog.pg_class c on c.oid = l.relation
                 join pg_catalog.pg_stat_activity a on a.pid = l.pid and a.datname = pg_catalog.current_database()
                where c.relnamespace = pg_catalog.to_regnamespace('gdq') and l.granted and c.relkind <> 'i'
                  and l.database = a.datid and l.pid <> pg_catalog.pg_backend_pid() order by 1""")
    with connect(dsn) as connection:
        pids = [f"pid {pid} ({name})" for pid, name in connection.execute(query)]
    return f"{', '.join(pids)} {'holds' if len(pids) == 1 else 'hold'}" if pids else "somebody held"


def install_script() -> str:
    """The SQL of a first install, for psql: one transaction with the checks of install(). Does not connect."""
    buffer = io.StringIO()
    _upgrade(_config(buffer), None, offline=True)
    begin = (_LOCK, _SETTINGS, _sql("check_owner"), _PREFLIGHT, _sql("fresh"), _sql("drop_functions"))
    return _transaction((*begin, buffer.getvalue(), *_function_statements(), _sql("event_triggers")))


def uninstall(connection: psycopg.Connection[Any]) -> bool:
    """Drop everything of gdq; the user's tables lose only its triggers. False if gdq was not installed.

    The roles stay if another database of the cluster uses them, or if they have members.
    psycopg.errors.LockNotAvailable if writers hold a captured table for a second: nothing is changed, try again.
    """
    known = scalar(
        connection, qualified("select coalesce(to_regnamespace('gdq'), to_regnamespace('gdq_log')) is not null")
    )
    _run(connection, _LOCK, _SETTINGS, _sql("check_owner"), _sql("uninstall"))
    return bool(known)


def uninstall_script() -> str:
    """The SQL that uninstall() runs, for psql. Does not connect."""
    return _transaction((_LOCK, _SETTINGS, _sql("check_owner"), _sql("uninstall")))


def create_event_triggers(connection: psycopg.Connection[Any]) -> bool:
    """Create the event triggers that follow DDL, on most servers only as a superuser; False if they existed."""
    return bool(call(connection, "create_event_triggers"))


def _config(buffer: io.StringIO | None = None) -> Config:
    from alembic.config import Config  # noqa: PLC0415 (slow to load)

    config = Config(output_buffer=buffer) if buffer else Config()
    config.set_main_option("script_location", str(_FOLDER / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _head(config: Config) -> str:
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    with _ALEMBIC:
        head = ScriptDirectory.from_config(config).get_current_head()
    if head is None:
        raise InstallError(f"no revisions in {_FOLDER / 'migrations'}: this copy of gdq is incomplete")
    return head


def _replace(connection: psycopg.Connection[Any], config: Config, before: str | None) -> None:
    """Bring tables to the newest revision and replace the functions."""
    # drop functions first: one may depend on the row type of a table that a revision changes
    _run(connection, _sql("drop_functions"))
    kept = dict(connection.execute(_sql("used_functions")).fetchall())
    _upgrade(config, before)
    with _named_users(kept):
        _run(connection, *_function_statements())


def _upgrade(config: Config, before: str | None, *, offline: bool = False) -> None:
    from alembic import command  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    try:
        with _ALEMBIC:
            command.upgrade(config, "head", sql=offline)
    except CommandError as error:
        raise InstallError(
            f"the schema is at revision {before}, which this gdq does not know", hint="Upgrade gdq itself."
        ) from error


def _revision(connection: psycopg.Connection[Any]) -> str | None:
    if not scalar(connection, "select pg_catalog.to_regclass('gdq.schema_version') is not null"):
        return None
    revision: str | None = scalar(connection, "select version_num from gdq.schema_version")
    return revision


def _function_statements() -> tuple[str, ...]:
    """The statements that create all functions, the mark for the next install, privileges and generated objects."""
    texts = (
        *version.function_texts(),
        _WRITERS,
        _sql("restore_grants"),
        f"comment on schema gdq is '{version.version_mark()}'",
    )
    return (_QUIET, *texts, _LOUD, _GRANT_ROLES, _PIN_SETTINGS, _RENEW)


def _run(connection: psycopg.Connection[Any], *statements: str) -> None:
    for statement in statements:
        connection.execute(statement)


def _transaction(statements: tuple[str, ...]) -> str:
    ended = "".join(statement.strip().removesuffix(";") + ";\n\n" for statement in statements)
    return f"begin isolation level read committed;\n\n{ended}commit;\n"


@contextlib.contextmanager
def _named_users(kept: dict[str, str]) -> Iterator[None]:
    """InstallError naming the object that prevents a function's change; `kept`: functions and their dependents."""
    try:
        yield
    except psycopg.errors.InvalidFunctionDefinition as error:
        name = (error.diag.message_hint or "").removeprefix("Use DROP FUNCTION ").removesuffix(" first.")
        raise InstallError(
            f"function {name} changes, and is used by {kept.get(name, 'something')}",
            detail=error.diag.message_primary,
            hint="Drop what uses it, install, and make it again.",
        ) from error


@contextlib.contextmanager
def _native_errors() -> Iterator[None]:
    """Raise the driver's own errors in place of SQLAlchemy's."""
    from sqlalchemy.exc import DBAPIError  # noqa: PLC0415

    try:
        yield
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.Error):
            raise error.orig from None
        raise
