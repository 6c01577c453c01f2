"""Bars as a small SVG file, without a library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bench.figures import Ratio

_WIDTH, _LABEL, _LINE = 720, 230, 22
_CUT = 4
_OURS, _OTHERS = "#2b6cb0", "#a0aec0"


def bars(title: str, rows: Sequence[tuple[str, Ratio]], *, mark: float = 1.0) -> str:
    """A bar for each row with its quartiles as a thin line; `mark` is drawn through all of them. gdq's are blue.

    What is many times longer than `mark` is cut off and has an arrow: beside it nothing else could be seen.
    """
    longest = max([mark, *(one.high for _, one in rows if one.high <= _CUT * mark)])
    scale = (_WIDTH - _LABEL - 60) / longest
    height = _LINE * (len(rows) + 1) + 10
    font = 'font-family="sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {font}>',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="4" y="16" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (name, one) in enumerate(rows, 1):
        top = number * _LINE + 4
        width, low, high = (min(max(value, 0), longest) * scale for value in (one.mid, one.low, one.high))
        told = f"{round(one.mid, 2) + 0:.2f}" if one.mid <= longest else f"\u2192 {one.mid:.0f}"
        colour = _OURS if name.startswith(("gdq", "queue")) else _OTHERS
        lines += [
            f'<text x="{_LABEL - 6}" y="{top + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LABEL}" y="{top + 2}" width="{width:.1f}" height="{_LINE - 8}" fill="{colour}"/>',
            f'<path d="M{_LABEL + low:.1f} {top + 9}H{_LABEL + high:.1f}" stroke="black"/>',
            f'<text x="{_LABEL + max(width, high) + 4:.1f}" y="{top + 13}">{told}</text>',
        ]
    at = _LABEL + mark * scale
    lines += [f'<path d="M{at:.1f} {_LINE}V{height - 4}" stroke="black" stroke-dasharray="3 3"/>', "</svg>"]
    return "\n".join(lines) + "\n"
