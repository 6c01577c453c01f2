"""The list of gdq.plan.whitelist for docs/views.md; `python -m tests.support.whitelist_table` writes it there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap

from gdq.plan.whitelist import AGGREGATES, NODES, VALUES

PAGE = Path(__file__).parent.parent.parent / "docs" / "views.md"
BEGIN, END = "<!-- the list: made by python -m tests.support.whitelist_table -->\n", "<!-- end of the list -->\n"


def whitelist_table() -> str:
    """The list in Markdown."""
    lines = ["", "| in SQL | node of the server's tree |", "|---|---|"]
    for kind, (shown, _) in NODES.items():
        values = [word for (node, _), words in VALUES.items() if node == kind for word in words.values() if word]
        lines.append(f"| {shown}{': ' if values else ''}{'; '.join(values)} | {kind} |")
    lines += ["", *wrap(f"Aggregates: {_listed(AGGREGATES)}.", 120, break_on_hyphens=False)]
    return "\n".join([*lines, "", ""])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def with_whitelist_table(page: str) -> str:
    """The page with the list as it is now."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + whitelist_table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(with_whitelist_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
