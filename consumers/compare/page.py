"""The page of a run: one self-contained HTML file with its plots."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate

from gdq.consumers.compare import figure_text
from gdq.consumers.compare.figures import Figures, LatencyFigures
from gdq.consumers.compare.pairing import LATENCY_BOUNDS
from gdq.consumers.compare.recommend import Recommendation
from gdq.units import size, span

# In the units of a plot, which is as wide as a phone or half as wide again.
_WIDTH, _HEIGHT, _LEFT, _TOP, _PLOT_HEIGHT = 440, 220, 64, 14, 168
_LABELS = 5  # of an axis, side by side

_Marks = Sequence[tuple[float, str]]
_Points = Sequence[tuple[float, float]]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>gdq compare: {title}</title>
<style>
:root {{ color-scheme: light dark; --text: #1a202c; --soft: #4a5568; --line: #cbd5e0; --good: #f0fff4; --idle: #edf2f7;
  --bar: #718096; --queue: #2b6cb0; --slot: #c05621; background: #fff }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ --text: #e2e8f0; --soft: #a0aec0; --line: #4a5568;
  --good: #1c3829; --idle: #2d3748; --bar: #a0aec0; --queue: #63b3ed; --slot: #ed8936; background: #171923 }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 1rem auto; padding: 0 1rem; color: var(--text);
  overflow-wrap: anywhere; print-color-adjust: exact; -webkit-print-color-adjust: exact }}
table, svg, .verdict {{ break-inside: avoid }}
h1 {{ font-size: 1.5rem; margin: 0 0 .75rem }}
h2 {{ font-size: 1.2rem; break-after: avoid }}
h3 {{ font-size: 1rem; margin: 0 }}
ul {{ margin: .3rem 0; padding-left: 1.2rem }}
table {{ border-collapse: collapse; margin: .5rem 0 1.5rem }}
th, td {{ border-bottom: 1px solid var(--line); padding: .2rem .8rem; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
svg {{ width: 100%; max-width: 40rem; height: auto }}
svg text {{ font: 12px system-ui, sans-serif; fill: var(--soft) }}
.verdict {{ border-left: 4px solid #2f855a; padding: .6rem 1rem; background: var(--good); font-weight: 600 }}
.points {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: 1rem;
  margin: 1rem 0 }}
.points div {{ border-top: 3px solid var(--bar); padding-top: .4rem }}
.points .queue {{ border-color: var(--queue) }}
.points .slot {{ border-color: var(--slot) }}
.about {{ color: var(--soft) }}
@media (max-width: 40rem) {{
  table, tbody, tr, td {{ display: block }}
  tr:first-child {{ display: none }}
  tr {{ border-bottom: 1px solid var(--line); padding: .4rem 0 }}
  td {{ border: 0; padding: 0; display: flex; justify-content: space-between; gap: 1rem }}
  td:first-child {{ font-weight: 600 }}
  td + td::before {{ content: attr(data-title); color: var(--soft); flex: none }}
}}
</style>
</head>
<body>
<h1>Queue or slot on {title}</h1>
<p class="verdict">{verdict}</p>
{points}
<p class="about">{about}</p>
<h2>Measured</h2>
{figures}
{phases}
<h2>Latency, from commit to receipt</h2>
{latency}
<h2>Kept on disk</h2>
{kept}
<h2>Log written for a change</h2>
{wal}
<h2>Events</h2>
{events}
<h2>Differences</h2>
{differences}
<p>{untold}</p>
</body>
</html>
"""


def compare_page(figures: Figures, found: Recommendation) -> str:
    """The whole result of a run as HTML, the verdict first."""
    return _PAGE.format(
        title=_escape(figures.database),
        verdict=_escape(found.text),
        points=_points(found),
        about=_escape(figure_text.about(figures)),
        figures=_table(figure_text.PATH_TITLES, figure_text.figure_rows(figures)),
        phases=_table(figure_text.PHASE_TITLES, figure_text.phase_rows(figures)),
        latency=_latencies({"queue": figures.queue.latency, "slot": figures.slot.latency}),
        kept=_kept(figures),
        wal=_bars([(phase.name, phase.wal_per_change) for phase in figures.phases]),
        events=_table(figure_text.PATH_TITLES, figure_text.events_rows(figures)),
        differences=_list(figure_text.difference_lines(figures)),
        untold=_escape(figure_text.UNTOLD),
    )


def _escape(text: str) -> str:
    """Text as HTML, in which no line ends between a number and its unit."""
    return escape(re.sub(r"(?<=\d) (?=(?:[kMGT]?B|ms|s|min)\b)", "\N{NO-BREAK SPACE}", text))


