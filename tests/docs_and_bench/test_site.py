"""`make docs` builds the site of the documentation, and no link in it leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import click
import pytest

import gdq
from gdq.cli import main
from tests.support.page import ROOT
from tests.support.site import built_site

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (ROOT / "docs_site").exists(), reason="an sdist has no site"),
]


def test_the_site_is_whole(tmp_path: Path) -> None:
    site = built_site(tmp_path)
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    seen = 0
    for path, text in pages.items():
        for target in re.findall(r'<a [^>]*href="([^":]*)"', text):
            name, _, anchor = unquote(target).partition("#")
            found = (path.parent / name).resolve() if name else path
            assert found.exists(), f"{path.name}: {target}"
            assert not anchor or anchor in anchors[found], f"{path.name}: {target}"
            seen += 1
    assert seen > 1000
    headings = {name: _headings(pages[site / f"{name}.html"]) for name in ("commands", "sql", "python", "errors")}
    assert {f"gdq {name}" for name in main.list_commands(click.Context(main))} <= headings["commands"]
    assert {f"gdq.{name}" for name in gdq.__all__} <= headings["python"]
    assert {"gdq.add_table", "gdq.next_batch", "gdq.queue_info"} <= headings["sql"]
    assert "GDQ02: TruncatedPosition" in headings["errors"]
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def _headings(page: str) -> set[str]:
    """The texts of a page's headings, without the links to themselves."""
    return {re.sub(r"<[^>]*>", "", text) for text in re.findall(r"<h[23] [^>]*>(.*?)<a class=\"headerlink\"", page)}
