"""Outputs of two runs of a suite compared: what capture alone explains is left out, the rest is told as differences."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# What \d shows of gdq's triggers, and its title if nothing else stands below it.
_TRIGGER = re.compile(r"^    \"!gdq_[^ ]* (?:BEFORE|AFTER|INSTEAD OF) .*\n", re.MULTILINE)
_TITLE = re.compile(
    r"^(?:Triggers(?: firing (?:always|on replica only))?|Disabled (?:user|internal) triggers):\n(?!    )", re.MULTILINE
)
# Where the isolation tester begins anew: files with hundreds of permutations are compared one by one.
_PERMUTATION = re.compile(r"^(?=starting permutation:)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Difference:
    """Lines of one file that one run has and the other lacks, with the line before them."""

    name: str
    before: str
    plain: tuple[str, ...]
    captured: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: after {self.before.strip()!r}"]
        lines += [f"  - {line}" for line in self.plain[:12]] + [f"  + {line}" for line in self.captured[:12]]
        return "\n".join(lines)


def without_triggers(text: str) -> str:
    """An output without gdq's triggers in the descriptions of tables."""
    return _TITLE.sub("", _TRIGGER.sub("", text))


def compare_outputs(name: str, plain: str, again: str, captured: str) -> list[Difference]:
    """How the captured run differs from the plain one, but where two plain runs differ from each other too."""
    texts = [without_triggers(text) for text in (plain, again, captured)]
    parts = [_PERMUTATION.split(text) for text in texts]
    if len({len(part) for part in parts}) > 1:
        parts = [[text] for text in texts]
    return [found for part in zip(*parts, strict=True) for found in _compare_part(name, *part)]


def _compare_part(name: str, plain: str, again: str, captured: str) -> list[Difference]:
    if plain == captured:
        return []
    first, second, third = (text.splitlines() for text in (plain, again, captured))
    noisy = {at for start, end, _, _ in _changes(first, second) for at in range(start, end + 1)}
    found = []
    for start, end, other_start, other_end in _changes(first, third):
        if noisy.isdisjoint(range(start, end + 1)):
            before = first[start - 1] if start else ""
            found.append(Difference(name, before, tuple(first[start:end]), tuple(third[other_start:other_end])))
    return found


def _changes(one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        if kind != "equal":
            yield start, end, other_start, other_end
