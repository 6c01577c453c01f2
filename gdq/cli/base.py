"""What all commands share: the connection option, output, errors, and how long they go on."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from types import FrameType
from typing import IO, Any, TypeVar

import click
import psycopg
from psycopg import Connection

from gdq.call import try_while_locked
from gdq.conninfo import connect, resolve
from gdq.errors import GdqError, ResyncRequired, from_server, notice_line
from gdq.installer.version import check_version
from gdq.source import iso_utc

# The errors that a user reads as one line, without a traceback.
EXPECTED = (psycopg.Error, GdqError)

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


class Failure(click.ClickException):
    """A failed command: one line, then the server's detail and hint."""

    def __init__(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.detail = detail
        self.hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        stream = file or sys.stderr
        click.echo(f"Error: {self.message}", file=stream)
        if self.detail:
            click.echo(f"Detail: {self.detail}", file=stream)
        if self.hint:
            click.echo(f"Hint: {self.hint}", file=stream)


class Wanting(Failure):
    """Checked and found wanting: the command did its work, the answer is no."""

    exit_code = 3


def failure(error: Exception) -> Failure:
    """An error of gdq or of psycopg as what the user reads."""
    if isinstance(error, psycopg.Error):
        own = from_server(error)
        if own is None:
            diag = error.diag
            message = diag.message_primary or str(error).partition("\n")[0]
            hint = diag.message_hint
            if error.sqlstate == "3F000" and hint is None:
                hint = "Is gdq installed in this database? gdq install"
            return Failure(message, diag.message_detail, hint)
        error = own
    if isinstance(error, GdqError):
        kind = Wanting if isinstance(error, ResyncRequired) else Failure
        return kind(str(error), error.detail, error.hint)
    return Failure(str(error))


def dsn_option(command: Command) -> Command:
    """-d/--dsn, on every command that connects."""
    return click.option(
        "-d",
        "--dsn",
        metavar="CONNINFO",
        callback=_check_dsn,
        help="Connection string or URI. Else GDQ_DSN, DATABASE_URL, then libpq's PG* variables.",
    )(command)


def json_option(command: Command) -> Command:
    """--json, on every listing."""
    return click.option("--json", "as_json", is_flag=True, help="Print a JSON array of objects.")(command)


def json_object_option(command: Command) -> Command:
    """--json, where a command prints one thing."""
    return click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")(command)


def slot_wait_option(command: Command) -> Command:
    """--slot-wait, where a command reads a logical slot."""
    return click.option(
        "--slot-wait",
        type=click.FloatRange(min=0),
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help="With --source slot: wait this long for another reader to leave the slot.",
    )(command)


def sql_option(command: Command) -> Command:
    """--sql, where a command can print what it would run."""
    return click.option("--sql", "as_sql", is_flag=True, help="Print the SQL for psql; connect to nothing.")(command)


def talk(message: str) -> None:
    """Say on stderr what was done; stdout is for data."""
    context = click.get_current_context(silent=True)
    if context is None or not context.find_root().params.get("quiet"):
        click.echo(message, err=True)


def names(text: str | None) -> list[str] | None:
    """A comma-separated list of names; one with a comma in it is put in double quotes, as in CSV."""
    if text is None:
        return None
    return [name.strip() for name in next(csv.reader([text], skipinitialspace=True), [])]


def table_names(text: str | None) -> list[str] | None:
    """A comma-separated list of tables as SQL has them: quoted where their names need it."""
    if text is None:
        return None
    return [name.strip() for name in re.findall(r'(?:"[^"]*"|[^,"])+', text)]


def connect_checked(dsn: str | None, application_name: str = "gdq", *, any_version: bool = False) -> Connection[Any]:
    """An autocommit connection to a database whose gdq this one can work with: check_version()."""
    connection = connect(dsn, application_name=application_name, autocommit=True)
    try:
        if not any_version:
            check_version(connection)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def session(dsn: str | None, *, autocommit: bool = False, any_version: bool = False) -> Iterator[Connection[Any]]:
    """A connection whose NOTICE and WARNING lines go to stderr; committed at the end unless `autocommit`."""
    with connect_checked(dsn, any_version=any_version) as connection:
        connection.autocommit = autocommit
        connection.add_notice_handler(lambda diag: talk(notice_line(diag)))
        yield connection


def retry_locked(dsn: str | None, action: Callable[[Connection[Any]], T], *, any_version: bool = False) -> T:
    """The result of `action` in a transaction; tried again while writers hold what it must lock."""
    with session(dsn, autocommit=True, any_version=any_version) as connection:

        def in_transaction() -> T:
            with connection.transaction():
                return action(connection)

        return try_while_locked(in_transaction)


def print_rows(rows: Sequence[Any], columns: Sequence[str], *, as_json: bool) -> None:
    """Print dataclasses as aligned text under a header, or as a JSON array of objects."""
    records = [{name: getattr(row, name) for name in columns} for row in rows]
    if as_json:
        lines = (json.dumps(record, default=json_value, ensure_ascii=False) for record in records)
        click.echo("[" + ",\n ".join(lines) + "]")
        return
    table = [list(columns)] + [[_cell(value) for value in record.values()] for record in records]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def list_rows(
    dsn: str | None, listing: Callable[..., Sequence[Any]], *arguments: Any, columns: Sequence[str], as_json: bool
) -> None:
    """Print the rows that a listing function of the library returns for a connection and these arguments."""
    with session(dsn) as connection:
        rows = listing(connection, *arguments)
    print_rows(rows, columns, as_json=as_json)


def fields(row_type: type) -> list[str]:
    """The column names of a row's dataclass."""
    return [field.name for field in dataclasses.fields(row_type)]


class Stop:
    """Whether SIGTERM or SIGINT asked to end. The first one lets the work at hand finish, the second one does not.

    The second raises KeyboardInterrupt where the program is, so that the open transaction is rolled back.
    """

    def __init__(self) -> None:
        self._asked = False
        self._reader, self._writer = os.pipe()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        return self._asked

    def sleep(self, seconds: float) -> bool:
        """Sleep, or wake when asked to stop; True when asked."""
        if not self._asked:
            select.select([self._reader], [], [], seconds)
        return self._asked

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        os.write(self._writer, b"!")


def _check_dsn(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    try:
        resolve(value)
    except psycopg.ProgrammingError as error:
        raise click.BadParameter(str(error).strip()) from error
    return value


def json_value(value: Any) -> Any:
    """What JSON has no form for: intervals in seconds, times in UTC."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime):
        return iso_utc(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case dict():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return ",".join(map(str, value))
        case datetime():
            return str(json_value(value))
    return str(value)
