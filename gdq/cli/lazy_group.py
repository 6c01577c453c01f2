"""LazyGroup: a click group that imports a command's module on first use, and turns errors into CommandFailure."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import UserDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gdq.cli.sections import COMMAND_CONTEXT


class _LazyCommands(UserDict[str, Any]):
    """The commands by name, loaded when looked up; `module_of`: the module of each. click suggests from the names."""

    def __init__(self, module_of: Mapping[str, str]) -> None:
        super().__init__(module_of)

    def __getitem__(self, name: str) -> click.Command:
        module: str = super().__getitem__(name)
        command = getattr(importlib.import_module(f"gdq.cli.{module}"), _function(name))
        assert isinstance(command, click.Command)
        from gdq.cli.names import name_parameters  # noqa: PLC0415 (loads what the command loads)

        name_parameters(command)
        return command


class LazyGroup(click.Group):
    """A group with commands in modules of gdq.cli: create-queue is create_queue_command() of its module.

    `sections`: for each heading of the list of commands its modules, and the commands of each. The list imports no
    module; it takes the docstrings from the sources.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Mapping[str, Sequence[str]]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections
        by_module = [pair for modules in sections.values() for pair in modules.items()]
        self.commands = _LazyCommands({command: module for module, commands in by_module for command in commands})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's own)
        """Write the commands by section, each with the first sentence of its docstring, which is never cut."""
        width = max(map(len, self.commands))
        for heading, modules in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (command.ljust(width), _first_sentence(docstrings[_function(command)]))
                        for module, commands in modules.items()
                        for docstrings in [_docstrings(module)]
                        for command in commands
                    ]
                )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors of gdq and the server become a CommandFailure, unless --debug wants the traceback."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if "gdq.cli.base" not in sys.modules:  # it came while that was loaded, and loading it again could fail
                click.echo("Error: interrupted", err=True)
                raise click.exceptions.Exit(130) from None
            from gdq.cli.base import Interrupted  # noqa: PLC0415 (the command has loaded it)

            raise Interrupted from None
        except (click.ClickException, click.Abort, click.exceptions.Exit, OSError):
            raise
        except Exception as error:
            from gdq.cli.base import command_failure, is_expected  # noqa: PLC0415 (the command has loaded it)

            if ctx.params.get("debug") or not is_expected(error):
                raise
            from gdq.cli.names import suggestion  # noqa: PLC0415 (the command has loaded it)

            failure = command_failure(error)
            near = suggestion(error, ctx.meta[COMMAND_CONTEXT]) if COMMAND_CONTEXT in ctx.meta else None
            failure.hint = " ".join(filter(None, [failure.hint, near])) or None
            raise failure from error


def _function(command: str) -> str:
    return command.replace("-", "_") + "_command"


def _first_sentence(docstring: str) -> str:
    """The first sentence of a docstring in one line, without its full stop."""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"\.(?= [A-Z]|$)", paragraph)[0]


def _docstrings(module: str) -> dict[str, str]:
    """The docstring of each function of a module, without importing the module."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}
