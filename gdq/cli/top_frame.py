"""What `gdq top` shows of one look: lines of text that fit a terminal's width and height."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from rich.cells import cell_len, set_cell_size

from gdq.cli.listing import cell
from gdq.cli.terminal import printable
from gdq.consumer import ConsumerInfo
from gdq.consumers.slot.slot import SlotInfo
from gdq.monitor.doctor import Finding
from gdq.queue import QueueInfo
from gdq.units import span
from gdq.view.view import ViewInfo

# A name gets at least this many columns, however wide the numbers are; and this many, if leaving out numbers helps.
_NAME_MIN = 10
_NAME_WANTED = 24

# So many numbers are never left out.
_NUMBERS_MIN = 2

# The last column, which tells what is wrong, gets at least this many.
_STATE_MIN = 26

# Seconds below which a lag is as good as none, so that it moves no line.
_LAG_MIN = 10.0


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of a database at one moment; the findings may be some seconds older."""

    queues: list[QueueInfo]
    consumers: list[ConsumerInfo]
    views: list[ViewInfo]
    slots: list[SlotInfo]
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class _Row:
    """The cells of a line; `wrong`: something is to be mended; `late`: seconds or bytes behind."""

    cells: list[str]
    wrong: bool
    late: float

    @property
    def rank(self) -> tuple[bool, int]:
        """The place among the others: what is wrong first, then by orders of magnitude, so that lines rarely move."""
        return (not self.wrong, -max(0, int(math.log2(self.late / _LAG_MIN)) + 1) if self.late > _LAG_MIN else 0)


@dataclass(frozen=True, slots=True)
class _Part:
    """The lines of one kind of object. `names`: how many columns on the left are names; the last one is text too.

    The numbers between them stand in the order of their worth: where they do not all fit, the right ones are left out.
    """

    headings: list[str]
    names: int
    rows: list[_Row]


def frame_lines(look: Look, width: int, height: int | None, state: str) -> list[tuple[str, bool]]:
    """The lines of a frame, each with True if it is bold; `height` None: as many as there are.

    No line is wider than `width`, nor has a control character. What needs attention stands first in its part; where
    the parts do not all fit, the first ones are shown.
    """
    parts = [part for part in (_queues(look), _consumers(look), _views(look), _slots(look)) if part.rows]
    head = [(f"gdq top  {state}", True), (_doctor_line(look.findings), False)]
    if not parts:
        head.append(("there is no queue: gdq create-queue makes one", False))
    shown = _shares([len(part.rows) for part in parts], None if height is None else height - len(head))
    body = [line for part, count in zip(parts, shown, strict=True) if count for line in _lines(part, count, width)]
    lines = (head + body)[:height]
    return [(_cut(printable(text), width).rstrip(), bold) for text, bold in lines]


def _doctor_line(findings: Sequence[Finding]) -> str:
    """What doctor finds, in one line: how much, and the worst of it."""
    counts = {name: sum(one.severity == name for one in findings) for name in ("error", "warning")}
    found = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count]
    if not found:
        return "doctor: nothing to mend"
    worst = next(one for name in counts for one in findings if one.severity == name)
    return f"doctor: {', '.join(found)}: {worst.cause}"


def _queues(look: Look) -> _Part:
    rows = []
    for queue in look.queues:
        own = [one for one in look.consumers if one.queue_name == queue.queue_name]
        lag = max((one.lag or timedelta(0) for one in own), default=timedelta(0))
        names = ("tick_age", "events_per_second", "log_bytes", "tables", "consumers")
        shown = [cell("lag", lag), *(cell(name, getattr(queue, name)) for name in names)]
        states = ["paused"] * queue.paused + [f"resync {queue.tables_resync}"] * bool(queue.tables_resync)
        if any(one.code == "ticker_silent" and one.object == queue.queue_name for one in look.findings):
            states.insert(0, "no ticks")
        rows.append(_Row([queue.queue_name, *shown, ", ".join(states)], bool(states), lag.total_seconds()))
    return _Part(["QUEUE", "lag", "tick", "events/s", "log", "tables", "consumers", "state"], 1, rows)


def _consumers(look: Look) -> _Part:
    rows = []
    for one in look.consumers:
        numbers = [cell(name, getattr(one, name)) for name in ("lag", "unread_events", "unread_bytes")]
        wrong = bool(one.paused or one.tables_resync or one.dead_letters)
        late = one.lag.total_seconds() if one.lag else 0.0
        rows.append(_Row([one.consumer_name, one.queue_name, *numbers, _consumer_state(one)], wrong, late))
    return _Part(["CONSUMER", "queue", "lag", "unread", "bytes", "state"], 2, rows)


