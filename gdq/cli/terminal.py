"""Text for a terminal: the control characters that names in a database may have are made visible."""

from __future__ import annotations

# By these a name could steer a terminal or forge a line.
_CONTROL = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160))}
_CONTROL_IN_LINES = {number: text for number, text in _CONTROL.items() if chr(number) not in "\n\t"}


def printable(text: str, *, lines: bool = False) -> str:
    r"""Text with its control characters written as \x1b and the like; `lines`: it may have several lines."""
    return text.translate(_CONTROL_IN_LINES if lines else _CONTROL)
