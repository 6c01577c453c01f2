"""The report of a campaign: text for the terminal, and report.json beside the logs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import median

from tests.campaign.campaign import Outcome

MEMORY_BYTES_MAX = 1 << 30
_OWN = ("start", "end", "the slot catches up")
_WRONG = ("lost", "doubled", "invented", "unordered")


def write_report(outcome: Outcome, folder: Path, seconds: float) -> int:
    """Print the report and write it; the exit code."""
    struck = [beat for beat in outcome.beats if beat.kind not in _OWN]
    kinds: dict[str, list[float]] = {}
    consumers: dict[str, list[float]] = {}
    for beat in struck:
        kinds.setdefault(beat.kind, []).append(max(beat.seconds.values(), default=0.0))
        for name, one in beat.seconds.items():
            consumers.setdefault(name, []).append(one)
    _print_times("fault", kinds)
    _print_times("consumer or view", consumers)
    print(f"\n{'program':16} {'memory MB':>10}  ends by exit code")
    for name, size in sorted(outcome.memory.items()):
        ends = ", ".join(f"{code}: {number}" for code, number in sorted(outcome.exits[name].items()))
        print(f"{name:16} {size / 2**20:10.0f}  {ends}")
    print(f"\n{'consumer or view':24} {'lost':>8} {'doubled':>8} {'invented':>8} {'unordered':>9}")
    for verdict in outcome.verdicts:
        print(f"{verdict.name:24} {verdict.lost:8} {verdict.doubled:8} {verdict.invented:8} {verdict.unordered:9}")
    for what, why in outcome.skipped.items():
        print(f"left out: {what}: {why}")
    sums = [sum(getattr(one, what) for one in outcome.verdicts) for what in _WRONG]
    print(
        f"\nseed {outcome.seed}: {outcome.changes} committed changes, {len(struck)} faults of {len(kinds)} kinds; "
        + ", ".join(f"{number} {what}" for what, number in zip(_WRONG, sums, strict=True))
        + f", {len(outcome.manual)} manual steps; {seconds:.0f} s, the last catching up {outcome.drained_seconds:.0f} s"
    )
    summary = dataclasses.asdict(outcome) | {"seconds": seconds}
    (folder / "report.json").write_text(json.dumps(summary, indent=1, default=list))
    return _print_complaints(outcome)


def _print_times(title: str, times: dict[str, list[float]]) -> None:
    print(f"\n{title:52} {'count':>5} {'recovered after s, median':>26} {'longest':>8}")
    for name, some in sorted(times.items()):
        print(f"{name:52} {len(some):5} {median(some):26.1f} {max(some):8.1f}")


def _print_complaints(outcome: Outcome) -> int:
    """Print what is not as it should be; the exit code."""
    complaints = {
        "wrong": [one.name for one in outcome.verdicts if not one.right],
        "needs a hand": outcome.manual,
        "did not end at SIGTERM": outcome.stubborn,
        "took more memory than 1 GB": [name for name, size in outcome.memory.items() if size > MEMORY_BYTES_MAX],
    }
    for title, names in complaints.items():
        if names:
            print(f"{title}: {', '.join(names)}")
    return int(any(complaints.values()))
