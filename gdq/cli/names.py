"""Names in the database: completed by a shell, and suggested where an argument of a command is near one of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
import psycopg
from click.shell_completion import CompletionItem
from psycopg import Connection

import gdq
from gdq.cli.sections import COMMANDS
from gdq.conninfo import connect
from gdq.errors import GdqError
from gdq.view.group import group_info

# Each with and without its schema, if the search_path finds it.
_RELATIONS = """select c.oid::pg_catalog.regclass::pg_catalog.text,
                       pg_catalog.concat(n.oid::pg_catalog.regnamespace, '.', pg_catalog.quote_ident(c.relname))
                  from pg_catalog.pg_class c
                  join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) c.relnamespace
                 where c.relkind operator(pg_catalog.=) any (%s::pg_catalog."char"[])
                   and n.nspname operator(pg_catalog.!~) '^(pg_|gdq|information_schema)'"""

# What an argument of this name names, and how those that exist are found.
_LISTS: dict[str, tuple[str, Callable[[Connection[Any]], list[str]]]] = {
    "queue": ("queue", lambda connection: [info.queue_name for info in gdq.queue_info(connection)]),
    "consumer": ("consumer", lambda connection: [info.consumer_name for info in gdq.consumer_info(connection)]),
    "member": ("member", lambda connection: [info.member_name for info in gdq.member_info(connection)]),
    "table": ("table", lambda connection: _relations(connection, "r", "p")),
    "tables": ("table", lambda connection: _relations(connection, "r", "p")),
    "sequence": ("sequence", lambda connection: _relations(connection, "S")),
    "name": ("view", lambda connection: [info.view_name for info in gdq.view_info(connection)]),
    "view": ("view", lambda connection: [info.view_name for info in gdq.view_info(connection)]),
    "add": ("view", lambda connection: [info.view_name for info in gdq.view_info(connection)]),
    "remove": ("view", lambda connection: [info.view_name for info in gdq.view_info(connection)]),
    "group": ("group", lambda connection: [info.group_name for info in group_info(connection)]),
    "groups": ("group", lambda connection: [info.group_name for info in group_info(connection)]),
}

_LISTS["named_queue"] = _LISTS["queue"]

# SQLSTATEs of objects that do not exist: object, table, function, schema; and of what is no name at all.
_MISSING = ("42704", "42P01", "42883", "3F000", "42602")

# Functions whose command has another name than theirs.
_COMMANDS = {
    "alter_table_options": "alter-table",
    "consumer_info": "consumers",
    "group_info": "groups",
    "member_info": "members",
    "queue_info": "queues",
    "register_member": "register-consumer --member",
    "table_info": "tables",
    "unregister_member": "unregister-consumer --member",
    "view_info": "views",
}


class Name(click.ParamType[str]):
    """The type of an argument that names something in the database; a shell completes it."""

    def __init__(self, kind: str) -> None:
        self.name = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names that begin so; none if the database cannot be reached within two seconds."""
        try:
            with connect(_dsn(ctx), connect_timeout=2) as connection:
                found = _LISTS[str(param.name)][1](connection)
        except (psycopg.Error, GdqError):
            return []
        return [CompletionItem(name) for name in sorted(set(found)) if name.startswith(incomplete)]


def name_parameters(command: click.Command) -> None:
    """Give the parameters of a command that name something their type, by their own names."""
    for parameter in command.params:
        if parameter.name in _LISTS and parameter.type is click.STRING:
            parameter.type = Name(_LISTS[parameter.name][0])


def suggestion(error: Exception, context: click.Context) -> str | None:
    """The names near those that the command was given, if the server said that something does not exist.

    What was given as QUEUE, and is the name of another thing that the command takes, was meant as that.
    """
    if not isinstance(error, psycopg.Error) or error.sqlstate not in _MISSING:
        return None
    try:
        with connect(_dsn(context), connect_timeout=2) as connection:
            near = list(_near(context, connection))
            if not near and (kind := _not_a_queue(context, connection)):
                return f"{context.params['queue']} is a {kind}: give the queue first, or by -q."
    except (psycopg.Error, GdqError):
        return None
    return f"Did you mean {' or '.join(near)}?" if near else None


def _near(context: click.Context, connection: Connection[Any]) -> Iterator[str]:
    for parameter, known in _named(context, connection):
        given = context.params.get(str(parameter.name))
        kind = parameter.type.name
        # a table by its own name, since the schema may be the one that is wrong
        part = _bare if kind in ("table", "sequence") else str.lower
        alike: dict[str, list[str]] = {}
        for name in known:
            alike.setdefault(part(name), []).append(name)
        for one in given if isinstance(given, tuple) else str(given or "").split(","):
            if one and one not in known:
                for match in difflib.get_close_matches(part(one), alike, n=1):
                    yield f"the {kind} {max(alike[match], key=partial(_likeness, one))}"


def _not_a_queue(context: click.Context, connection: Connection[Any]) -> str | None:
    """What the text given as QUEUE is the name of, if the command takes such names too."""
    queue = context.params.get("queue")
    kinds = (one.type.name for one, known in _named(context, connection) if one.type.name != "queue" and queue in known)
    return next(kinds, None)


def _named(context: click.Context, connection: Connection[Any]) -> Iterator[tuple[click.Parameter, list[str]]]:
    """The parameters that name something, each with the names that exist."""
    for parameter in context.command.params:
        if isinstance(parameter.type, Name):
            yield parameter, _LISTS[str(parameter.name)][1](connection)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()


def _bare(name: str) -> str:
    """The last part of a name, in lower case and without quotes."""
    return name.lower().rpartition(".")[2].strip('"')


def _dsn(context: click.Context) -> str | None:
    """The connection string of a command, also one that is being completed."""
    given: str | None = context.params.get("dsn") or context.find_root().params.get("dsn")
    return given


def _relations(connection: Connection[Any], *kinds: str) -> list[str]:
    return [name for names in connection.execute(_RELATIONS, [list(kinds)]).fetchall() for name in names]


def with_commands(hint: str) -> str:
    """A hint of the server with the commands of the functions that it names.

    For example `make one with gdq.create_queue()` is `make one with gdq create-queue`. A function without a command
    stays.
    """

    def command(found: re.Match[str]) -> str:
        name = _COMMANDS.get(found[1], found[1].replace("_", "-"))
        return f"gdq {name}" if name.partition(" ")[0] in COMMANDS else found[0]

    return re.sub(r"\bgdq\.(\w+)\(\)", command, hint)
