"""Whether a replica or a mirror is paused: `gdq pause QUEUE NAME` pauses its consumer, which gets no batches then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.errors import GdqError

_LOOK_SECONDS = 2.0
_WAIT_SECONDS = 0.2


class PauseWatch:
    """Looks every two seconds whether a consumer is paused, and tells when that changes; `of`: what it belongs to."""

    def __init__(
        self, source: Connection[Any], queue: str, name: str, tell: Callable[[str], None], of: str = "replica"
    ) -> None:
        self._source = source
        self._queue = queue
        self._name = name
        self._of = of
        self._tell = tell
        self._paused = False
        self._look_at = 0.0
        self._told = ""

    def refuse(self) -> None:
        """GdqError if the consumer is paused: nobody waits for a run that has an end."""
        if self._is_paused():
            raise GdqError(f'{self._of} "{self._name}" is paused', hint=self._hint)

    def wait(self, stop: Callable[[], bool]) -> bool:
        """Wait until the consumer is not paused; False if `stop` ended that."""
        while self._look():
            if stop():
                return False
            time.sleep(_WAIT_SECONDS)
        return True

    def held(self, why: GdqError, stop: Callable[[], bool]) -> bool:
        """Wait a moment for what keeps the loop from going on, and tell of it once; False if `stop` ended that."""
        told = f"{self._of} {self._name} waits: {why}" + (f" {why.hint}" if why.hint else "")
        if told != self._told:
            self._tell(told)
        self._told = told
        time.sleep(_WAIT_SECONDS)
        return not stop()

    def watched(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """`stop` of a loop that calls it between batches and while waiting; then the pause is looked at too."""
        self._told = ""

        def stopped() -> bool:
            self._look()
            return stop()

        return stopped

    def _look(self) -> bool:
        """True if the consumer is paused, as of two seconds ago at most."""
        if time.monotonic() >= self._look_at:
            paused = self._is_paused()
            if paused != self._paused:
                self._tell(f"{self._of} {self._name} is {f'paused: {self._hint}' if paused else 'resumed'}")
            self._paused = paused
            self._look_at = time.monotonic() + _LOOK_SECONDS
        return self._paused

    def _is_paused(self) -> bool:
        query = "select paused from gdq.consumer_info(%s) where consumer_name = %s"
        return bool(scalar(self._source, query, self._queue, self._name))

    @property
    def _hint(self) -> str:
        return f"gdq resume {self._queue} {self._name}"
