"""The recommendation of queue or slot, by rules over the measured figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gdq.consumers.compare.figures import CHANGES_MIN, Figures

RecommendedPath = Literal["queue", "slot", "either", "unknown"]
FavouredPath = Literal["queue", "slot"]

# The smallest difference between the paths that counts, as a ratio or a share.
_WAL_RATIO = 2.0
_RATE_SHARE = 0.8
_LATENCY_RATIO = 2.0
_LATENCY_SECONDS_MIN = 0.02
_RETAINED_RATIO = 2.0
_CPU_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class RecommendationReason:
    """One finding, the path that it favours, and its weight."""

    side: FavouredPath
    weight: int
    text: str


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended `choice` with the findings for and against it, the weightiest first, and a sentence `text`."""

    choice: RecommendedPath
    text: str
    reasons: list[RecommendationReason]


def recommend(figures: Figures) -> Recommendation:
    """Weigh the findings: recommends the path with more weight, or `either` if both are equal.

    `unknown` if differences follow no known rule, or too few changes were seen.
    """
    unexplained = figures.difference_counts.get("", 0)
    if unexplained:
        text = f"No recommendation: {unexplained:,} differences follow no known rule. Find out why first."
        return Recommendation("unknown", text, [])
    seen = min(figures.queue.total, figures.slot.total)
    if seen < CHANGES_MIN:
        text = f"No recommendation: {seen:,} changes are too few. Run it for longer, or while the application works."
        return Recommendation("unknown", text, [])
    reasons = sorted(
        [*_completeness(figures), *_cost(figures), *_latency(figures), *_retained(figures), *_cpu(figures)],
        key=lambda reason: -reason.weight,
    )
    weights = {side: sum(r.weight for r in reasons if r.side == side) for side in ("queue", "slot")}
    if weights["queue"] == weights["slot"]:
        what = "the findings weigh the same" if reasons else "nothing that was measured tells them apart"
        return Recommendation("either", f"Either will do: {what}.", reasons)
    choice: FavouredPath = "queue" if weights["queue"] > weights["slot"] else "slot"
    return Recommendation(choice, f"Take the {choice}.", reasons)


def _completeness(figures: Figures) -> list[RecommendationReason]:
    found = []
    if figures.old_missing:
        text = f"{figures.old_missing:,} updates and deletes came by the slot without the old row, by the queue with it"
        found.append(RecommendationReason("queue", 2, text))
    if figures.new_partial:
        text = f"{figures.new_partial:,} updates came by the slot without their large values, by the queue with them"
        found.append(RecommendationReason("queue", 1, text))
    return found


def _cost(figures: Figures) -> list[RecommendationReason]:
    alone, both, idle = (figures.phase(name) for name in ("slot alone", "both read", "nobody reads"))
    found = []
    if min(alone.changes, both.changes) < CHANGES_MIN:
        return []
    if alone.wal_per_change and both.wal_per_change and both.wal_per_change >= _WAL_RATIO * alone.wal_per_change:
        ratio = both.wal_per_change / alone.wal_per_change
        text = f"with the queue the server writes {ratio:.1f} times the log for a change"
        found.append(RecommendationReason("slot", 2, text))
    # readers on this machine slow the application too; only the cost of triggers remains while nobody reads
    best = max(both.changes_per_second, idle.changes_per_second)
    if best < _RATE_SHARE * alone.changes_per_second:
        text = (
            f"with the triggers the application made {best:,.0f} changes a second at best,"
            f" without them {alone.changes_per_second:,.0f}"
        )
        found.append(RecommendationReason("slot", 2, text))
    return found


def _latency(figures: Figures) -> list[RecommendationReason]:
    queue, slot = figures.queue.latency, figures.slot.latency
    if queue is None or slot is None:
        return []
    (fast, low), (slow, high) = sorted((("queue", queue.p50), ("slot", slot.p50)), key=lambda item: item[1])
    if high < _LATENCY_RATIO * low or high - low < _LATENCY_SECONDS_MIN:
        return []
    text = f"half of the transactions came within {low * 1000:.0f} ms by the {fast}, {high * 1000:.0f} ms by the {slow}"
    return [RecommendationReason("queue" if fast == "queue" else "slot", 1, text)]


def _retained(figures: Figures) -> list[RecommendationReason]:
    queue, slot = figures.queue.retained_per_second, figures.slot_retained_by_itself
    if not queue or not slot:
        return []
    if slot >= _RETAINED_RATIO * queue:
        text = (
            f"while nobody reads, the slot keeps {slot / queue:.1f} times the bytes that the queue keeps,"
            " the queue's own log not counted"
        )
        return [RecommendationReason("queue", 1, text)]
    if queue >= _RETAINED_RATIO * slot:
        text = f"while nobody reads, the queue keeps {queue / slot:.1f} times the bytes that the slot keeps"
        return [RecommendationReason("slot", 1, text)]
    return []


def _cpu(figures: Figures) -> list[RecommendationReason]:
    queue, slot = figures.queue.cpu, figures.slot.cpu
    if not queue or not slot:
        return []
    text = "reading by the {} takes {:.1f} times the server's CPU"
    if slot >= _CPU_RATIO * queue:
        return [RecommendationReason("queue", 1, text.format("slot", slot / queue))]
    if queue >= _CPU_RATIO * slot:
        return [RecommendationReason("slot", 1, text.format("queue", queue / slot))]
    return []
