"""The reference: all commands, public SQL functions and public names of Python, from what they say of themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

import gdq
from gdq.cli import main
from gdq.cli.sections import SECTIONS

ROOT = Path(__file__).parent.parent

# A function of tests/install/schema.txt, which lists the installed schema: head, comment, settings, rights.
_FUNCTION = re.compile(
    r"^(?P<head>(?:function|procedure) gdq\.(?P<name>\w+)\(.*?)\n  (?P<says>[A-Z].*?)\n(?P<rest>(?:  .*\n)*)",
    re.MULTILINE | re.DOTALL,
)


def commands_page() -> str:
    """All commands by section, each with its help."""
    context = click.Context(main, info_name="gdq")
    lines = ["# Commands", "", "What `gdq --help` and `gdq COMMAND --help` print.", "", _block(main.get_help(context))]
    for section, modules in SECTIONS.items():
        lines += [f"## {section}", ""]
        for name in [name for names in modules.values() for name in names]:
            command = main.get_command(context, name)
            assert command is not None
            help_text = command.get_help(click.Context(command, info_name=name, parent=context))
            lines += [f"### gdq {name}", "", _block(help_text)]
    return "\n".join(lines)


def sql_page() -> str:
    """The functions that a role of gdq may execute, by the folders of sql/, with the headers of their files."""
    public: dict[str, list[re.Match[str]]] = {}
    schema = (ROOT / "tests" / "install" / "schema.txt").read_text(encoding="utf-8")
    for block in schema.split("\n\n"):
        match = _FUNCTION.match(block + "\n")
        if match and "grant execute to " in match["rest"]:
            public.setdefault(match["name"], []).append(match)
    lines = ["# SQL functions", "", "The public functions of schema `gdq`, with the roles that may execute them."]
    lines += ["Arguments may be given by name. [Security](security.md) describes the roles.", ""]
    for folder in sorted(path for path in (ROOT / "sql").iterdir() if path.is_dir()):
        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.sql")))
        headers = re.findall(r"(?m)(?:\A|^(?!-- ).*\n)-- (\w+)(\(.*(?:\n-- .*)*)", text)
        found = sorted((name, rest) for name, rest in dict(reversed(headers)).items() if name in public)
        lines += [f"## {folder.name.capitalize()}", ""] if found else []
        for name, rest in found:
            first = public[name][0]
            roles = ", ".join(f"`{role}`" for role in re.findall(r"\bgdq_\w+", first["rest"].partition("grant")[2]))
            lines += [f"### gdq.{name}", "", first["says"].replace("_", "\\_"), "", f"For {roles}.", ""]
            lines += [_block(match["head"], "sql") for match in public[name]]
            lines.append(_block(re.sub(r"(?m)^-- ?", "", name + rest)))
    return "\n".join(lines)


_PYTHON = (
    "The names of `gdq.__all__`. All other names are private, but for those of `gdq.alembic` and `gdq.django`, which"
    " [managed PostgreSQL](managed.md) shows."
)


def python_page() -> str:
    """The public names of Python, with signatures and docstrings; classes with their public methods."""
    lines = ["# Python", "", _PYTHON, ""]
    for name in gdq.__all__:
        thing = getattr(gdq, name)
        lines += [f"## gdq.{name}", "", _block(f"{name}{_signature(thing)}", "python")]
        lines += [_block(inspect.getdoc(thing) or "")]
        for method, function in _methods(thing):
            lines += [f"### {name}.{method}", "", _block(f"{method}{_signature(function)}", "python")]
            lines += [_block(inspect.getdoc(function) or "")]
    return "\n".join(lines)


def _methods(thing: object) -> Iterator[tuple[str, object]]:
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        for name, value in vars(thing).items():
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod)):
                yield name, value.__func__ if isinstance(value, classmethod) else value


def _signature(thing: object) -> str:
    try:
        return str(inspect.signature(thing)) if callable(thing) else ""
    except ValueError:
        return ""


def _block(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.strip()}\n```\n"
