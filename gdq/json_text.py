"""JSON for programs and terminals: text stays readable, and holds no character that steers a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

# json escapes control characters below the space, not these: \x9b is a terminal's escape as \x1b[ is.
_CONTROL = {number: f"\\u{number:04x}" for number in range(127, 160)}
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def json_text(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """A value as JSON on one line; `default` as in json.dumps()."""
    # json.dumps() makes an encoder for each call
    text = _ENCODER.encode(value) if default is None else json.dumps(value, default=default, ensure_ascii=False)
    return text if text.isascii() and "\x7f" not in text else text.translate(_CONTROL)
