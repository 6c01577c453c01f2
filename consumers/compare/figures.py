"""The figures of a run as plain values: for the page, for --json and for the recommendation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gdq.shown import Shown

# With fewer changes nothing is concluded.
CHANGES_MIN = 100

# With fewer parts of a time the spread of its figure is unknown.
_PARTS_MIN = 4


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """Seconds from commit to receipt over `transactions`, None below noise; `histogram`: upper bounds and counts."""

    transactions: int
    p50: float | None
    p99: float | None
    max: float | None
    histogram: list[tuple[float, int]]


@dataclass(slots=True)
class PathFigures:
    """Figures of one path. `events`: by table and operation. Sizes are in bytes, times in seconds.

    None: unknown or below noise, see Figures.

    `cpu_seconds`: by process of the server, while both were read. `retained_bytes`: unread log at the end of the time
    without readers, `retained_per_second`: its growth; `catch_up_seconds`: time to read it.
    """

    events: dict[str, dict[str, int]] = field(default_factory=dict)
    transactions: int = 0
    latency: LatencyFigures | None = None
    cpu_seconds: dict[str, float | None] = field(default_factory=dict)
    retained_bytes: int | None = None
    retained_per_second: float | None = None
    catch_up_seconds: float | None = None

    @property
    def total(self) -> int:
        """Number of all events."""
        return sum(sum(by_op.values()) for by_op in self.events.values())


@dataclass(frozen=True, slots=True)
class SampleFigures:
    """Bytes of the queue's logs, and of the log that the slot retains, at a time in seconds from the start."""

    at: float
    queue_bytes: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """A phase of the run, in seconds from the start: number of changes and bytes of write-ahead log.

    `wal_bytes` is that of the whole server: the application, the queue and all others.
    """

    name: str
    begin: float
    end: float
    changes: int
    transactions: int
    wal_bytes: int

    @property
    def changes_per_second(self) -> float:
        return self.changes / (self.end - self.begin) if self.end > self.begin else 0.0

    @property
    def transactions_per_second(self) -> float:
        return self.transactions / (self.end - self.begin) if self.end > self.begin else 0.0

    @property
    def wal_per_change(self) -> float | None:
        return self.wal_bytes / self.changes if self.changes else None


@dataclass(slots=True, repr=False)
class Figures(Shown):
    """Figures of one run. `log_bytes_per_change`: bytes of the queue's logs on disk for one change.

    `old_missing`: updates and deletes from the slot without the old row; `new_partial`: updates whose new row lacks
    large values. `difference_counts`: differences by rule, "" for those without a rule, the first of which are in
    `differences`.

    `noise`: by the name of a measured figure, such as `slot.retained_per_second`, the value up to which it cannot be
    told from nothing. A figure that is None is below its noise, and unknown if it has none.
    """

    _shown = "database server_version started_at seconds tables difference_counts"

    database: str
    server_version: str
    started_at: str
    seconds: float
    tables: list[str]
    replica_identity_full: bool
    queue: PathFigures = field(default_factory=PathFigures)
    slot: PathFigures = field(default_factory=PathFigures)
    phases: list[PhaseFigures] = field(default_factory=list)
    samples: list[SampleFigures] = field(default_factory=list)
    log_bytes_per_change: float | None = None
    differences: list[str] = field(default_factory=list)
    difference_counts: dict[str, int] = field(default_factory=dict)
    old_missing: int = 0
    new_partial: int = 0
    noise: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """All figures, also those that are computed from others."""
        computed = ("slot_retained_by_itself", "queue_wal_per_change")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in computed}

    def above_noise(self, name: str, value: float, noise: float) -> float | None:
        """A measured value, None if it is not above its noise, which is noted under its name."""
        self.noise[name] = noise
        return value if value > noise else None

    def cpu(self, path: str) -> float | None:
        """CPU seconds of all processes of the queue or the slot, those below noise left out; None if one is unknown."""
        by_process: dict[str, float | None] = getattr(self, path).cpu_seconds
        unknown = [name for name, seconds in by_process.items() if seconds is None]
        if not by_process or any(f"{path}.cpu_seconds.{name}" not in self.noise for name in unknown):
            return None
        return sum(seconds or 0.0 for seconds in by_process.values())

    def phase(self, name: str) -> PhaseFigures:
        """The phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def slot_retained_by_itself(self) -> float | None:
        """Estimated bytes per second that the slot would retain without the queue, whose own log it retains too.

        The log per change before there were triggers, times the changes per second of the time without readers. None
        if there were too few changes.
        """
        alone, idle, kept = self.phase("slot alone"), self.phase("nobody reads"), self.slot.retained_per_second
        if kept is None or alone.wal_per_change is None or min(alone.changes, idle.changes) < CHANGES_MIN:
            return None
        return min(kept, alone.wal_per_change * idle.changes_per_second)

    @property
    def queue_wal_per_change(self) -> float | None:
        """Estimated bytes of log that the queue adds per change: log per change with triggers minus without.

        Other writes of the server count too, and are assumed to be equal in both phases.
        """
        alone, both = self.phase("slot alone").wal_per_change, self.phase("both read").wal_per_change
        if alone is None or both is None:
            return None
        return both - alone if both - alone > self.noise.get("queue_wal_per_change", 0.0) else None


def ratio_error(parts: Sequence[tuple[int, int]]) -> float | None:
    """The standard error of bytes per change over a time that has parts of (changes, bytes); None if unknown."""
    changes = sum(number for number, _ in parts)
    if len(parts) < _PARTS_MIN or changes < CHANGES_MIN:
        return None
    ratio = sum(size for _, size in parts) / changes
    spread = sum((size - ratio * number) ** 2 for number, size in parts)
    return math.sqrt(spread * len(parts) / (len(parts) - 1)) / changes
