"""Waiting for what happens elsewhere, with a limit that no busy machine reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

# A minute of work lasts a quarter of an hour where thirty others want the same two processors.
SECONDS = 1200


def until(met: Callable[[], Found], what: str = "the awaited", *, pause: float = 0.005) -> Found:
    """Call `met` every `pause` seconds until its answer is true, and return this answer.

    AssertionError after SECONDS; `what` names the awaited in it.
    """
    deadline = time.monotonic() + SECONDS
    while not (found := met()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(pause)
    return found
