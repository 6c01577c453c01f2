"""The page of a run: one HTML file with its plots inside, which needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from gdq.consumers.compare.figures import Figures, Latency
from gdq.consumers.compare.pairing import BOUNDS
from gdq.consumers.compare.recommend import Recommendation
from gdq.consumers.compare.table import (
    PATH_TITLES,
    PHASE_TITLES,
    UNTOLD,
    difference_lines,
    events_rows,
    figure_rows,
    phase_rows,
    size,
)

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 220, 80, 34, 12
_PATHS = ("queue", "slot")
_LABELS = 10  # of an axis, side by side

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>gdq compare: {title}</title>
<style>
:root {{ color-scheme: light dark; --text: #1a202c; --soft: #4a5568; --line: #cbd5e0; --good: #f0fff4; --idle: #edf2f7;
  --bar: #718096; --queue: #2b6cb0; --slot: #c05621; background: #fff }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ --text: #e2e8f0; --soft: #a0aec0; --line: #4a5568;
  --good: #1c3829; --idle: #2d3748; --bar: #a0aec0; --queue: #63b3ed; --slot: #ed8936; background: #171923 }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: var(--text);
  overflow-wrap: anywhere; print-color-adjust: exact; -webkit-print-color-adjust: exact }}
table, svg, .verdict {{ break-inside: avoid }}
h2 {{ break-after: avoid }}
table {{ border-collapse: collapse; margin: .5rem 0 1.5rem }}
th, td {{ border-bottom: 1px solid var(--line); padding: .2rem .8rem; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
th + th, td + td {{ overflow-wrap: normal; white-space: nowrap }}
svg {{ max-width: 100%; height: auto }}
svg text {{ font: 11px system-ui, sans-serif; fill: var(--soft) }}
.verdict {{ border-left: 4px solid #2f855a; padding: .3rem 1rem; background: var(--good) }}
</style>
</head>
<body>
<h1>Queue and slot on {title}</h1>
<p>{about}</p>
<div class="verdict"><p><strong>{verdict}</strong></p>{reasons}</div>
<h2>Events</h2>
{events}
<h2>Differences</h2>
{differences}
<h2>Measured</h2>
{figures}
{phases}
<p>{untold}</p>
<h2>Latency, from commit to receipt</h2>
{latency}
<h2>Kept on disk</h2>
{kept}
<h2>Log written for a change</h2>
{wal}
</body>
</html>
"""


