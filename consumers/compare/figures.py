"""The figures of a run as plain values: for the page, for --json and for the recommendation."""

from __future__ import annotations

from dataclasses import dataclass, field

from gdq.shown import Shown

# With fewer changes nothing is concluded.
CHANGES_MIN = 100


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """Seconds from commit to receipt over `transactions`; `histogram` has pairs of upper bound and count."""

    transactions: int
    p50: float
    p99: float
    max: float
    histogram: list[tuple[float, int]]


@dataclass(slots=True)
class PathFigures:
    """Figures of one path. `events`: by table and operation. Sizes are in bytes, times in seconds, None if unknown.

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

    @property
    def cpu(self) -> float | None:
        """CPU seconds of all processes; None if one is unknown."""
        known = [seconds for seconds in self.cpu_seconds.values() if seconds is not None]
        return sum(known) if known and len(known) == len(self.cpu_seconds) else None


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
        return max(both - alone, 0.0) if alone is not None and both is not None else None
