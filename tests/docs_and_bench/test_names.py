"""docs/names.md says in which file each function and class is; `make schema` writes the page."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "names.md"
HEAD = """# Names

The file of each SQL function and of each public function and class in Python. `make schema` writes this page; the map
in [architecture.md](architecture.md) says what the folders are for.
"""

pytestmark = pytest.mark.skipif(not PAGE.parent.exists(), reason="an sdist has no documentation")


def sql_names(path: Path) -> list[str]:
    found = re.findall(r"(?m)^create or replace (?:function|procedure) gdq\.(\w+)", path.read_text(encoding="utf-8"))
    return sorted(set(found))


def python_names(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return sorted(name for name in found if not name.startswith("_"))


def python_files() -> Iterator[Path]:
    for top in ("gdq", "consumers"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if not path.relative_to(ROOT).as_posix().startswith(("gdq/migrations", "gdq/consumers", "gdq/sql")):
                yield path


def page() -> str:
    parts = [HEAD]
    for title, paths, names_in in (
        ("SQL", sorted((ROOT / "sql").rglob("*.sql")), sql_names),
        ("Python", python_files(), python_names),
    ):
        parts.append(f"\n## {title}\n\n| file | names |\n|---|---|\n")
        parts += [
            f"| `{path.relative_to(ROOT)}` | {', '.join(f'`{name}`' for name in names)} |\n"
            for path in paths
            if (names := names_in(path))
        ]
    return "".join(parts)


def test_page_is_up_to_date() -> None:
    if "GDQ_WRITE_SCHEMA" in os.environ:
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "run make schema"
