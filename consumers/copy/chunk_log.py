"""The consumer that keeps the log for a chunked copy: from the tick that its oldest range, or its goal, is at."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from psycopg import Connection
from psycopg.errors import LockNotAvailable

from gdq.call import scalar
from gdq.consumer import ConsumerInfo, consumer_info, register_consumer, seek, unregister_consumer
from gdq.errors import TruncatedPosition
from gdq.qualified_sql import qualified

_NOW = qualified("select clock_timestamp()")


@dataclass(slots=True)
class LogHold:
    """The consumer of a copy, on a session of the source that several threads may use.

    `tick`: the earlier tick at which the copy is to arrive; None for one that comes.
    """

    control: Connection[Any]
    queue: str
    name: str
    tick: int | None
    _marked: tuple[float, datetime] | None = field(init=False, default=None)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def found(self) -> ConsumerInfo | None:
        """The consumer, while the copy is not finished."""
        return next((one for one in consumer_info(self.control, self.queue) if one.consumer_name == self.name), None)

    def begin(self, names: Sequence[str]) -> None:
        """Have the log of tables kept: from now on, or from the earlier tick. TruncatedPosition if it is gone."""
        held = self.found()
        ticks = [tick for tick in (held.last_tick if held else None, self.tick) if tick is not None]
        tables = set(names) | set((held.tables if held else None) or ())
        if held is not None and held.last_tick == min(ticks) and len(tables) == len(held.tables or ()):
            return
        with self.control.transaction():
            if held is not None:
                unregister_consumer(self.control, self.queue, self.name)
            at_tick = min(ticks, default=None)
            register_consumer(self.control, self.queue, self.name, at_tick=at_tick, tables=sorted(tables))

    def release(self, oldest: float, seconds: float) -> None:
        """Let the log go up to where all ranges are: `oldest` is when the last one took its snapshot, by this machine.

        At most once in so many seconds. A tick that is not later than a moment is not later than a snapshot after it.
        """
        if self.tick is not None or not self._lock.acquire(blocking=False):
            return
        try:
            if self._marked is None:
                self._mark()
            elif self._marked[0] < min(oldest, time.monotonic() - seconds):
                with suppress(TruncatedPosition, LockNotAvailable):  # no tick so old yet; others move just now
                    seek(self.control, self.queue, self.name, time=self._marked[1])
                self._mark()
        finally:
            self._lock.release()

    def end(self) -> None:
        unregister_consumer(self.control, self.queue, self.name)

    def _mark(self) -> None:
        now = scalar(self.control, _NOW)
        self._marked = time.monotonic(), now
