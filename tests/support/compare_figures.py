"""Figures of a run of `gdq compare`: made up, and what tests of a run read of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gdq.consumers.compare.figures import Figures, LatencyFigures, PhaseFigures
from gdq.consumers.compare.run import PHASE_SHARES


def figures_of(**changed: Any) -> Figures:
    """Those of a run in which both paths did the same."""
    figures = Figures("bank", "18", "", 60, ["t"], replica_identity_full=False)
    for path in (figures.queue, figures.slot):
        path.events = {"t": {"update": 1000}}
        path.latency = LatencyFigures(100, 0.1, 0.2, 0.3, [(0.1, 100)])
        path.retained_per_second = 1000.0
        path.cpu_seconds = {"consumer": 1.0}
    figures.phases = [PhaseFigures(name, 0, 1, 1000, 1000, 100_000) for name in PHASE_SHARES]
    for name, value in changed.items():
        whole, _, part = name.partition("__")
        setattr(getattr(figures, whole) if part else figures, part or whole, value)
    return figures


def phases(*numbers: tuple[int, int]) -> list[PhaseFigures]:
    """Of a second each, with so many changes and bytes of log."""
    return [
        PhaseFigures(name, 0, 1, changes, 9, wal) for name, (changes, wal) in zip(PHASE_SHARES, numbers, strict=True)
    ]


def at(phase: str, action: Callable[[], object]) -> Callable[[str, str], None]:
    """What run.compare() tells, with something that happens once in a phase."""
    pending = [action]

    def tell(name: str, _doing: str) -> None:
        if name == phase and pending:
            pending.pop()()

    return tell


def measured(figures: dict[str, Any], name: str, value: float | None) -> float:
    """A figure; on a machine that is too busy to tell it from nothing, its noise."""
    return figures["noise"][name] if value is None else value
