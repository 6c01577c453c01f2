"""What is made of the figures of a comparison: the recommendation, the page, and shares of latencies."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gdq.consumers.compare.figures import Figures, LatencyFigures, PhaseFigures, SampleFigures
from gdq.consumers.compare.page import compare_page
from gdq.consumers.compare.pairing import ArrivedTransaction, Pairing, _share
from gdq.consumers.compare.recommend import recommend
from gdq.consumers.compare.run import PHASE_SHARES
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.source import Event
from tests.support.html_page import Page

pytestmark = pytest.mark.server


def test_latency_is_not_of_what_waited_for_its_reader() -> None:
    """What was committed before both readers were at work counts as changes, not as latency."""
    figures = figures_of()
    figures.queue.events, figures.slot.events = {}, {}
    pairing = Pairing(figures, clock=0.0)
    pairing.began("100:100:", {})
    pairing.timed_from = 50.0
    for xid, committed in ((101, 40.0), (102, 51.0), (103, 52.0)):
        event = Event(xid, xid, datetime.fromtimestamp(committed, UTC), "insert", "t", {"i": xid}, None, {"i": xid})
        pairing.slot(xid, ArrivedTransaction([event], 52.5, timed=True, committed=committed))
        pairing.queue({xid: ArrivedTransaction([event], 53.0, timed=xid != 103)}, f"{xid + 1}:{xid + 1}:")
    pairing.finish()
    assert pairing.slot_position == 103
    assert figures.slot.latency == LatencyFigures(1, 1.5, 1.5, 1.5, [(2.0, 1)])
    assert figures.queue.latency == LatencyFigures(1, 2.0, 2.0, 2.0, [(2.0, 1)])
    assert figures.queue.events == figures.slot.events == {"t": {"insert": 3}}


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


@pytest.mark.parametrize(
    ("changed", "choice", "because"),
    [
        ({}, "either", ""),
        ({"difference_counts": {"": 1}}, "unknown", ""),
        ({"difference_counts": {"`time`": 1000}}, "either", ""),
        ({"slot__events": {"t": {"update": 99}}}, "unknown", ""),
        ({"old_missing": 1}, "queue", "without the old row"),
        ({"new_partial": 1}, "queue", "without their large values"),
        (
            {"queue__latency": LatencyFigures(9, 0.01, 0.2, 0.3, [])},
            "queue",
            "within 10 ms by the queue, 100 ms by the slot",
        ),
        (
            {"slot__latency": LatencyFigures(9, 0.01, 0.2, 0.3, [])},
            "slot",
            "within 10 ms by the slot, 100 ms by the queue",
        ),
        ({"slot__latency": None}, "either", ""),
        ({"slot__retained_per_second": 2000.0}, "queue", "the slot keeps 2.0 times the bytes"),
        # what the slot keeps has the queue's own log in it, which would not be there
        ({"slot__retained_per_second": 2000.0, "phases": phases((1000, 1500), (1000, 9), (1000, 9))}, "either", ""),
        ({"queue__retained_per_second": 3000.0}, "slot", "the queue keeps 3.0 times the bytes"),
        ({"queue__cpu_seconds": {"consumer": 4.0}}, "slot", "by the queue takes 4.0 times the server's CPU"),
        ({"slot__cpu_seconds": {"consumer": 1.0, "walsender": 1.5}}, "queue", "by the slot takes 2.5 times"),
        ({"slot__cpu_seconds": {"consumer": 1.0, "walsender": None}}, "either", ""),
        (
            {"phases": [PhaseFigures(n, 0, 1, 1000, 9, w) for n, w in zip(PHASE_SHARES, (1, 2, 2), strict=True)]},
            "slot",
            "2.0 times the log",
        ),
        (
            {"phases": [PhaseFigures(n, 0, 1, c, 9, c) for n, c in zip(PHASE_SHARES, (1000, 700, 1), strict=True)]},
            "slot",
            "700 changes a second",
        ),
        (
            {"phases": [PhaseFigures(n, 0, 1, c, 9, c) for n, c in zip(PHASE_SHARES, (0, 700, 1), strict=True)]},
            "either",
            "",
        ),
        # readers slow the application, too: without them it is as fast with triggers
        ({"phases": phases((1000, 1000), (700, 700), (950, 950))}, "either", ""),
        # too few changes to tell the log for one
        ({"phases": phases((9, 9), (1000, 9000), (1000, 9000))}, "either", ""),
        ({"phases": phases((1000, 1000), (9, 9000), (1000, 9000))}, "either", ""),
        ({"old_missing": 1, "queue__retained_per_second": 3000.0}, "queue", "without the old row"),
    ],
)
def test_recommends_by_what_was_measured(changed: dict[str, Any], choice: str, because: str) -> None:
    found = recommend(figures_of(**changed))
    assert found.choice == choice
    assert [reason for reason in found.reasons if because and because in reason.text] == found.reasons[:1]
    assert choice in (found.text.lower() if choice != "unknown" else "unknown")


def test_page_of_names_and_values_that_are_markup() -> None:
    """Text of the database is text on the page, whatever is in it."""
    evil = '<script>alert("1")</script>&lt;\'{0}'
    figures = figures_of(tables=[evil], database=evil, server_version=evil, differences=[evil])
    figures.queue.events = {evil: {"update": 1000}}
    figures.difference_counts = {"": 1, evil: 2}
    figures.samples = [SampleFigures(0, 0, 0), SampleFigures(1, 10, 15 * 2**20)]
    shown = Page(compare_page(figures, recommend(figures)))
    assert shown.text.count(evil) == 7
    assert shown.plots == 3
    assert not shown.tags & {"script"}
    assert {"0", "10 MB", "20 MB", "nobody reads"} <= set(shown.labels)


def test_latencies_of_all_sizes_have_room_for_their_labels() -> None:
    figures = figures_of(
        queue__latency=LatencyFigures(4, 0.0001, 200.0, 200.0, [(0.0001, 2), (200.0, 2)]),
        samples=[SampleFigures(0, 0, 0)] * 2,
    )
    labels = [
        label for label in Page(compare_page(figures, recommend(figures))).labels if label.endswith((" ms", " s"))
    ]
    labels, of_kept = labels[:-2], labels[-2:]
    assert of_kept == ["0 s", "1 s"]
    assert len(labels) <= 10
    assert labels[0].endswith(" ms")
    assert labels[-1] == "200 s"
    assert _share([0.0] * 99 + [1.0], 0.99) == 0.0
    assert _share([1.0], 0.5) == 1.0


def test_snapshots_see_numbers_of_32_bits() -> None:
    seen = PgSnapshot.parse(f"{2**32 * 3 + 5}:{2**32 * 3 + 9}:{2**32 * 3 + 7}")
    assert [xid for xid in range(12) if seen.sees(seen.full(xid))] == [0, 1, 2, 3, 4, 5, 6, 8]
    assert seen.full(2**32 - 1) == 2**32 * 3 - 1
    assert seen.full(2**32 * 3 + 7) == 2**32 * 3 + 7
