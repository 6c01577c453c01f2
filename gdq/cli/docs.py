"""The command that shows the documentation."""

from __future__ import annotations

from pathlib import Path

import click

import gdq

# docs/ is a link in a checkout, a folder in an installed gdq.
_PAGES = {path.stem: path for path in sorted((Path(gdq.__path__[0]) / "docs").glob("*.md"))}


@click.command()
@click.argument("page", required=False, metavar="[PAGE]", type=click.Choice(list(_PAGES)))
def docs_command(page: str | None) -> None:
    """Show a page of the documentation, or list the pages with their files."""
    if page is None:
        width = max(map(len, _PAGES))
        click.echo("\n".join(f"{name:{width}}  {path}" for name, path in _PAGES.items()))
    else:
        click.echo_via_pager(_PAGES[page].read_text(encoding="utf-8"))
