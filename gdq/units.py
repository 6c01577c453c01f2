"""Numbers as people read them, with their units: 24.0 MB, 1.99 s, 3 min, 23.2 ms."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes with a unit, such as 1.2 MB."""
    number = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TB"


def span(seconds: float) -> str:
    """A time in one or two units, such as 1.99 s, 3 min, 2 h 30 min."""
    if abs(seconds) < 60:
        return f"{seconds:.2f} s" if abs(seconds) < 9.995 else f"{seconds:.1f} s"
    sign, whole = "-" if seconds < 0 else "", int(abs(seconds))
    for unit, length, part, part_length in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= length:
            number, rest = divmod(whole, length)
            less = f" {rest // part_length} {part}" if rest >= part_length else ""
            return f"{sign}{number:,} {unit}{less}"
    return f"{seconds:.1f} s"


def delay(seconds: float) -> str:
    """A time that may be far below a second: 23.2 ms, 0.08 ms; from a second on as span()."""
    milliseconds = seconds * 1000
    if milliseconds >= 999.5:
        return span(seconds)
    return f"{milliseconds:.{0 if milliseconds >= 99.95 else 1 if milliseconds >= 9.995 else 2}f} ms"
