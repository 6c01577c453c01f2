"""The figures of a run as rows of text, the same in the terminal and on the page."""

from __future__ import annotations

from gdq.consumers.compare.figures import Figures, LatencyFigures, PathFigures

_Row = tuple[str, ...]

UNTOLD = (
    "What cannot be told apart: the write-ahead log is the whole server's, so what others write counts in every phase;"
    " the queue's share is the difference between two phases and assumes that the work stayed the same."
    " What the triggers cost is done by the processes of the writers, and is not in the CPU of either path."
    " The log that the slot retains holds what the queue has written, too, and its walsender reads past that:"
    " what the slot would keep by itself is reckoned with the log for a change of the first phase."
    " Readers on the application's machine take CPU from it while both read."
)


def size_text(number: float | None) -> str:
    """Bytes in the unit that fits."""
    if number is None:
        return "unknown"
    for unit in ("B", "kB", "MB"):
        if number < 10_000:
            return f"{number:,.0f} {unit}"
        number /= 1024
    return f"{number:,.0f} GB"


def events_rows(figures: Figures) -> list[_Row]:
    """Table and operation, with the events of the queue and of the slot."""
    kinds = sorted({(t, op) for path in (figures.queue, figures.slot) for t, ops in path.events.items() for op in ops})
    rows: list[_Row] = [
        (f"{table} {op}", _count(figures.queue, table, op), _count(figures.slot, table, op)) for table, op in kinds
    ]
    return [*rows, ("transactions", f"{figures.queue.transactions:,}", f"{figures.slot.transactions:,}")]


def figure_rows(figures: Figures) -> list[_Row]:
    """The figures of both paths."""
    both = (figures.queue, figures.slot)
    return [
        ("latency p50", *(_milliseconds(path.latency, "p50") for path in both)),
        ("latency p99", *(_milliseconds(path.latency, "p99") for path in both)),
        ("bytes of tables per change", size_text(figures.log_bytes_per_change), "0 B"),
        ("bytes of log per change, added", size_text(figures.queue_wal_per_change), "none but what wal_level adds"),
        ("kept after nobody read", *(size_text(path.retained_bytes) for path in both)),
        ("kept more while nobody read", *(_rate(path.retained_per_second) for path in both)),
        (
            "the same without the queue's log",
            _rate(figures.queue.retained_per_second),
            _rate(figures.slot_retained_by_itself),
        ),
        ("time to catch up", *(_seconds(path.catch_up_seconds) for path in both)),
        ("CPU of the server, reading", *map(_cpu, both)),
        ("updates, deletes without the old row", "0", f"{figures.old_missing:,}"),
        ("updates without their large values", "0", f"{figures.new_partial:,}"),
    ]


def phase_rows(figures: Figures) -> list[tuple[str, ...]]:
    """The phases: seconds, changes a second, transactions a second, bytes of log for a change."""
    return [
        (
            phase.name,
            f"{phase.end - phase.begin:.1f}",
            f"{phase.changes_per_second:,.0f}",
            f"{phase.transactions_per_second:,.0f}",
            size_text(phase.wal_per_change),
        )
        for phase in figures.phases
    ]


PHASE_TITLES = ("phase", "seconds", "changes/s", "transactions/s", "bytes of log per change")
PATH_TITLES = ("", "queue", "slot")


def difference_lines(figures: Figures) -> list[str]:
    """The number of differences by rule, and the first differences that no rule explains."""
    unexplained = figures.difference_counts.get("", 0)
    first = (
        f"{unexplained:,} that no rule explains" if unexplained else "none but by rule: the same changes came by both"
    )
    known = sorted((rule, count) for rule, count in figures.difference_counts.items() if rule)
    return [first, *figures.differences, *(f"by rule {rule.replace('`', '')}: {count:,}" for rule, count in known)]


def figures_text(figures: Figures, verdict: str, reasons: list[str]) -> str:
    """The whole result for a terminal."""
    parts = [
        f"{figures.database}, PostgreSQL {figures.server_version}, {figures.seconds:g} s: {', '.join(figures.tables)}",
        _aligned([("events", "queue", "slot"), *events_rows(figures)]),
        "differences\n" + "\n".join(f"  {line}" for line in difference_lines(figures)),
        _aligned([("measured", "queue", "slot"), *figure_rows(figures)]),
        _aligned([PHASE_TITLES, *phase_rows(figures)]),
        UNTOLD,
        "\n".join([verdict, *(f"  {reason}" for reason in reasons)]),
    ]
    return "\n\n".join(parts)


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


def _rate(number: float | None) -> str:
    return "unknown" if number is None else f"{size_text(number)}/s"


def _milliseconds(latency: LatencyFigures | None, which: str) -> str:
    return "unknown" if latency is None else f"{getattr(latency, which) * 1000:,.1f} ms"


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.2f} s"


def _cpu(path: PathFigures) -> str:
    parts = [f"{name} {_seconds(seconds)}" for name, seconds in path.cpu_seconds.items()]
    return ", ".join(parts) or "unknown"