def page(figures: Figures, found: Recommendation) -> str:
    """The whole result of a run as HTML."""
    set_full = "; replica identity FULL for the run" if figures.replica_identity_full else ""
    about = (
        f"PostgreSQL {figures.server_version}, {figures.seconds:g} s from {figures.started_at[:19]} UTC:"
        f" {', '.join(figures.tables)}{set_full}"
    )
    return _PAGE.format(
        title=escape(figures.database),
        about=escape(about),
        verdict=escape(found.text),
        reasons=_list([f"{reason.side}: {reason.text}" for reason in found.reasons]),
        events=_table(PATH_TITLES, events_rows(figures)),
        differences=_list(difference_lines(figures)),
        figures=_table(PATH_TITLES, figure_rows(figures)),
        phases=_table(PHASE_TITLES, phase_rows(figures)),
        untold=escape(UNTOLD),
        latency=_latencies({"queue": figures.queue.latency, "slot": figures.slot.latency}),
        kept=_kept(figures),
        wal=_bars([(phase.name, phase.wal_per_change, size(phase.wal_per_change)) for phase in figures.phases]),
    )


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _latencies(latencies: dict[str, Latency | None]) -> str:
    """Which share of the transactions was received within which time, on a scale of 1, 2, 5, 10."""
    known = {name: one for name, one in latencies.items() if one is not None}
    seen = [bound for one in known.values() for bound, _ in one.histogram]
    bounds = [bound for bound in BOUNDS if seen and min(seen) <= bound <= max(seen)]
    if not bounds:
        return "<p>No transaction was received by both while both were read.</p>"
    step = _plot_width() / len(bounds)
    shapes = [_axis([(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")])]
    for number, bound in enumerate(bounds):
        if (len(bounds) - 1 - number) % (len(bounds) // _LABELS + 1) == 0:
            label = f"{bound:g} s" if bound >= 1 else f"{bound * 1000:g} ms"
            shapes.append(_text(_LEFT + (number + 1) * step, _HEIGHT - 20, label, "end"))
    for name, one in known.items():
        counts, total = dict(one.histogram), 0
        points = [(_LEFT + 0.0, 0.0)]
        for number, bound in enumerate(bounds):
            total += counts.get(bound, 0)
            points.append((_LEFT + (number + 1) * step, total / one.transactions))
        shapes.append(_line(points, name))
    return _svg("share of the transactions that were received within a time", shapes)


def _kept(figures: Figures) -> str:
    """Bytes that both paths keep, over the time of the run; with another ground where nobody reads."""
    if len(figures.samples) < 2:
        return "<p>Unknown.</p>"
    end = figures.samples[-1].at or 1.0
    most = _round_size(max(1, *(max(sample.queue_bytes, sample.slot_bytes) for sample in figures.samples)))
    idle = figures.phase("nobody reads")
    x = _LEFT + idle.begin / end * _plot_width()
    width = max(_LEFT + _plot_width() - x, 0)
    shapes = [
        f'<rect x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{_plot_height()}" fill="var(--idle)"/>',
        _axis([(share, _size_like(most, share)) for share in (0.0, 0.5, 1.0)]),
        _text(x + 6, _TOP + 14, "nobody reads", "start"),
        _text(_LEFT, _HEIGHT - 20, "0 s", "start"),
        _text(_WIDTH, _HEIGHT - 20, f"{end:.0f} s", "end"),
    ]
    for name in _PATHS:
        values = [(sample.at, getattr(sample, f"{name}_bytes")) for sample in figures.samples]
        shapes.append(_line([(_LEFT + at / end * _plot_width(), value / most) for at, value in values], name))
    return _svg("bytes that each path keeps, over time", shapes)


def _round_size(number: float) -> float:
    """The next 1, 2 or 5 times a power of ten of the unit that fits."""
    unit = 1024.0 ** min(int(math.log(number, 1024)), 3)
    power = 10.0 ** math.floor(math.log10(number / unit))
    return next(base * power * unit for base in (1, 2, 5, 10) if base * power * unit >= number)


def _size_like(most: float, share: float) -> str:
    """A share of a size in the size's own unit."""
    exponent = min(int(math.log(most, 1024)), 3)
    return f"{share * most / 1024**exponent:g} {('B', 'kB', 'MB', 'GB')[exponent]}" if share else "0"


def _bars(bars: Sequence[tuple[str, float | None, str]]) -> str:
    most = max((value or 0 for _, value, _ in bars), default=0) or 1
    shapes = []
    for number, (name, value, label) in enumerate(bars):
        y, width = 8 + number * 30, (value or 0) / most * (_plot_width() - 110)
        shapes += [
            _text(_LEFT + 12, y + 15, name, "end"),
            f'<rect x="{_LEFT + 20}" y="{y}" width="{width:.1f}" height="20" fill="var(--bar)"/>',
            _text(_LEFT + 26 + width, y + 15, label, "start"),
        ]
    return _svg("bytes of log for a change, by phase", shapes, height=12 + 30 * len(bars))


def _svg(title: str, shapes: Sequence[str], height: int = _HEIGHT) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">'
    return f"{head}<title>{escape(title)}</title>{''.join(shapes)}</svg>"


def _axis(marks: Sequence[tuple[float, str]]) -> str:
    """Lines across at the marks, which are shares of the height, and the names of the colours below."""
    shapes = []
    for share, label in marks:
        y = _y(share)
        shapes.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        shapes.append(_text(_LEFT - 6, y + 4, label, "end"))
    for number, name in enumerate(_PATHS):
        x = _LEFT + number * 70
        shapes.append(f'<rect x="{x}" y="{_HEIGHT - 13}" width="10" height="10" fill="var(--{name})"/>')
        shapes.append(_text(x + 14, _HEIGHT - 4, name, "start"))
    return "".join(shapes)


def _line(points: Sequence[tuple[float, float]], name: str) -> str:
    listed = " ".join(f"{x:.1f},{_y(share):.1f}" for x, share in points)
    return f'<polyline class="{name}" points="{listed}" fill="none" stroke="var(--{name})" stroke-width="2"/>'


def _text(x: float, y: float, label: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'


def _y(share: float) -> float:
    return _TOP + (1 - share) * _plot_height()


def _plot_width() -> int:
    return _WIDTH - _LEFT


def _plot_height() -> int:
    return _HEIGHT - _TOP - _BOTTOM
