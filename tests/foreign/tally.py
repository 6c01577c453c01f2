"""What became of foreign queries, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal[
    "invalid", "no table", "too large", "refused", "full", "incremental", "undetermined", "wrong", "crash"
]
# What gdq was asked for: the others are no views of tables to PostgreSQL, or too large for a test.
ASKED: tuple[Outcome, ...] = ("refused", "full", "incremental", "undetermined", "wrong", "crash")
BAD: tuple[Outcome, ...] = ("wrong", "crash")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one query. `detail`: the code of a refusal or a full load, or what went wrong."""

    suite: str
    origin: str
    query: str
    outcome: Outcome
    detail: str = ""
    history: tuple[str, ...] = ()


@dataclass(slots=True)
class Tally:
    """The verdicts of a run."""

    verdicts: list[Verdict] = field(default_factory=list)

    def add(self, verdicts: Iterable[Verdict]) -> None:
        self.verdicts += verdicts

    def bad(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.outcome in BAD]

    def lines(self) -> list[str]:
        """The counts by suite, and in sum."""
        counts: dict[str, Counter[str]] = {}
        for one in self.verdicts:
            for suite in (one.suite, "all"):
                counts.setdefault(suite, Counter())[one.outcome] += 1
        names = ("asked", *ASKED, "invalid", "no table", "too large")
        rows = [("suite", *names)]
        for suite in sorted(counts, key=lambda name: (name == "all", name)):
            asked = sum(counts[suite][name] for name in ASKED)
            rows.append((suite, str(asked), *(str(counts[suite][name]) for name in names[1:])))
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        texts = {(one.suite, " ".join(one.query.split())) for one in self.verdicts if one.outcome in ASKED}
        return [*lines, f"{len(texts)} queries that gdq was asked for have a text of their own"]

    def reasons(self, outcome: Outcome, most: int = 25) -> list[str]:
        """The commonest reasons of an outcome."""
        found = Counter(one.detail for one in self.verdicts if one.outcome == outcome)
        return [f"{number:6}  {detail}" for detail, number in found.most_common(most)]
