"""Parts of a table's net change: some are applied while others are still on their way.

    a thread       part 1 (4 MB)   part 2 (8 MB)   part 3 (16 MB) ...
    the program                    apply part 1    apply part 2 ...

A key is in one part only, so parts are applied one after the other. Each is twice as large as the one before: the first
is there soon, and a large change has few of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gdq.consumers.replica.changes import Staged
from gdq.consumers.replica.refusal import RowsLackingError

# How often who waits for a part looks whether it is still wanted.
_LOOK_SECONDS = 0.5


@dataclass(slots=True)
class StagedParts:
    """The parts that a thread has staged so far, with what will tell that there are no more of them."""

    _parts: list[Staged] = field(default_factory=list, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _ended: bool = field(default=False, init=False)
    _error: BaseException | None = field(default=None, init=False)

    def add(self, staged: Staged) -> None:
        """Note that a part is staged."""
        with self._changed:
            self._parts.append(staged)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Note that all parts are staged, or what has gone wrong."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    @property
    def rows(self) -> int:
        """How many rows are staged so far; those of a pair are two, also where one tells both."""
        return sum((part.coming or 0) + (part.going or 0) for part in self._parts)

    @property
    def ended(self) -> bool:
        """True if no more parts come."""
        return self._ended

    @property
    def failed(self) -> bool:
        """True if no more parts come, although some are missing."""
        return self._error is not None

    def begins(self) -> bool:
        """True if there is a part, when there is one; False if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._parts or self._ended)
            return bool(self._parts)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until no more parts come, at most so long; True if none do."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, seconds)

    def all(self, look: Callable[[], None] = lambda: None) -> Iterator[Staged]:
        """The parts as they come; RowsLackingError if the thread has failed.

        `look`: is called now and then while a part is waited for; what it raises ends the wait.
        """
        place = 0
        while True:
            with self._changed:
                while place == len(self._parts) and not self._ended:
                    if not self._changed.wait(_LOOK_SECONDS):
                        look()
                if place == len(self._parts):
                    break
                part = self._parts[place]
            yield part
            place += 1
        if self._error is not None:
            raise RowsLackingError("lacks changes that could not be staged") from self._error
