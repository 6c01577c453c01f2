"""Commands with the argument QUEUE, which may be left out where there is one queue, or be given by -q."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import click
from psycopg import Connection

import gdq
from gdq.cli.base import CommandFailure, command_session


class MissingQueue(CommandFailure):
    """QUEUE was left out, and there is none or more than one."""

    exit_code = 2


class QueueCommand(click.Command):
    """A command whose first argument is QUEUE.

    QUEUE was left out where fewer arguments are given than the command needs, and stands for the only queue. With
    -q all arguments are those after QUEUE. So what an argument means never depends on the names in the database.
    `unless`: the name of an option in whose place the command needs one more argument.
    """

    def __init__(self, *args: Any, unless: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unless = unless
        help_text = "The queue, instead of the argument QUEUE."
        option = click.Option(["-q", "--queue", "named_queue"], metavar="QUEUE", expose_value=False, help=help_text)
        self.params[:0] = [click.Argument(["queue"], required=False), option]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = self.make_parser(ctx).parse_args(list(args))[0]
        named = given.get("named_queue")
        if not isinstance(named, str) and (self._lacking(given) <= 0 or ctx.resilient_parsing):
            return super().parse_args(ctx, args)
        rest = super().parse_args(ctx, ["", *args])
        ctx.params["queue"] = named if isinstance(named, str) else None
        if ctx.params["queue"] is None and self._lacking(given) > 1:
            [option] = (one.opts[0] for one in self.params if one.name == self._unless)
            last = [one.make_metavar(ctx) for one in self.params if isinstance(one, click.Argument)][-1]
            raise click.UsageError(f"give {last}, or {option}", ctx)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.params["queue"] is None:
            with command_session(ctx.params["dsn"]) as connection:
                ctx.params["queue"] = only_queue(connection)
        return super().invoke(ctx)

    def _lacking(self, given: dict[str, Any]) -> int:
        """How many arguments fewer than it needs a command was given."""
        arguments = [one for one in self.params if isinstance(one, click.Argument)]
        needed = 1 + sum(one.required for one in arguments)
        needed += self._unless is not None and given.get(self._unless) is not True
        return needed - sum(_count(given.get(str(one.name))) for one in arguments)


def queue_command(name: str, *, unless: str | None = None) -> Callable[[Callable[..., Any]], click.Command]:
    """The decorator of a command whose first argument is QUEUE."""
    return partial(click.command, cls=QueueCommand)(name, unless=unless)


def only_queue(connection: Connection[Any]) -> str:
    """The name of the only queue; MissingQueue if there is none or more than one."""
    names = [info.queue_name for info in gdq.queue_info(connection)]
    if len(names) == 1:
        return names[0]
    if names:
        raise MissingQueue(f"name the queue: there are {', '.join(names)}", hint="Give it first, or by -q.")
    raise MissingQueue("there is no queue", hint="gdq create-queue makes one.")


def _count(value: object) -> int:
    """How many arguments a parameter got."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return len(list(value))
    return int(isinstance(value, str))
