"""Pairs the transactions of both paths as they arrive: differences, latencies, counts."""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from gdq.consumers.compare.comparison import Comparison
from gdq.consumers.compare.figures import Figures, LatencyFigures
from gdq.consumers.compare.rules import RuleTable
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.source import Event

_EXAMPLES = 20
_CHANGES = ("insert", "update", "delete", "truncate")
# Upper bounds of a histogram of latencies, in seconds.
LATENCY_BOUNDS = tuple(base * 10.0**power for power in range(-4, 3) for base in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class ArrivedTransaction:
    """A transaction of one path: its changes, the time of receipt, and `timed` if it counts for latencies.

    Times are seconds since 1970 by the server's clock. Only the slot knows `committed`.
    """

    events: list[Event]
    received: float
    timed: bool
    committed: float = 0.0


_NOTHING = ArrivedTransaction([], 0, timed=False)


class Pairing:
    """Takes transactions from both readers, in their threads, and compares them in the thread that calls advance().

    A transaction is kept until both paths have it; comparison is in commit order. `clock`: seconds by which the
    server's clock is ahead of this machine's, known up to `clock_error`. Latencies count for transactions committed
    after `timed_from` and received while `timed`. `slot_position`: LSN up to which the slot was read. `seen` counts
    changes. `commits`: time and changes of all transactions of the slot, also of those before began(), which are not
    compared.
    """

    def __init__(self, figures: Figures, clock: float, clock_error: float = 0.0) -> None:
        self.clock = clock
        self._clock_error = clock_error
        self.timed = False
        self.timed_from = 0.0
        self.slot_position = 0
        self.seen = {"queue": 0, "slot": 0}
        self.commits: list[tuple[float, int]] = []
        self._figures = figures
        self._lock = threading.Lock()
        self._start: PgSnapshot | None = None
        self._read_to: PgSnapshot | None = None
        self._queue: dict[int, ArrivedTransaction] = {}
        self._slot: deque[tuple[int, ArrivedTransaction]] = deque()
        self._latencies = {"queue": array("d"), "slot": array("d")}
        self._facts: Mapping[str, RuleTable] = {}
        self._comparison = Comparison()

    def began(self, snapshot: str, facts: Mapping[str, RuleTable]) -> None:
        """Note that the queue is attached: transactions that the snapshot does not see must come by both paths."""
        self._start = PgSnapshot.parse(snapshot)
        self._facts = facts
        self._comparison = Comparison(facts)

    def slot(self, xid: int, arrived: ArrivedTransaction) -> None:
        """Take a transaction from the slot."""
        self.slot_position = max(arrived.events[-1].id, self.slot_position)
        arrived = replace(arrived, events=[event for event in arrived.events if event.op in _CHANGES])
        if not arrived.events:
            return
        self.commits.append((arrived.committed, len(arrived.events)))
        if self._start is not None and not _sees(self._start, xid):
            self.seen["slot"] += len(arrived.events)
            with self._lock:
                self._slot.append((xid, arrived))

    def queue(self, batch: Mapping[int, ArrivedTransaction], snapshot: str) -> None:
        """Take a batch from the queue, which has now read everything that the snapshot sees."""
        for xid, arrived in batch.items():
            changes = [event for event in arrived.events if event.op in _CHANGES]
            if changes and self._start is not None and not _sees(self._start, xid):
                self.seen["queue"] += len(changes)
                with self._lock:
                    self._queue[xid & 0xFFFFFFFF] = replace(arrived, events=changes)
        self._read_to = PgSnapshot.parse(snapshot)

    def advance(self) -> None:
        """Compare the transactions that both paths have read past."""
        while self._slot:
            read_to = self._read_to
            xid, slot = self._slot[0]
            with self._lock:
                queue = self._queue.pop(xid, None)
            if queue is None and (read_to is None or not _sees(read_to, xid)):
                return
            self._slot.popleft()
            self._compare(queue or _NOTHING, slot)

    def finish(self) -> None:
        """Compare the rest, after both paths were read to the end and the slot further than the queue."""
        self.advance()
        for xid, slot in self._slot:
            # of two commits the first in the log may become visible last
            if xid in self._queue or (self._read_to is not None and _sees(self._read_to, xid)):
                self._compare(self._queue.pop(xid, _NOTHING), slot)
        for queue in self._queue.values():
            self._compare(queue, _NOTHING)
        figures = self._figures
        figures.difference_counts = dict(self._comparison.used) | (
            {"": self._comparison.errors} if self._comparison.errors else {}
        )
        figures.queue.latency = self._latency("queue")
        figures.slot.latency = self._latency("slot")
        self.commits.sort()
        self._totals = [0, *accumulate(changes for _, changes in self.commits)]

    def changes_between(self, begin: float, end: float) -> tuple[int, int]:
        """Numbers of changes and of transactions committed in a time, counted from the slot. Call after finish()."""
        first, last = bisect_left(self.commits, (begin, 0)), bisect_left(self.commits, (end, 0))
        return self._totals[last] - self._totals[first], last - first

    def _latency(self, path: str) -> LatencyFigures | None:
        """The latencies of a path; what is below the error of the clocks is noise."""
        ordered = sorted(self._latencies[path])
        if not ordered:
            return None
        p50, p99, longest = (
            self._figures.above_noise(f"{path}.latency", seconds, self._clock_error)
            for seconds in (_share(ordered, 0.5), _share(ordered, 0.99), ordered[-1])
        )
        return LatencyFigures(len(ordered), p50, p99, longest, _histogram(ordered))

    def _compare(self, queue: ArrivedTransaction, slot: ArrivedTransaction) -> None:
        for path, arrived in ((self._figures.queue, queue), (self._figures.slot, slot)):
            path.transactions += bool(arrived.events)
            for event in arrived.events:
                by_op = path.events.setdefault(event.table or "", {})
                by_op[event.op] = by_op.get(event.op, 0) + 1
        if queue.timed and slot.timed and slot.committed >= self.timed_from:
            self._latencies["queue"].append(max(queue.received - slot.committed, 0.0))
            self._latencies["slot"].append(max(slot.received - slot.committed, 0.0))
        self._look_for_images(queue.events, slot.events)
        for one in self._comparison.differences(queue.events, slot.events):
            if one.rule is None and len(self._figures.differences) < _EXAMPLES:
                self._figures.differences.append(str(one))

    def _look_for_images(self, queue: Sequence[Event], slot: Sequence[Event]) -> None:
        """Count old rows and large values that the slot lacks and the queue has, except generated columns."""
        columns: dict[str, set[str]] = {}
        for event in queue:
            columns.setdefault(event.table or "", set()).update(event.old or (), event.new or ())
        for table in columns.keys() & self._facts.keys():
            columns[table] -= self._facts[table].generated
        for event in slot:
            wanted = columns.get(event.table or "", set())
            if event.op in ("update", "delete") and not wanted <= (event.old or {}).keys():
                self._figures.old_missing += 1
            if event.op == "update" and not wanted <= (event.new or {}).keys():
                self._figures.new_partial += 1


def _sees(snapshot: PgSnapshot, xid: int) -> bool:
    """True if the snapshot sees the transaction; its number has 64 bits from the queue, 32 bits from the slot."""
    return snapshot.sees(snapshot.full(xid))


def _histogram(ordered: Sequence[float]) -> list[tuple[float, int]]:
    """Numbers of latencies by their upper bound."""
    counts: Counter[float] = Counter()
    for value in ordered:
        counts[next((bound for bound in LATENCY_BOUNDS if value <= bound), LATENCY_BOUNDS[-1])] += 1
    return sorted(counts.items())


def _share(ordered: Sequence[float], share: float) -> float:
    """The percentile: the smallest value that at least `share` of all values do not exceed."""
    return ordered[max(math.ceil(len(ordered) * share), 1) - 1]