def _consumer_state(one: ConsumerInfo) -> str:
    """What a consumer is at, what hinders it first."""
    states = ["paused"] * one.paused + [f"resync {one.tables_resync}"] * bool(one.tables_resync)
    states += [f"dead {one.dead_letters:,}"] * bool(one.dead_letters) + [f"retries {one.retries:,}"] * bool(one.retries)
    if one.batch_age is not None:
        states.append(f"batch {span(one.batch_age.total_seconds())}")
    return ", ".join(states) or "idle"


def _views(look: Look) -> _Part:
    rows = []
    for view in look.views:
        wrong = f"differs from its query: {view.diverged}" if view.diverged else view.error or ""
        numbers = [cell("age", view.age), cell("rows_changed", view.rows_changed)]
        late = view.age.total_seconds() if view.age else 0.0
        cells = [view.view_name, view.queue_name, *numbers, wrong or view.last_action or "new"]
        rows.append(_Row(cells, bool(wrong), late))
    return _Part(["VIEW", "queue", "age", "changed", "last refresh"], 2, rows)


def _slots(look: Look) -> _Part:
    rows = []
    for slot in look.slots:
        state = "lost" if slot.lost else "read" if slot.active else "not read"
        numbers = [cell("retained_bytes", slot.retained_bytes), cell("lag_bytes", slot.lag_bytes)]
        rows.append(_Row([slot.slot_name, *numbers, state], bool(slot.lost), float(slot.retained_bytes or 0)))
    return _Part(["SLOT", "retained", "lag", "state"], 1, rows)


def _shares(counts: list[int], room: int | None) -> list[int]:
    """How many rows of each part are shown, if each has an empty line, a heading, and a line about those left out."""
    shown = list(counts)

    def taken() -> int:
        return sum(2 + count + (count < whole) for count, whole in zip(shown, counts, strict=True) if count)

    while room is not None and shown and taken() > room and max(shown) > 0:
        # of parts that are equally large the last one
        largest = max(range(len(shown)), key=lambda n: (shown[n], n))
        # a row and the line about the others: where there is no room for both, the part is left out
        shown[largest] -= 2 if shown[largest] == counts[largest] and shown[largest] > 1 else 1
    return shown


def _lines(part: _Part, count: int, width: int) -> list[tuple[str, bool]]:
    first = sorted(part.rows, key=lambda row: row.rank)[:count]
    table = [part.headings, *([printable(text) for text in row.cells] for row in first)]
    while True:
        # of the numbers of all rows, so that columns keep their places
        widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
        spare = width - sum(widths[part.names : -1]) - 2 * (len(widths) - 1) - min(widths[-1], _STATE_MIN)
        wanted = sum(min(name, _NAME_WANTED) for name in widths[: part.names])
        if spare >= wanted or len(widths) - part.names - 1 <= _NUMBERS_MIN:
            break
        table = [cells[:-2] + cells[-1:] for cells in table]
    while sum(widths[: part.names]) > spare and max(widths[: part.names]) > _NAME_MIN:
        widths[widths.index(max(widths[: part.names]))] -= 1
    lines = [("", False), (_line(part, table[0], widths), True)]
    lines += [(_line(part, cells, widths), False) for cells in table[1:]]
    if count < len(part.rows):
        lines.append((f"and {len(part.rows) - count} more", False))
    return lines


def _line(part: _Part, cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names and the last cell on the left of their columns, numbers on the right; the last column has no end."""
    texts = [_cut_name(text, width) for text, width in zip(cells[:-1], widths, strict=False)]
    last = len(texts)
    padded = [
        text + " " * (width - cell_len(text)) if n < part.names else " " * (width - cell_len(text)) + text
        for n, (text, width) in enumerate(zip(texts, widths[:last], strict=True))
    ]
    return "  ".join([*padded, cells[-1]])


def _cut_name(text: str, width: int) -> str:
    """A name of at most so many columns: of a longer one the begin and the end, in which names may differ."""
    if cell_len(text) <= width or width < _NAME_MIN:
        return _cut(text, width)
    end = (width - 1) // 2
    return set_cell_size(text, width - 1 - end).rstrip() + "…" + set_cell_size(text[::-1], end).rstrip()[::-1]


def _cut(text: str, width: int) -> str:
    """Text of at most so many columns; … shows that some is missing."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…" if width > 1 else set_cell_size(text, max(width, 0))
