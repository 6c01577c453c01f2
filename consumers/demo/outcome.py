"""What the demo has found: a line for each step of its last table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_HEADINGS = ("step", "gdq", "the other way", "ratio", "verified")


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `ratio`: the other way's seconds for one of gdq's; None without another way.

    `verified` of `checked` results were what they had to be.
    """

    name: str
    gdq: str
    other: str = "-"
    ratio: float | None = None
    verified: int = 0
    checked: int = 0

    @property
    def right(self) -> bool:
        """True if everything was checked and right."""
        return 0 < self.checked == self.verified

    def cells(self) -> tuple[str, ...]:
        """The step in the columns of the table."""
        verified = f"{'yes' if self.right else 'NO'}, {self.verified} of {self.checked}"
        return self.name, self.gdq, self.other, ratio_text(self.ratio), verified


def ratio_text(ratio: float | None) -> str:
    """A ratio with its unit; one below 1 says what it means."""
    if ratio is None:
        return "-"
    number = f"{ratio:.1f}" if ratio >= 0.1 else f"{ratio:.2f}"
    return f"{number} x" if ratio >= 1 else f"{number} x, gdq is slower"


def table_lines(steps: Sequence[Step]) -> Iterator[str]:
    """The steps as lines of text, in columns."""
    rows = [_HEADINGS, *(step.cells() for step in steps)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if not number:
            yield "  ".join("-" * width for width in widths)
