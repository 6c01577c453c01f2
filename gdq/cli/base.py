"""Shared parts of all commands: common options, connections, output, errors, and stopping by signal."""

from __future__ import annotations

import contextlib
import csv
import logging
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any, TypeVar

import click
import psycopg
from psycopg import Connection

from gdq.call import try_while_locked
from gdq.cli.names import with_commands
from gdq.cli.sections import COMMAND_CONTEXT
from gdq.cli.terminal import printable
from gdq.conninfo import connect, end_commit_waits, resolve_conninfo
from gdq.errors import GdqError, ResyncRequired, error_from_server, notice_line
from gdq.extra import missing_extra
from gdq.installer.version import check_version

# Errors that are shown as one line, without a traceback.
EXPECTED_ERRORS = (psycopg.Error, GdqError)

# 1000 years.
_SECONDS_MAX = 1000 * 365.25 * 86400

# Seconds after a signal that a COMMIT may wait for a synchronous standby.
_COMMIT_SECONDS = 1.0

_T = TypeVar("_T")
CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])


class CommandFailure(click.ClickException):
    """A failed command: one line, then the server's detail and hint."""

    def __init__(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.detail = detail
        self.hint = hint and with_commands(hint)

    def show(self, file: IO[Any] | None = None) -> None:
        stream = file or sys.stderr
        click.echo(printable(f"Error: {self.message}"), file=stream)
        if self.detail:
            click.echo(printable(f"Detail: {self.detail}", lines=True), file=stream)
        if self.hint:
            click.echo(printable(f"Hint: {self.hint}"), file=stream)


class FoundWanting(CommandFailure):
    """A check found a problem: the command worked, and the answer is no."""

    exit_code = 3


class Interrupted(CommandFailure):
    """A command that a signal ended before its work was done; the exit code is a shell's for Ctrl-C."""

    exit_code = 130

    def __init__(self, message: str = "interrupted") -> None:
        super().__init__(message)
        # After Ctrl-C within code that Python made of a text, as in the import of a dataclass, `python -m` kills itself
        # by SIGINT whatever the exit code, until such code has ended well.
        eval("None")


def is_expected(error: Exception) -> bool:
    """True if the user reads the error as one line: an error of gdq or psycopg, or a missing package of an extra."""
    return isinstance(error, EXPECTED_ERRORS) or missing_extra(error) is not None


def command_failure(error: Exception) -> CommandFailure:
    """The CommandFailure that shows an expected error to the user."""
    if isinstance(error, psycopg.Error):
        own = error_from_server(error)
        if own is None:
            diag = error.diag
            message = diag.message_primary or str(error).partition("\n")[0]
            hint = diag.message_hint or _noted_hint(error)
            return CommandFailure(message, diag.message_detail, hint or _hint(error, message))
        error = own
    if isinstance(error, GdqError):
        kind = FoundWanting if isinstance(error, ResyncRequired) else CommandFailure
        return kind(str(error), error.detail, error.hint)
    extra = missing_extra(error)
    if extra is not None:
        package = str(getattr(error, "name", "")).partition(".")[0]
        return CommandFailure(f"this needs the Python package {package}", hint=f"pip install 'gdq[{extra}]'")
    return CommandFailure(str(error))


def _hint(error: psycopg.Error, message: str) -> str | None:
    """What to do about an error for which the server itself has no hint."""
    match error:
        case psycopg.errors.InvalidSchemaName() if '"gdq"' in message:
            return "Is gdq installed in this database? gdq install"
        case psycopg.errors.InvalidName():
            return """Put names with spaces or capitals in double quotes, in a shell within single ones: 'a."My T"'."""
        case psycopg.errors.CharacterNotInRepertoire():
            return "A row has text that is no UTF-8: `gdq docs guarantees` says under Encoding how to go on."
        case psycopg.errors.ReadOnlySqlTransaction():
            return "Connect to the primary server, by a role whose default_transaction_read_only is off."
        case psycopg.errors.InsufficientPrivilege() if "gdq" in message:
            return "Have an administrator grant gdq_reader, gdq_consumer or gdq_admin: gdq docs security"
    return None


def _noted_hint(error: Exception) -> str | None:
    """The hint that gdq has added to an error of psycopg as a note."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix("Hint: ") for note in notes if note.startswith("Hint: ")), None)


def dsn_option(command: CommandFunction) -> CommandFunction:
    """-d/--dsn, for every command that connects."""
    return click.option(
        "-d",
        "--dsn",
        metavar="CONNINFO",
        callback=_check_dsn,
        help="Connection string or URI. Default: GDQ_DSN, DATABASE_URL, then libpq's PG* variables.",
    )(command)


def json_option(command: CommandFunction) -> CommandFunction:
    """--json, for findings."""
    return click.option("--json", "as_json", is_flag=True, help="Print a JSON array of objects.")(command)


def json_object_option(command: CommandFunction) -> CommandFunction:
    """--json, for commands that print one object."""
    return click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")(command)


class Seconds(click.FloatRange):
    """A time in seconds: a number, and at most 1000 years, so that times and intervals can hold it."""

    def __init__(self, least: float = 0) -> None:
        super().__init__(min=least)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not number <= _SECONDS_MAX:
            self.fail(f"{value} is no number of seconds within 1000 years.", param, ctx)
        return number


def slot_wait_option(command: CommandFunction) -> CommandFunction:
    """--slot-wait, for commands that read a logical slot."""
    return click.option(
        "--slot-wait",
        type=Seconds(),
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help="With --source slot: wait this long for another reader to leave the slot.",
    )(command)


def sql_option(command: CommandFunction) -> CommandFunction:
    """--sql, for commands that can print their SQL."""
    return click.option("--sql", "as_sql", is_flag=True, help="Print the SQL for psql, without connecting.")(command)


def show_all_logs() -> None:
    """Show what a user's own code logs as gdq's lines are shown, unless that code shows it by itself."""
    gdqs = logging.getLogger("gdq")
    gdqs.propagate = False
    root = logging.getLogger()
    if not root.handlers:
        root.handlers[:] = gdqs.handlers
        root.setLevel(gdqs.level)


def talk(message: str) -> None:
    """Print a message on stderr, since stdout is for data; not with --quiet."""
    context = click.get_current_context(silent=True)
    if context is None or not context.find_root().params.get("quiet"):
        click.echo(printable(message, lines=True), err=True)


def talk_of_threads() -> Callable[[str], None]:
    """talk() for all threads of the command: click knows the command's options in its own thread alone."""
    context = click.get_current_context()

    def tell(line: str) -> None:
        with context.scope(cleanup=False):
            talk(line)

    return tell


def split_names(text: str | None) -> list[str] | None:
    """The names in a comma-separated list; a name with a comma is put in double quotes, as in CSV."""
    if text is None:
        return None
    return [name.strip() for name in next(csv.reader([text], skipinitialspace=True), [])]


def split_table_names(text: str | None) -> list[str] | None:
    """The tables in a comma-separated list, written as in SQL: quoted if necessary."""
    if text is None:
        return None
    return [name.strip() for name in re.findall(r'(?:"[^"]*"|[^,"])+', text)]


def connect_checked(dsn: str | None, application_name: str = "gdq", *, any_version: bool = False) -> Connection[Any]:
    """An autocommit connection to a database with a compatible gdq, by check_version()."""
    connection = connect(dsn, application_name=application_name, autocommit=True)
    try:
        if not any_version:
            check_version(connection)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def command_session(
    dsn: str | None, *, autocommit: bool = False, any_version: bool = False
) -> Iterator[Connection[Any]]:
    """A connection whose NOTICE and WARNING lines go to stderr; commits at the end unless `autocommit`."""
    with connect_checked(dsn, any_version=any_version) as connection:
        connection.autocommit = autocommit
        connection.add_notice_handler(lambda diag: talk(notice_line(diag)))
        yield connection


def retry_locked(dsn: str | None, action: Callable[[Connection[Any]], _T], *, any_version: bool = False) -> _T:
    """The result of `action` in a transaction; retried while writers hold its locks."""
    with command_session(dsn, autocommit=True, any_version=any_version) as connection:

        def in_transaction() -> _T:
            with connection.transaction():
                return action(connection)

        return try_while_locked(in_transaction)


class StopSignals:
    """True once SIGTERM or SIGINT came. The first signal lets the work at hand finish.

    The second one raises KeyboardInterrupt, so that the open transaction is rolled back. Work that waits for a
    synchronous standby after its COMMIT counts as finished. While nothing is at hand, as before a connection is made,
    the first signal ends the program.
    """

    def __init__(self) -> None:
        self._asked = False
        self.at_hand = True
        self._reader, self._writer = os.pipe()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        threading.Thread(target=self._end_commit_waits, daemon=True).start()

    def __call__(self) -> bool:
        return self._asked

    def sleep(self, seconds: float) -> bool:
        """Sleep until the time is over or a signal comes; True if a signal came."""
        if not self._asked:
            select.select([self._reader], [], [], seconds)
        return self._asked

    def connect(self, dsn: str | None, application_name: str) -> Connection[Any]:
        """connect_checked(), which the first signal interrupts."""
        with self.nothing_at_hand():
            return connect_checked(dsn, application_name)

    @contextmanager
    def nothing_at_hand(self) -> Iterator[None]:
        """Let the first signal interrupt the block."""
        self.at_hand = False
        try:
            yield
        finally:
            self.at_hand = True

    def _end_commit_waits(self) -> None:
        select.select([self._reader], [], [])
        while True:
            time.sleep(_COMMIT_SECONDS)
            end_commit_waits()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self.at_hand and number == signal.SIGTERM:
            sys.exit(0)  # a service that its manager stops while the server is down has not failed
        if not self.at_hand or self._asked:
            raise KeyboardInterrupt
        self._asked = True
        os.write(self._writer, b"!")


def _check_dsn(context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """The connection string of a command, which may also stand before the command; a usage error if it is malformed."""
    context.meta[COMMAND_CONTEXT] = context
    value = value or context.find_root().params.get("dsn")
    try:
        resolve_conninfo(value)
    except psycopg.ProgrammingError as error:
        message = f"{error}. {_noted_hint(error)}"
        raise (click.BadParameter(message) if value else click.UsageError(message)) from error
    return value
