"""The map at the beginning of docs/architecture.md names every file, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "architecture.md"

pytestmark = pytest.mark.skipif(not (ROOT / "sql").exists(), reason="an sdist has these folders in gdq/ only")


def rows(section: str) -> dict[str, set[str]]:
    """The table of a section: folder and the names in backquotes behind it."""
    text = PAGE.read_text(encoding="utf-8").partition(f"### {section}\n")[2].partition("\n#")[0]
    lines = re.findall(r"(?m)^\| `([a-z_/]+)` \|(.*)$", text)
    return {folder.rstrip("/"): set(re.findall(r"`([a-z_/]+)`", rest)) for folder, rest in lines}


def test_sql() -> None:
    found = {folder.name: {path.stem for path in folder.glob("*.sql")} for folder in (ROOT / "sql").iterdir()}
    assert rows("SQL") == found


def test_python() -> None:
    listed = rows("Python")
    # a folder within a folder stands on the row of the outer one where it has none of its own
    found: dict[str, set[str]] = {}
    for top in ("gdq", "consumers"):
        for path in (ROOT / top).rglob("*.py"):
            folder = path.parent.relative_to(ROOT).as_posix()
            if folder.startswith(("gdq/migrations", "gdq/consumers", "gdq/sql")) or path.stem.startswith("__"):
                continue
            if folder not in listed:
                found.setdefault(str(Path(folder).parent), set()).add(f"{Path(folder).name}/")
                folder = str(Path(folder).parent)
            found.setdefault(folder, set()).add(path.stem)
    assert listed == found


def test_the_paths_lead_through_files() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## The path of a row")[2].partition("## Why it is so")[0]
    paths = re.findall(r"`((?:sql|gdq|consumers)/[a-z_/]+\.(?:py|sql))`", text)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