def _points(found: Recommendation) -> str:
    boxes = [
        f'<div class="{name}"><h3>{title.capitalize()}</h3>{_list(lines)}</div>'
        for name, (title, lines) in zip(figure_text.PATHS, figure_text.points_of(found).items(), strict=False)
    ]
    return f'<div class="points">{"".join(boxes)}</div>' if boxes else ""


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{_escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; on a narrow screen each cell is a line of its own, after its title."""
    head = "".join(f"<th>{_escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-title="{_escape(title)}">{_escape(cell)}</td>' for title, cell in zip(titles, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _latencies(latencies: dict[str, LatencyFigures | None]) -> str:
    """Plot of the share of transactions received within a time, on a scale of 1, 2, 5, 10."""
    known = {name: one for name, one in latencies.items() if one is not None}
    seen = [bound for one in known.values() for bound, _ in one.histogram]
    bounds = [bound for bound in LATENCY_BOUNDS if seen and min(seen) <= bound <= max(seen)]
    if not bounds:
        return "<p>No transaction was received by both while both were read.</p>"
    labels = [f"{bound:g} s" if bound >= 1 else f"{bound * 1000:g} ms" for bound in bounds]
    marks = [(number / len(bounds), label) for number, label in enumerate(labels, 1)]
    lines = {}
    for name, one in known.items():
        counts = dict(one.histogram)
        totals = accumulate((counts.get(bound, 0) for bound in bounds), initial=0)
        lines[name] = [(number / len(bounds), total / one.transactions) for number, total in enumerate(totals)]
    shares = [(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")]
    some = marks[:: -(len(bounds) // _LABELS + 1)][::-1]
    return _plot("share of the transactions that were received within a time", lines, some, shares)


def _kept(figures: Figures) -> str:
    """Plot of the bytes that both paths retain over the run; the time without readers has another background."""
    if len(figures.samples) < 2:
        return "<p>Unknown.</p>"
    end = figures.samples[-1].at or 1.0
    most = _round_size(max(1, *(max(sample.queue_bytes, sample.slot_bytes) for sample in figures.samples)))
    x = _x(figures.phase("nobody reads").begin / end)
    width = max(_WIDTH - x, 0)
    idle = f'<rect x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{_PLOT_HEIGHT}" fill="var(--idle)"/>' + _text(
        x + 6, _TOP + 14, "nobody reads", "start"
    )
    lines = {
        name: [(sample.at / end, getattr(sample, f"{name}_bytes") / most) for sample in figures.samples]
        for name in figure_text.PATHS
    }
    sizes = [(share, _size_like(most, share)) for share in (0.0, 0.5, 1.0)]
    return _plot("bytes that each path keeps, over time", lines, [(0.0, "0 s"), (1.0, span(end))], sizes, idle)


def _round_size(number: float) -> float:
    """A number rounded up to 1, 2 or 5 times a power of ten, in a fitting unit."""
    unit = 1024.0 ** min(int(math.log(number, 1024)), 3)
    power = 10.0 ** math.floor(math.log10(number / unit))
    return next(base * power * unit for base in (1, 2, 5, 10) if base * power * unit >= number)


def _size_like(most: float, share: float) -> str:
    """A share of a size, in the size's unit."""
    exponent = min(int(math.log(most, 1024)), 3)
    return f"{share * most / 1024**exponent:g} {('B', 'kB', 'MB', 'GB')[exponent]}" if share else "0"


def _bars(bars: Sequence[tuple[str, float | None]]) -> str:
    most = max((value or 0 for _, value in bars), default=0) or 1
    left, shapes = 90, []
    for number, (name, value) in enumerate(bars):
        y, width = 8 + number * 30, (value or 0) / most * (_WIDTH - left - 80)
        shapes += [
            _text(left - 8, y + 15, name, "end"),
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="20" fill="var(--bar)"/>',
            _text(left + 6 + width, y + 15, "no changes" if value is None else size(value), "start"),
        ]
    return _svg("bytes of log for a change, by phase", shapes, height=12 + 30 * len(bars))


def _plot(title: str, lines: Mapping[str, _Points], x_marks: _Marks, y_marks: _Marks, behind: str = "") -> str:
    """Lines by path, over a shape `behind` them, with a legend; points and marks are shares of width and height."""
    shapes = [behind]
    for share, label in y_marks:
        y = _y(share)
        shapes.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        shapes.append(_text(_LEFT - 6, y + 4, label, "end"))
    shapes += [_text(_x(share), _HEIGHT - 20, label, "end" if share else "start") for share, label in x_marks]
    for number, name in enumerate(figure_text.PATHS):
        x = _LEFT + number * 70
        shapes.append(f'<rect x="{x}" y="{_HEIGHT - 13}" width="10" height="10" fill="var(--{name})"/>')
        shapes.append(_text(x + 14, _HEIGHT - 4, name, "start"))
    for name, points in lines.items():
        listed = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in points)
        look = f'fill="none" stroke="var(--{name})" stroke-width="2"'
        shapes.append(f'<polyline class="{name}" points="{listed}" {look}/>')
    return _svg(title, shapes)


def _svg(title: str, shapes: Sequence[str], height: int = _HEIGHT) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">'
    return f"{head}<title>{_escape(title)}</title>{''.join(shapes)}</svg>"


def _text(x: float, y: float, label: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape(label)}</text>'


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT)


def _y(share: float) -> float:
    return _TOP + (1 - share) * _PLOT_HEIGHT
