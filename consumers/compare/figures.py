"""What a run has measured, as plain values: for the page, for --json and for the recommendation."""

from __future__ import annotations

from dataclasses import dataclass, field

# From fewer changes than these nothing is concluded.
CHANGES_MIN = 100


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from commit to receipt over `transactions`; `histogram` has pairs of upper bound and count."""

    transactions: int
    p50: float
    p99: float
    max: float
    histogram: list[tuple[float, int]]


@dataclass(slots=True)
class Path:
    """One path. `events` by table and operation; sizes in bytes, times in seconds; None where it is not known.

    `cpu_seconds` by process of the server, while both were read. `retained_bytes` is what was kept at the end of the
    time in which nobody read, `retained_per_second` how it grew; `catch_up_seconds` is how long reading it took.
    """

    events: dict[str, dict[str, int]] = field(default_factory=dict)
    transactions: int = 0
    latency: Latency | None = None
    cpu_seconds: dict[str, float | None] = field(default_factory=dict)
    retained_bytes: int | None = None
    retained_per_second: float | None = None
    catch_up_seconds: float | None = None

    @property
    def total(self) -> int:
        """How many events there were."""
        return sum(sum(by_op.values()) for by_op in self.events.values())

    @property
    def cpu(self) -> float | None:
        """Seconds of all its processes; None when one of them is not known."""
        known = [seconds for seconds in self.cpu_seconds.values() if seconds is not None]
        return sum(known) if known and len(known) == len(self.cpu_seconds) else None


@dataclass(frozen=True, slots=True)
class Sample:
    """A moment, in seconds from the start: bytes of the queue's logs, and of the log that the slot retains."""

    at: float
    queue_bytes: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run, in seconds from the start: how much changed and what the server wrote of log meanwhile.

    `wal_bytes` is of the whole server: the application, the queue and everybody else.
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


@dataclass(slots=True)
class Figures:
    """One run. `log_bytes_per_change`: what the queue's logs take on disk for one change.

    `old_missing`, `new_partial`: updates and deletes that came by the slot without the old row, and with a new row
    that lacks large values. `difference_counts` has how many differences each
    rule explains, and "" those that none does, the first of which are in `differences`.
    """

    database: str
    server_version: str
    started_at: str
    seconds: float
    tables: list[str]
    replica_identity_full: bool
    queue: Path = field(default_factory=Path)
    slot: Path = field(default_factory=Path)
    phases: list[Phase] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    log_bytes_per_change: float | None = None
    differences: list[str] = field(default_factory=list)
    difference_counts: dict[str, int] = field(default_factory=dict)
    old_missing: int = 0
    new_partial: int = 0

    def phase(self, name: str) -> Phase:
        """The phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def slot_retained_by_itself(self) -> float | None:
        """Bytes a second that the slot would keep if there were no queue, whose log is in what the slot keeps.

        An estimate: the log for a change from before there were triggers, times the changes a second of the time in
        which nobody reads. None when there were too few changes to tell.
        """
        alone, idle, kept = self.phase("slot alone"), self.phase("nobody reads"), self.slot.retained_per_second
        if kept is None or alone.wal_per_change is None or min(alone.changes, idle.changes) < CHANGES_MIN:
            return None
        return min(kept, alone.wal_per_change * idle.changes_per_second)

    @property
    def queue_wal_per_change(self) -> float | None:
        """Bytes of log that the queue adds to each change: what there is with its triggers, less what there was before.

        An estimate: everything else that the server writes counts, too, and is taken to be the same in both phases.
        """
        alone, both = self.phase("slot alone").wal_per_change, self.phase("both read").wal_per_change
        return max(both - alone, 0.0) if alone is not None and both is not None else None
