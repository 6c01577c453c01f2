"""The output of every listing: a table with units for people, --wide for all its columns, --json for programs.

A table has at most ten columns and wraps on a terminal; in a pipe a row is one line. JSON is an array of objects with
all columns and raw numbers, whose unit ends the key: lag_seconds, log_bytes.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal

import click

from gdq.cli.base import CommandFunction, command_session
from gdq.cli.terminal import printable
from gdq.json_text import json_text
from gdq.source import iso_utc
from gdq.units import size, span

if TYPE_CHECKING:
    from rich.table import Table

# How a listing is shown; None: as a table of few columns.
Shape = Literal["json", "wide"] | None

# Headings that are not the column's name without its kind.
_HEADINGS = {
    "events_since_tick": "new events",
    "events_per_second": "events/s",
    "unread_events": "unread",
    "dead_letters": "dead",
    "ev_id": "event",
    "dead_letter_id": "id",
    "tbl": "table",
    "last_action": "action",
    "rows_changed": "changed",
    "started_at": "started",
    "seconds": "time",
}
_ENDINGS = ("_name", "_bytes", "_seconds")

# Numbers that name something, and are copied rather than compared.
_NUMBERS = {
    "id",
    "xid",
    "ev_id",
    "ev_txid",
    "dead_letter_id",
    "batch_id",
    "queue_id",
    "last_tick",
    "tick",
    "tick_from",
    "tick_to",
    "version",
}
_NUMBERS |= {"last_value", "last_event"}

# Columns of seconds whose names do not say so.
_SECONDS = {"seconds", "audit_credit", "audit_need"}


def listing_options(command: CommandFunction) -> CommandFunction:
    """--wide and --json, for every listing: the parameter `shape`."""
    command = click.option("--json", "shape", flag_value="json", help="Print a JSON array of objects.")(command)
    return click.option("--wide", "shape", flag_value="wide", help="All columns, with times instead of ages.")(command)


def list_rows(
    dsn: str | None,
    listing: Callable[..., Sequence[Any]],
    *arguments: Any,
    row_type: type,
    columns: Sequence[str],
    shape: Shape,
) -> None:
    """Print the rows that a listing function of the library returns for a connection and these arguments."""
    with command_session(dsn) as connection:
        found = listing(connection, *arguments)
    print_rows(found, row_type, columns, shape)


def print_rows(found: Sequence[Any], row_type: type, columns: Sequence[str], shape: Shape) -> None:
    """Print dataclasses of a type: some columns as a table, all of them with shape wide or json."""
    if shape == "json":
        print_json(found)
        return
    names = _columns(row_type) if shape == "wide" else list(columns)
    lines = [[cell(name, getattr(row, name), exact=shape == "wide") for name in names] for row in found]
    right = [_is_number(row_type, name) for name in names]
    if on_terminal():
        _print_on_terminal([heading(name) for name in names], lines, right)
    else:
        _print_plain([heading(name) for name in names], lines, right)


def print_json(found: Sequence[Any]) -> None:
    """Print dataclasses as a JSON array of objects, an object a line."""
    click.echo("[" + ",\n ".join(json_text(json_record(row), json_value) for row in found) + "]")


def json_record(row: Any) -> dict[str, Any]:
    """A dataclass as a JSON object: keys of times end with _seconds, also where the value is null."""
    return {_json_key(type(row), name): getattr(row, name) for name in _columns(type(row))}


def json_value(value: Any) -> Any:
    """JSON value of types that JSON lacks: intervals in seconds, times in UTC."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime):
        return iso_utc(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


def on_terminal() -> bool:
    """True if stdout is a terminal, which has a width; in a pipe nothing may be folded."""
    return sys.stdout.isatty()


def grid(*columns: tuple[str, bool]) -> Table:
    """A table of rich without lines, for (heading, right-justified) columns."""
    from rich.table import Table  # noqa: PLC0415 (not needed in a pipe)

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, right in columns:
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def add_row(table: Table, cells: Sequence[str]) -> None:
    """Add a row of texts to a table of rich, which reads no markup in them."""
    from rich.text import Text  # noqa: PLC0415 (not needed in a pipe)

    table.add_row(*(Text(printable(text)) for text in cells))


def heading(name: str) -> str:
    """The heading of a column: its name in words, without the kind that every value shows."""
    if name in _HEADINGS:
        return _HEADINGS[name]
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name.replace("_", " ")


def cell(name: str, value: Any, *, exact: bool = False) -> str:
    """A value with its unit, without control characters; `exact`: a time is not shown as an age."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case timedelta():
            return span(value.total_seconds())
        case datetime():
            return iso_utc(value) if exact else _ago(value)
        case int() if name.endswith("_bytes"):
            return size(value)
        case int() if name not in _NUMBERS:
            return f"{value:,}"
        case float():
            return span(value) if name in _SECONDS or name.endswith("_seconds") else f"{value:,.1f}"
        case dict():
            return printable(json_text(value, json_value))
        case list():
            return printable(",".join(map(str, value)))
    return printable(str(value))


def _ago(moment: datetime) -> str:
    """How long ago a moment was, or how far ahead it is, in one unit."""
    seconds = (datetime.now(UTC) - moment).total_seconds()
    whole = abs(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if whole >= length or unit == "s":
            text = f"{whole // length:,.0f} {unit}"
            return f"in {text}" if seconds <= -1 else f"{text} ago"
    raise AssertionError(moment)


def _print_on_terminal(headings: list[str], lines: list[list[str]], right: list[bool]) -> None:
    from rich.console import Console  # noqa: PLC0415 (not needed in a pipe)

    table = grid(*zip(headings, right, strict=True))
    for line in lines:
        add_row(table, line)
    Console(highlight=False).print(table)


def _print_plain(headings: list[str], lines: list[list[str]], right: list[bool]) -> None:
    table = [headings, *lines]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = zip(line, widths, right, strict=True)
        texts = (text.rjust(width) if number else text.ljust(width) for text, width, number in cells)
        click.echo("  ".join(texts).rstrip())


def _columns(row_type: type) -> list[str]:
    """The columns of a dataclass; keyword-only fields are for the library alone."""
    return [field.name for field in dataclasses.fields(row_type) if not field.kw_only]


def _kinds(row_type: type, name: str) -> set[type]:
    """The types that a column's values may have, but None."""
    hint = typing.get_type_hints(row_type)[name]
    hints = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return {one for one in hints if isinstance(one, type)}


def _is_number(row_type: type, name: str) -> bool:
    return bool(_kinds(row_type, name) & {int, float, timedelta})


def _json_key(row_type: type, name: str) -> str:
    named = name in _SECONDS and name != "seconds"
    return f"{name}_seconds" if named or timedelta in _kinds(row_type, name) else name
