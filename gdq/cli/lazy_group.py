"""LazyGroup: the click group that loads the module of a command when the command is used, and shows errors."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click


class LazyGroup(click.Group):
    """A group whose commands stand in modules of gdq.cli: create-queue is the function create_queue of its module.

    `modules`: the commands of each module, by the module's name. Help for the whole group loads none of the modules:
    it takes the docstrings from the sources.
    """

    def __init__(self, *args: Any, modules: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._module_of = {command: module for module, commands in modules.items() for command in commands}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """The names of all commands, sorted."""
        return sorted(self._module_of)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (as above)
        """The command of that name, loaded; None when there is none."""
        if cmd_name not in self._module_of:
            return None
        command = getattr(importlib.import_module(f"gdq.cli.{self._module_of[cmd_name]}"), _function(cmd_name))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands as click does, from docstrings."""
        docstrings = {module: _docstrings(module) for module in set(self._module_of.values())}
        stubs = [
            click.Command(name, help=docstrings[module][_function(name)]) for name, module in self._module_of.items()
        ]
        click.Group(commands=stubs).format_commands(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors of gdq and of the server become a Failure, unless --debug asks for the traceback."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, OSError):
            raise
        except Exception as error:
            from gdq.cli.base import EXPECTED, failure  # noqa: PLC0415 (the command has loaded it)

            if ctx.params.get("debug") or not isinstance(error, EXPECTED):
                raise
            raise failure(error) from error


def _function(command: str) -> str:
    return command.replace("-", "_")


def _docstrings(module: str) -> dict[str, str]:
    """The docstring of each function of a module, which is not loaded."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}
