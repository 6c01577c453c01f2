"""The figures of a run as rows of text, the same in the terminal and on the page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from gdq.consumers.compare.figures import Figures, PathFigures
from gdq.consumers.compare.recommend import Recommendation
from gdq.units import delay, size, span

_Row = tuple[str, ...]

UNTOLD = (
    "What cannot be told apart: the write-ahead log is the whole server's, so what others write counts in every phase;"
    " the queue's share is the difference between two phases and assumes that the work stayed the same."
    " What the triggers cost is done by the processes of the writers, and is not in the CPU of either path."
    " The log that the slot retains holds what the queue has written, too, and its walsender reads past that:"
    " what the slot would keep by itself is reckoned with the log for a change of the first phase."
    " Readers on the application's machine take CPU from it while both read."
)


PATHS = ("queue", "slot")


def events_rows(figures: Figures) -> list[_Row]:
    """Table and operation, with the events of the queue and of the slot."""
    kinds = sorted({(t, op) for path in (figures.queue, figures.slot) for t, ops in path.events.items() for op in ops})
    rows: list[_Row] = [
        (f"{table} {op}", _count(figures.queue, table, op), _count(figures.slot, table, op)) for table, op in kinds
    ]
    return [*rows, ("transactions", f"{figures.queue.transactions:,}", f"{figures.slot.transactions:,}")]


def figure_rows(figures: Figures) -> list[_Row]:
    """The figures of both paths."""
    no_slot = "none of its own"
    return [
        ("latency p50", *(_latency(figures, name, "p50") for name in PATHS)),
        ("latency p99", *(_latency(figures, name, "p99") for name in PATHS)),
        ("tables per change", told(figures, "log_bytes_per_change", figures.log_bytes_per_change, size), no_slot),
        ("log per change, added", told(figures, "queue_wal_per_change", figures.queue_wal_per_change, size), no_slot),
        ("kept after nobody read", *(_known(getattr(figures, name).retained_bytes, size) for name in PATHS)),
        ("kept more while nobody read", *(_retained(figures, name) for name in PATHS)),
        (
            "the same without the queue's log",
            _retained(figures, "queue"),
            _known(figures.slot_retained_by_itself, _per_second),
        ),
        ("time to catch up", *(_known(getattr(figures, name).catch_up_seconds, delay) for name in PATHS)),
        ("CPU of the server, reading", *(_cpu(figures, name) for name in PATHS)),
        ("updates, deletes without the old row", "0", f"{figures.old_missing:,}"),
        ("updates without their large values", "0", f"{figures.new_partial:,}"),
    ]


def phase_rows(figures: Figures) -> list[tuple[str, ...]]:
    """The phases: time, changes a second, transactions a second, bytes of log for a change."""
    return [
        (
            phase.name,
            span(phase.end - phase.begin),
            f"{phase.changes_per_second:,.0f}/s",
            f"{phase.transactions_per_second:,.0f}/s",
            "no changes" if phase.wal_per_change is None else size(phase.wal_per_change),
        )
        for phase in figures.phases
    ]


PHASE_TITLES = ("phase", "time", "changes", "transactions", "log per change")
PATH_TITLES = ("", *PATHS)


def told(figures: Figures, name: str, value: float | None, show: Callable[[float], str]) -> str:
    """A measured figure; one that cannot be told from nothing says so, with the value that could have been."""
    if value is None and name in figures.noise:
        return f"below noise ({show(figures.noise[name])})"
    return _known(value, show)


def difference_lines(figures: Figures) -> list[str]:
    """The number of differences by rule, and the first differences that no rule explains."""
    unexplained = figures.difference_counts.get("", 0)
    first = (
        f"{unexplained:,} that no rule explains" if unexplained else "none but by rule: the same changes came by both"
    )
    known = sorted((rule, count) for rule, count in figures.difference_counts.items() if rule)
    return [first, *figures.differences, *(f"by rule {rule.replace('`', '')}: {count:,}" for rule, count in known)]


def about(figures: Figures) -> str:
    """What was measured, where and when."""
    set_full = "; replica identity FULL for the run" if figures.replica_identity_full else ""
    started = figures.started_at[:19].replace("T", " ")
    return (
        f"{figures.database}, PostgreSQL {figures.server_version}, {span(figures.seconds)} from"
        f" {started} UTC: {', '.join(figures.tables)}{set_full}"
    )


def points_of(found: Recommendation) -> dict[str, list[str]]:
    """What speaks for each path, by a title; nothing if there is no recommendation."""
    if found.choice == "unknown":
        return {}
    return {f"for the {name}": found.points(name) or ["nothing that was measured"] for name in PATHS}


def figures_text(figures: Figures, found: Recommendation) -> str:
    """The whole result for a terminal, the verdict first."""
    parts = [
        _wrapped(found.text),
        *(_listed(title, lines) for title, lines in points_of(found).items()),
        about(figures),
        _aligned([("measured", *PATHS), *figure_rows(figures)]),
        _aligned([PHASE_TITLES, *phase_rows(figures)]),
        _aligned([("events", *PATHS), *events_rows(figures)]),
        _listed("differences", difference_lines(figures)),
        _wrapped(UNTOLD),
    ]
    return "\n\n".join(parts)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def _listed(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _count(path: PathFigures, table: str, op: str) -> str:
    return f"{path.events.get(table, {}).get(op, 0):,}"


def _known(value: float | None, show: Callable[[float], str]) -> str:
    return "unknown" if value is None else show(value)


def _per_second(number: float) -> str:
    return f"{size(number)}/s"


def _retained(figures: Figures, path: str) -> str:
    name = "retained_per_second"
    return told(figures, f"{path}.{name}", getattr(getattr(figures, path), name), _per_second)


def _latency(figures: Figures, path: str, which: str) -> str:
    latency = getattr(figures, path).latency
    return "unknown" if latency is None else told(figures, f"{path}.latency", getattr(latency, which), delay)


def _cpu(figures: Figures, path: str) -> str:
    by_process: dict[str, float | None] = getattr(figures, path).cpu_seconds
    parts = [
        f"{process} {told(figures, f'{path}.cpu_seconds.{process}', seconds, delay)}"
        for process, seconds in by_process.items()
    ]
    return ", ".join(parts) or "unknown"
