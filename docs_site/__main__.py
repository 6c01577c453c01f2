"""Writes the pages of the site into a folder: those of docs/, and those that are made from the code."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from docs_site.errors import errors_page
from docs_site.reference import commands_page, python_page, sql_page

ROOT = Path(__file__).parent.parent

# Pages from elsewhere, and their names on the site.
_OTHERS = (
    ("README", "index"),
    ("CONTRIBUTING", "CONTRIBUTING"),
    ("CHANGELOG", "CHANGELOG"),
    ("examples/README", "examples"),
)


def main(folder: Path) -> None:
    """Write all pages anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for name, page in _OTHERS:
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        text = text.replace("](docs/", "](").replace("](examples/README.md", "](examples.md")
        (folder / f"{page}.md").write_text(text, encoding="utf-8")
    for path in folder.glob("*.md"):
        # a renderer takes nothing after a block's language, where the tests have the name of a file or of a test
        text = re.sub(r"(?m)^```(\w+) .*$", r"```\1", path.read_text(encoding="utf-8"))
        # in GitHub's Markdown a list may follow a paragraph at once
        path.write_text(_lists_apart(text), encoding="utf-8")
    for name, text in (
        ("commands", commands_page()),
        ("sql", sql_page()),
        ("python", python_page()),
        ("errors", errors_page()),
    ):
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def _lists_apart(text: str) -> str:
    """An empty line before each list and table that follows a paragraph, outside of fenced blocks."""
    parts = re.split(r"(?ms)(^```.*?^```$)", text)
    parts[::2] = [re.sub(r"(?m)^((?![-|#] ?|\s).+)\n(?=(?:- |\| ))", r"\1\n\n", part) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
