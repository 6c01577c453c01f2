"""A slot's values in the text form of COPY."""

from __future__ import annotations


def copy_text(value: bytes) -> bytes:
    """A value's text as COPY reads it."""
    if b"\\" in value:
        value = value.replace(b"\\", rb"\\")
    return value.replace(b"\n", rb"\n").replace(b"\r", rb"\r").replace(b"\t", rb"\t")
