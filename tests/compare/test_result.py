"""What is made of the figures of a comparison: the recommendation, the page, and shares of latencies."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gdq.consumers.compare.figure_text import figure_rows, figures_text
from gdq.consumers.compare.figures import LatencyFigures, PhaseFigures, SampleFigures, ratio_error
from gdq.consumers.compare.page import compare_page
from gdq.consumers.compare.pairing import ArrivedTransaction, Pairing, _share
from gdq.consumers.compare.recommend import recommend
from gdq.consumers.compare.run import PHASE_SHARES
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.source import Event
from tests.support.compare_figures import figures_of, phases
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


FAST = LatencyFigures(9, 0.01, 0.2, 0.3, [])
LOG_DOUBLED = phases((1000, 100_000), (1000, 300_000), (1000, 300_000))


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
            "within 10.0 ms by the queue, 100 ms by the slot",
        ),
        (
            {"slot__latency": LatencyFigures(9, 0.01, 0.2, 0.3, [])},
            "slot",
            "within 10.0 ms by the slot, 100 ms by the queue",
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
    assert found.text.startswith(
        {"either": "Either will do", "unknown": "No recommendation"}.get(choice, f"Take the {choice}: ")
    )
    other = {"queue": {"slot"}, "slot": {"queue"}, "either": {"queue", "slot"}, "unknown": set()}[choice]
    assert found.unless.keys() == other
    assert all(condition in found.text for some in found.unless.values() for condition in some)


@pytest.mark.parametrize(
    ("changed", "unless"),
    [
        (
            {"old_missing": 5, "phases": LOG_DOUBLED, "slot__latency": FAST},
            ["REPLICA IDENTITY FULL (measure it with --replica-identity-full)"],
        ),
        ({"old_missing": 5}, ["no old rows, or the tables get REPLICA IDENTITY FULL", "no triggers"]),
        (
            {"slot__retained_per_second": 90_000.0, "slot__cpu_seconds": {"walsender": 9.0}, "slot__latency": FAST},
            ["within 100 ms (half of the slot's took 10.0 ms)"],
        ),
        (
            {"phases": LOG_DOUBLED, "slot__retained_per_second": 90_000.0},
            ["may stop for long (the slot then keeps 87.9 kB/s of the server's log, the queue 1.0 kB/s)", "wal_level"],
        ),
    ],
)
def test_says_what_would_change_the_verdict(changed: dict[str, Any], unless: list[str]) -> None:
    found = recommend(figures_of(**changed))
    (conditions,) = found.unless.values()
    assert len(conditions) <= 2
    assert all(any(text in condition for condition in conditions) for text in unless), conditions
    assert len(found.text.split(". ")) == 2


def test_each_point_is_on_its_side() -> None:
    """In the text, on the page and in JSON the points for the queue and those for the slot stand apart."""
    found = recommend(figures_of(old_missing=1, queue__retained_per_second=3000.0))
    text = figures_text(figures_of(), found)
    first, queue, slot, *_ = text.split("\n\n")
    assert first.replace("\n", " ") == found.text
    assert queue.startswith("for the queue\n  1 updates")
    assert slot == "for the slot\n  while nobody reads, the queue keeps 3.0 times the bytes that the slot keeps"
    page = Page(compare_page(figures_of(), found)).text
    places = [page.index(part) for part in (found.text, "For the queue", "For the slot", "keeps 3.0 times", "Measured")]
    assert places == sorted(places)
    record = found.as_json()
    assert [(one["weight"], one["text"]) for one in record["for_queue"]] == [(2, queue.splitlines()[1].strip())]
    assert len(record["for_slot"]) == 1


def test_nothing_is_zero_that_is_below_noise() -> None:
    """Such figures say so in text and page, with the value that could have been; in JSON they are null with a noise."""
    figures = figures_of(queue__retained_per_second=None, phases=phases((1000, 5_000), (1000, 4_000), (1000, 4_000)))
    figures.noise = {
        "queue.retained_per_second": 1638.4,
        "queue_wal_per_change": 3.0,
        "slot.cpu_seconds.consumer": 0.01,
    }
    figures.slot.cpu_seconds = {"consumer": None, "walsender": 0.5}
    figures.slot.latency = LatencyFigures(9, None, 0.2, 0.3, [(0.1, 9)])
    figures.noise["slot.latency"] = 0.00002
    found = recommend(figures)
    wanted = [
        ("log per change, added", "below noise (3 B)", "none of its own"),
        ("kept more while nobody read", "below noise (1.6 kB/s)", "1.0 kB/s"),
        ("latency p50", "100 ms", "below noise (0.02 ms)"),
        ("CPU of the server, reading", "consumer 1.00 s", "consumer below noise (10.0 ms), walsender 500 ms"),
    ]
    rows = figure_rows(figures)
    assert [row for row in rows if row in wanted] == sorted(wanted, key=rows.index)
    page = Page(compare_page(figures, found)).text
    assert all(cell in page for row in wanted for cell in row)
    record = figures.as_json()
    assert record["queue_wal_per_change"] is record["queue"]["retained_per_second"] is None
    assert record["noise"]["queue.retained_per_second"] == 1638.4
    # an unknown figure has no noise, and is none
    assert ("tables per change", "unknown", "none of its own") in rows
    # what is below noise still is a delay far below that of the other
    assert "half of the transactions came within 0.02 ms by the slot, 100 ms by the queue" in found.points("slot")


def test_noise_of_the_log_is_its_spread() -> None:
    """A steady log for a change has none; with few parts or changes it is unknown."""
    assert ratio_error([(50, 5000)] * 10) == 0.0
    assert ratio_error([(50, 5000)] * 3) is None
    assert ratio_error([(5, 500)] * 10) is None
    bursts = ratio_error([(50, 5000)] * 9 + [(50, 105_000)])
    assert bursts is not None
    assert 150 < bursts < 250


def test_page_of_names_and_values_that_are_markup() -> None:
    """Text of the database is text on the page, whatever is in it."""
    evil = '<script>alert("1")</script>&lt;\'{0}'
    figures = figures_of(tables=[evil], database=evil, server_version=evil, differences=[evil])
    figures.queue.events = {evil: {"update": 1000}}
    figures.difference_counts = {"": 1, evil: 2}
    figures.samples = [SampleFigures(0, 0, 0), SampleFigures(1, 10, 15 * 2**20)]
    shown = Page(compare_page(figures, recommend(figures)))
    assert shown.text.count(evil) == 8
    assert shown.plots == 3
    assert not shown.tags & {"script"}
    assert shown.asked == {"data:,"}
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
    assert of_kept == ["0 s", "1.00 s"]
    assert len(labels) <= 6
    assert labels[0].endswith(" ms")
    assert labels[-1] == "200 s"
    assert _share([0.0] * 99 + [1.0], 0.99) == 0.0
    assert _share([1.0], 0.5) == 1.0


def test_snapshots_see_numbers_of_32_bits() -> None:
    seen = PgSnapshot.parse(f"{2**32 * 3 + 5}:{2**32 * 3 + 9}:{2**32 * 3 + 7}")
    assert [xid for xid in range(12) if seen.sees(seen.full(xid))] == [0, 1, 2, 3, 4, 5, 6, 8]
    assert seen.full(2**32 - 1) == 2**32 * 3 - 1
    assert seen.full(2**32 * 3 + 7) == 2**32 * 3 + 7
