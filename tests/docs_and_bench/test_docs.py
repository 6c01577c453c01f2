"""What the documentation names exists: commands with their options, SQL functions, files."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from gdq.cli import main

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
SQL = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "gdq" / "sql").rglob("*.sql")))

pytestmark = pytest.mark.skipif(not PAGES, reason="an sdist has no documentation")


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Every `gdq COMMAND --option ...` in code: the command and its options."""
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    code = re.sub(r"(?m)(^|\s)#.*$", "", code)
    found = re.findall(r"(?m)(?:^\s*|[`$|] ?)gdq ([a-z][a-z-]+)([^`\n|>]*)", code)
    return [(name, re.findall(r"(?<!\S)(--[a-z-]+)", rest)) for name, rest in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    known = set(main.list_commands(click.Context(main)))
    for name, options in commands(page.read_text(encoding="utf-8")):
        assert name in known, name
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert set(options) <= {option for parameter in command.params for option in parameter.opts} | {"--help"}, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sql_functions_exist(page: Path) -> None:
    known = set(re.findall(r"create or replace (?:function|procedure) gdq\.(\w+)", SQL))
    assert set(re.findall(r"\bgdq\.(\w+)\(", page.read_text(encoding="utf-8"))) - known - python_names() == set()


def python_names() -> set[str]:
    import gdq

    return set(gdq.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
