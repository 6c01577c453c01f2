"""The recommendation of queue or slot, by rules over the measured figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gdq.consumers.compare.figures import CHANGES_MIN, Figures
from gdq.units import delay, size

RecommendedPath = Literal["queue", "slot", "either", "unknown"]
FavouredPath = Literal["queue", "slot"]

# The smallest difference between the paths that counts, as a ratio or a share.
_WAL_RATIO = 2.0
_RATE_SHARE = 0.8
_LATENCY_RATIO = 2.0
_LATENCY_SECONDS_MIN = 0.02
_RETAINED_RATIO = 2.0
_CPU_RATIO = 2.0

# A verdict names as many conditions that would change it.
_CONDITIONS = 2
_OTHER: dict[str, FavouredPath] = {"queue": "slot", "slot": "queue"}


@dataclass(frozen=True, slots=True)
class RecommendationReason:
    """One finding, the path that it favours, and its weight; `about_rows`: it is one of rows that are not whole."""

    side: FavouredPath
    weight: int
    text: str
    about_rows: bool = False


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended `choice`, in a sentence or two, with the findings for and against it, the weightiest first.

    `unless`: by path, what would make it the choice in place of the other; the sentences say the same.
    """

    choice: RecommendedPath
    text: str
    reasons: list[RecommendationReason] = field(default_factory=list)
    unless: dict[str, list[str]] = field(default_factory=dict)

    def points(self, side: str) -> list[str]:
        """What was found that speaks for a path."""
        return [reason.text for reason in self.reasons if reason.side == side]

    def as_json(self) -> dict[str, Any]:
        """The recommendation with the findings for each path apart."""
        apart = {
            f"for_{side}": [{"weight": one.weight, "text": one.text} for one in self.reasons if one.side == side]
            for side in _OTHER
        }
        return {"choice": self.choice, "text": self.text, "unless": self.unless, **apart}


def recommend(figures: Figures) -> Recommendation:
    """Weigh the findings: recommends the path with more weight, or `either` if both are equal.

    `unknown` if differences follow no known rule, or too few changes were seen.
    """
    unexplained = figures.difference_counts.get("", 0)
    if unexplained:
        which = "1 difference follows" if unexplained == 1 else f"{unexplained:,} differences follow"
        return Recommendation("unknown", f"No recommendation: {which} no known rule. Find out why first.")
    seen = min(figures.queue.total, figures.slot.total)
    if seen < CHANGES_MIN:
        text = f"No recommendation: {seen:,} changes are too few, it takes {CHANGES_MIN}."
        return Recommendation("unknown", f"{text} Run it for longer (--seconds), or while the application works.")
    reasons = sorted(
        [*_completeness(figures), *_cost(figures), *_latency(figures), *_retained(figures), *_cpu(figures)],
        key=lambda reason: -reason.weight,
    )
    choice = _heavier(reasons)
    if choice is None:
        unless = {"queue": _for_queue(figures)[:1], "slot": _for_slot(figures, [])[:1]}
        what = "the findings weigh the same" if reasons else "nothing that was measured tells them apart"
        text = f"Either will do: {what}. Take the queue if {unless['queue'][0]}; take the slot if {unless['slot'][0]}."
        return Recommendation("either", text, reasons, unless)
    against = (_for_queue(figures) if choice == "slot" else _for_slot(figures, reasons))[:_CONDITIONS]
    because = next(reason.text for reason in reasons if reason.side == choice)
    text = f"Take the {choice}: {because}. Take the {_OTHER[choice]} instead if {', or if '.join(against)}."
    return Recommendation(choice, text, reasons, {_OTHER[choice]: against})


def _heavier(reasons: Sequence[RecommendationReason]) -> FavouredPath | None:
    balance = sum(reason.weight if reason.side == "queue" else -reason.weight for reason in reasons)
    return None if balance == 0 else "queue" if balance > 0 else "slot"


def _for_queue(figures: Figures) -> list[str]:
    """What would speak for the queue if it were so, the most likely first; at least one condition."""
    found = []
    if figures.old_missing or figures.new_partial:
        found.append(
            "consumers need old rows or whole rows, which the slot lacks without REPLICA IDENTITY FULL"
            " (measure it with --replica-identity-full)"
        )
    queue, slot = figures.queue.retained_per_second, figures.slot_retained_by_itself
    if slot is not None and slot > (queue or 0.0):
        what = f", the queue {size(queue)}/s" if queue else ""
        found.append(f"a consumer may stop for long (the slot then keeps {size(slot)}/s of the server's log{what})")
    return [*found, "the server cannot stay at wal_level = logical"]


def _for_slot(figures: Figures, reasons: Sequence[RecommendationReason]) -> list[str]:
    """What would change a verdict of these reasons into the slot, the most likely first; at least one condition."""
    found = []
    if _heavier([reason for reason in reasons if not reason.about_rows]) != _heavier(reasons):
        found.append(
            "consumers need no old rows, or the tables get REPLICA IDENTITY FULL"
            " (measure it with --replica-identity-full)"
        )
    p50 = _medians(figures)
    if p50 is not None and p50["queue"] >= _LATENCY_RATIO * p50["slot"]:
        found.append(f"changes must arrive within {delay(p50['queue'])} (half of the slot's took {delay(p50['slot'])})")
    return [*found, "the tables may have no triggers"]


def _completeness(figures: Figures) -> list[RecommendationReason]:
    found = []
    if figures.old_missing:
        text = f"{figures.old_missing:,} updates and deletes came by the slot without the old row, by the queue with it"
        found.append(RecommendationReason("queue", 2, text, about_rows=True))
    if figures.new_partial:
        text = f"{figures.new_partial:,} updates came by the slot without their large values, by the queue with them"
        found.append(RecommendationReason("queue", 1, text, about_rows=True))
    return found


def _cost(figures: Figures) -> list[RecommendationReason]:
    alone, both, idle = (figures.phase(name) for name in ("slot alone", "both read", "nobody reads"))
    found = []
    if min(alone.changes, both.changes) < CHANGES_MIN:
        return []
    added = figures.queue_wal_per_change
    if alone.wal_per_change and added is not None and added >= (_WAL_RATIO - 1) * alone.wal_per_change:
        ratio = added / alone.wal_per_change + 1
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
    p50 = _medians(figures)
    if p50 is None:
        return []
    fast: FavouredPath = "queue" if p50["queue"] < p50["slot"] else "slot"
    slow = _OTHER[fast]
    if p50[slow] < _LATENCY_RATIO * p50[fast] or p50[slow] - p50[fast] < _LATENCY_SECONDS_MIN:
        return []
    text = f"half of the transactions came within {delay(p50[fast])} by the {fast}, {delay(p50[slow])} by the {slow}"
    return [RecommendationReason(fast, 1, text)]


def _medians(figures: Figures) -> dict[str, float] | None:
    """The median latency by path, at least its noise; None if unknown."""
    found = {}
    for name, path in (("queue", figures.queue), ("slot", figures.slot)):
        if path.latency is None:
            return None
        p50 = path.latency.p50
        found[name] = figures.noise[f"{name}.latency"] if p50 is None else p50
    return found


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
    queue, slot = figures.cpu("queue"), figures.cpu("slot")
    if not queue or not slot:
        return []
    text = "reading by the {} takes {:.1f} times the server's CPU"
    if slot >= _CPU_RATIO * queue:
        return [RecommendationReason("queue", 1, text.format("slot", slot / queue))]
    if queue >= _CPU_RATIO * slot:
        return [RecommendationReason("slot", 1, text.format("queue", queue / slot))]
    return []
