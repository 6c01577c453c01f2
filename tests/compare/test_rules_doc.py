"""docs/slot-or-queue.md says what gdq.consumers.compare.rules does."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdq.consumers.compare.rules import RULES, rules_markdown

DOC = Path(__file__).parent.parent.parent / "docs" / "slot-or-queue.md"


@pytest.mark.skipif(not DOC.exists(), reason="docs/ is not part of an sdist")
def test_table_in_docs_is_the_table_in_code() -> None:
    section = DOC.read_text(encoding="utf-8").split("## What differs in the events\n")[1]
    table = [line for line in section.splitlines(keepends=True) if line.startswith("|")]
    assert "".join(table) == rules_markdown()


def test_rules_have_names_of_their_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
