"""Text for a terminal: the control characters that names in a database may have are made visible."""

from __future__ import annotations

import codecs
import io
import json
import sys

# By these a name could steer a terminal, forge a line, or turn round the order of what stands beside it.
_CONTROL = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160))}
_TURNING = (*range(0x2028, 0x202F), *range(0x2066, 0x206A))
_CONTROL |= {number: f"\\u{number:04x}" for number in _TURNING}
_CONTROL_IN_LINES = {number: text for number, text in _CONTROL.items() if chr(number) not in "\n\t"}


def printable(text: str, *, lines: bool = False) -> str:
    r"""Text with its control characters written as \x1b and the like; `lines`: it may have several lines."""
    return text.translate(_CONTROL_IN_LINES if lines else _CONTROL)


def escape_unknown_letters() -> None:
    r"""Have stdout write \u00e9 for a letter that its encoding lacks: JSON reads that as the letter."""
    codecs.register_error("gdq", _escaped)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="gdq")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
