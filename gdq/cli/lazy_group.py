"""LazyGroup: a click group that imports a command's module on first use, and turns errors into CommandFailure."""

from __future__ import annotations

import ast
import importlib
from collections import UserDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click


class _LazyCommands(UserDict[str, Any]):
    """The commands by name, loaded when looked up; `module_of`: the module of each. click suggests from the names."""

    def __init__(self, module_of: Mapping[str, str]) -> None:
        super().__init__(module_of)

    def __getitem__(self, name: str) -> click.Command:
        module: str = super().__getitem__(name)
        command = getattr(importlib.import_module(f"gdq.cli.{module}"), _function(name))
        assert isinstance(command, click.Command)
        return command


class LazyGroup(click.Group):
    """A group with commands in modules of gdq.cli: create-queue is create_queue_command() of its module.

    `modules`: the commands of each module, by the module's name. Help for the whole group imports no module; it takes
    the docstrings from the sources.
    """

    def __init__(self, *args: Any, modules: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._module_of = {command: module for module, commands in modules.items() for command in commands}
        self.commands = _LazyCommands(self._module_of)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands as click does, but from the docstrings in the sources."""
        docstrings = {module: _docstrings(module) for module in set(self._module_of.values())}
        stubs = [
            click.Command(name, help=docstrings[module][_function(name)]) for name, module in self._module_of.items()
        ]
        click.Group(commands=stubs).format_commands(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors of gdq and the server become a CommandFailure, unless --debug wants the traceback."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, OSError):
            raise
        except Exception as error:
            from gdq.cli.base import command_failure, is_expected  # noqa: PLC0415 (the command has loaded it)

            if ctx.params.get("debug") or not is_expected(error):
                raise
            raise command_failure(error) from error


def _function(command: str) -> str:
    return command.replace("-", "_") + "_command"


def _docstrings(module: str) -> dict[str, str]:
    """The docstring of each function of a module, without importing the module."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}
