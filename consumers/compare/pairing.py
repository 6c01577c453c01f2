"""The transactions of both paths put beside each other as they arrive: differences, latencies, counts."""

from __future__ import annotations

import json
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gdq.consumers.compare.figures import Difference, Figures, Latency
from gdq.source import Event

_EXAMPLES = 20
_CHANGES = ("insert", "update", "delete", "truncate")
_BOUNDS = tuple(base * 10.0**power for power in range(-4, 3) for base in (1, 2, 5))


class Snapshot:
    """What a snapshot of the server sees, for transaction numbers of 32 bits, too."""

    def __init__(self, text: str) -> None:
        low, high, running = text.split(":")
        self._low, self._high = int(low), int(high)
        self._running = {int(xid) for xid in running.split(",") if xid}

    def sees(self, xid: int) -> bool:
        """Whether the transaction was over; `xid` may lack its upper bits, and is then the one nearest."""
        near = xid
        if xid < 2**32 <= self._high + 2**31:
            near = (self._high & ~0xFFFFFFFF) | xid
            near += (near < self._high - 2**31) * 2**32 - (near > self._high + 2**31) * 2**32
        return near < self._low or (near < self._high and near not in self._running)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A transaction of one path: its changes, when the last of them was received, whether that counts as latency.

    Moments are seconds since 1970 by the server's clock. `committed` is known by the slot alone.
    """

    events: list[Event]
    received: float
    timed: bool
    committed: float = 0.0


def differences(xid: int, queue: Sequence[Event], slot: Sequence[Event]) -> list[Difference]:
    """How the changes of one transaction differ between the paths: as multisets of table, operation and key."""
    ours, theirs = Counter(map(_identity, queue)), Counter(map(_identity, slot))
    missing = [("slot", *item) for item in (ours - theirs).items()] + [("queue", *i) for i in (theirs - ours).items()]
    return [
        Difference(xid, table, None, f"{op} of {table} {key or ''} ({count}) did not come by the {side}")
        for side, (table, op, key), count in missing
    ]


class Pairing:
    """Takes what both readers receive, from two threads; keeps a transaction until the other path has it, too.

    `clock`: seconds by which the server's clock is ahead of this machine's. Only transactions after began() and up to
    the snapshot of finish() are compared; the slot's commits before are counted as well, for the rates.
    """

    def __init__(self, figures: Figures, clock: float) -> None:
        self.clock = clock
        self.timed = False
        self.seen = {"queue": 0, "slot": 0}
        self.commits: list[tuple[float, int]] = []
        self._figures = figures
        self._lock = threading.Lock()
        self._start: Snapshot | None = None
        self._waiting: dict[str, dict[int, Arrived]] = {"queue": {}, "slot": {}}
        self._latencies = {"queue": array("d"), "slot": array("d")}
        self._differences: Counter[str] = Counter()

    def began(self, snapshot: str) -> None:
        """The queue is there: what the snapshot does not see must come by both paths."""
        self._start = Snapshot(snapshot)

    def slot(self, xid: int, arrived: Arrived) -> None:
        """A transaction came by the slot."""
        changes = [event for event in arrived.events if event.op in _CHANGES]
        if not changes:
            return
        self.commits.append((arrived.committed, len(changes)))
        if self._start is not None and not self._start.sees(xid):
            self.seen["slot"] += len(changes)
            self._take("slot", "queue", xid, Arrived(changes, arrived.received, arrived.timed, arrived.committed))

    def queue(self, xid: int, arrived: Arrived) -> None:
        """A transaction came by the queue."""
        changes = [event for event in arrived.events if event.op in _CHANGES]
        if changes and self._start is not None and not self._start.sees(xid):
            self.seen["queue"] += len(changes)
            self._take("queue", "slot", xid & 0xFFFFFFFF, Arrived(changes, arrived.received, arrived.timed))

    def finish(self, snapshot: str) -> None:
        """Both were read to an end: the queue to that snapshot, the slot beyond it."""
        end = Snapshot(snapshot)
        nothing = Arrived([], 0, timed=False)
        for xid, slot in self._waiting["slot"].items():
            if end.sees(xid):
                self._compare(xid, nothing, slot)
        for xid, queue in self._waiting["queue"].items():
            self._compare(xid, queue, nothing)
        self._figures.difference_counts = dict(self._differences)
        self._figures.queue.latency = _latency(self._latencies["queue"])
        self._figures.slot.latency = _latency(self._latencies["slot"])

    def changes_between(self, begin: float, end: float) -> tuple[int, int]:
        """Changes and transactions that were committed in that time, as the slot tells."""
        found = [changes for committed, changes in self.commits if begin <= committed < end]
        return sum(found), len(found)

    def _take(self, side: str, other: str, xid: int, arrived: Arrived) -> None:
        with self._lock:
            partner = self._waiting[other].pop(xid, None)
            if partner is None:
                self._waiting[side][xid] = arrived
                return
            queue, slot = (arrived, partner) if side == "queue" else (partner, arrived)
            self._compare(xid, queue, slot)
            if queue.timed and slot.timed:
                self._latencies["queue"].append(queue.received - slot.committed)
                self._latencies["slot"].append(slot.received - slot.committed)

    def _compare(self, xid: int, queue: Arrived, slot: Arrived) -> None:
        for path, arrived in ((self._figures.queue, queue), (self._figures.slot, slot)):
            path.transactions += bool(arrived.events)
            for event in arrived.events:
                by_op = path.events.setdefault(event.table or "", {})
                by_op[event.op] = by_op.get(event.op, 0) + 1
        self._look_for_images(queue.events, slot.events)
        for one in differences(xid, queue.events, slot.events):
            self._differences[one.rule or ""] += 1
            if len(self._figures.differences) < _EXAMPLES:
                self._figures.differences.append(one)

    def _look_for_images(self, queue: Sequence[Event], slot: Sequence[Event]) -> None:
        """Count what the slot leaves out of rows, which the queue has whole."""
        columns: dict[str | None, int] = {}
        for event in queue:
            columns[event.table] = max(columns.get(event.table, 0), len(event.old or ()), len(event.new or ()))
        for event in slot:
            if event.op in ("update", "delete") and len(event.old or ()) < columns.get(event.table, 0):
                self._figures.old_missing += 1
            if event.op == "update" and len(event.new or ()) < columns.get(event.table, 0):
                self._figures.new_partial += 1


def _identity(event: Event) -> tuple[str | None, str, str]:
    return event.table, event.op, json.dumps(event.key, sort_keys=True) if event.key else ""


def _latency(seconds: array[float]) -> Latency | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    counts: Counter[float] = Counter()
    for value in ordered:
        counts[next((bound for bound in _BOUNDS if value <= bound), _BOUNDS[-1])] += 1
    return Latency(
        len(ordered), _share(ordered, 0.5), _share(ordered, 0.99), ordered[-1], [(b, counts[b]) for b in sorted(counts)]
    )


def _share(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
