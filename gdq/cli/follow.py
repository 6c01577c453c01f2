"""`--follow`: changes are applied until a signal comes, by connections that are made again when they are lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import psycopg

from gdq.cli import base

_PAUSE_SECONDS = 1.0

_Follower = TypeVar("_Follower")


def keep_following(
    stop: base.StopSignals,
    start: Callable[[], AbstractContextManager[_Follower]],
    apply: Callable[[_Follower], object],
) -> None:
    """Apply changes until a signal comes; a lost connection is made again, but for the first.

    `start` connects a replica or another follower, and `apply` has it apply changes until `stop`.
    """
    follower = start()
    while True:
        try:
            with follower as entered:
                apply(entered)
            return
        except psycopg.OperationalError as error:
            base.command_failure(error).show()
        while True:
            if stop.sleep(_PAUSE_SECONDS):
                return
            try:
                follower = start()
            except psycopg.OperationalError:
                continue
            break
