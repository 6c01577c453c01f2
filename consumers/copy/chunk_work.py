"""The work of a chunked copy: which step is next, for workers that take tables and their ranges side by side.

A range is in the hand of one worker at a time. What concerns all ranges of a table waits until no worker has one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from gdq.consumers.copy.chunk_log import LogHold
from gdq.consumers.copy.chunk_progress import Progress, StartAgain
from gdq.consumers.copy.chunk_step import COLLISIONS, ChunkSteps
from gdq.consumers.copy.workers import cancel_statement, run_threads
from gdq.errors import GdqError

# A table that starts again so often in one run meets a cause that does not go away.
_RESTARTS_MAX = 20

# Ranges that no worker has follow the changes so often while others are copied: so their next step is no long one, and
# the log is let go.
_FOLLOW_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class TableProgress:
    """How far a table of a chunked copy is: the rows that its chunks had so far."""

    table: str
    rows: int


# Called after every step with the table's progress, and "copied" or why it starts again; by one thread at a time.
TellProgress = Callable[[TableProgress, str], None]

_Step = Callable[[ChunkSteps], None]


@dataclass(slots=True)
class _Table:
    """A table's ranges by number, those that a worker has, and what waits for these to come back."""

    ranges: dict[int, Progress]
    busy: set[int] = field(default_factory=set)
    taken_at: dict[int, float] = field(default_factory=dict)
    moved_at: dict[int, float] = field(default_factory=dict)
    restart: StartAgain | None = None
    collided: int | None = None
    settled: bool = False

    @property
    def states(self) -> list[Progress]:
        return [self.ranges[number] for number in sorted(self.ranges)]

    @property
    def whole(self) -> bool:
        return self.restart is None and all(state.whole for state in self.ranges.values())


class ChunkWork:
    """The tables of a chunked copy, and the workers that bring them on.

    A worker's thread calls `tell`; what it raises ends all. After `stop` no step is begun. `hold` keeps the log.
    """

    def __init__(
        self,
        tables: Sequence[Sequence[Progress]],
        workers: Sequence[ChunkSteps],
        tell: TellProgress,
        stop: Callable[[], bool] = lambda: False,
        hold: LogHold | None = None,
    ) -> None:
        self._tables = [_Table({state.number: state for state in states}) for states in tables]
        self._workers = workers
        self._tell = tell
        self._stop = stop
        self._hold = hold
        self._told = threading.Lock()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._settling = False
        self._restarts = 0
        for table in self._tables:
            table.moved_at = dict.fromkeys(table.ranges, -math.inf)

    @property
    def states(self) -> list[list[Progress]]:
        """The ranges of each table."""
        return [table.states for table in self._tables]

    def copy(self) -> None:
        """Copy until all ranges are whole."""
        self._run()

    def settle(self) -> bool:
        """Have all tables follow the changes up to now, each as one range; False if one of them starts again."""
        self._settling = True
        for table in self._tables:
            table.settled = False
        self._run()
        self._settling = False
        return all(table.whole for table in self._tables)

    def restart(self, again: StartAgain) -> None:
        """Have a table be copied again from its beginning."""
        [table] = [table for table in self._tables if table.states[0].table == again.table]
        table.restart = again

    def _run(self) -> None:
        self._stopped.clear()
        for steps in self._workers:
            steps.stopped = False
        run_threads(
            [partial(self._work, steps) for steps in self._workers],
            [partial(self._cancel, steps) for steps in self._workers],
            self._stopped,
        )

    def _work(self, steps: ChunkSteps) -> None:
        follows = True
        while (taken := self._take(follows)) is not None:
            step, follows = taken
            step(steps)

    def _cancel(self, steps: ChunkSteps) -> None:
        steps.stopped = True
        with self._changed:
            self._changed.notify_all()
        cancel_statement(steps.reader)
        cancel_statement(steps.target.connection)

    def _take(self, follows: bool) -> tuple[_Step, bool] | None:
        """The next step, and whether the one after it may have a range follow; None if there is nothing to do."""
        with self._changed:
            while not self._stopped.is_set() and not self._stop():
                step = self._overdue() if follows and not self._settling else None
                if step is not None:
                    return step, False  # copying goes on in between, however many ranges wait
                for table in self._tables:
                    if (step := self._next(table)) is not None:
                        return step, True
                if not any(table.busy for table in self._tables):
                    return None
                self._changed.wait()
            return None

    def _overdue(self) -> _Step | None:
        """A step of a range that has not followed the changes for long."""
        due = time.monotonic() - _FOLLOW_SECONDS
        for table in self._tables:
            for number, state in table.ranges.items():
                waits = table.restart is None and table.collided is None and number not in table.busy
                if state.begun and waits and table.moved_at[number] < due:
                    return self._taken(table, [number], partial(self._advance, table, number, follow=True))
        return None

    def _next(self, table: _Table) -> _Step | None:
        """A step of one table, if there is one that no other worker's step is in the way of."""
        numbers = list(table.ranges)
        if table.restart is not None or table.collided is not None:
            together = self._begin_anew if table.restart is not None else self._advance_together
            return None if table.busy else self._taken(table, numbers, partial(together, table))
        if self._settling:
            free = table.whole and not table.settled and not table.busy
            return self._taken(table, numbers, partial(self._join, table)) if free else None
        first = table.states[0]
        if first.described is None:
            return None if table.busy else self._taken(table, numbers, partial(self._begin, table))
        for number in sorted(table.ranges):
            if not table.ranges[number].whole and number not in table.busy:
                return self._taken(table, [number], partial(self._advance, table, number))
        return None

    @staticmethod
    def _taken(table: _Table, numbers: Sequence[int], step: _Step) -> _Step:
        table.busy.update(numbers)
        table.taken_at |= dict.fromkeys(numbers, time.monotonic())
        return step

    def _begin(self, table: _Table, steps: ChunkSteps) -> None:
        before = table.states
        self._done(table, before, steps.begin(before[0], len(self._workers)), "copied")

    def _advance(self, table: _Table, number: int, steps: ChunkSteps, *, follow: bool = False) -> None:
        state = table.ranges[number]
        try:
            after = steps.advance([state], None if state.whole else state, follow=follow)
        except StartAgain as again:
            self._put_off(table, number, restart=again)
        except COLLISIONS:
            if len(table.ranges) == 1:
                raise
            self._put_off(table, number)
        else:
            self._done(table, [state], after, "copied")

    def _advance_together(self, table: _Table, steps: ChunkSteps) -> None:
        """All ranges at one snapshot, so that the target's rows are those of one moment."""
        before = table.states
        assert table.collided is not None
        state = table.ranges[table.collided]
        try:
            after = steps.advance(before, None if state.whole else state)
        except StartAgain as again:
            self._put_off(table, *table.ranges, restart=again)
        else:
            table.collided = None
            self._done(table, before, after, "copied")

    def _join(self, table: _Table, steps: ChunkSteps) -> None:
        before = table.states
        try:
            joined = steps.join(before)
        except StartAgain as again:
            self._put_off(table, *table.ranges, restart=again)
        else:
            table.settled = True
            self._done(table, before, [joined])

    def _begin_anew(self, table: _Table, steps: ChunkSteps) -> None:
        assert table.restart is not None
        name, reason = table.restart.table, table.restart.reason
        with self._changed:
            self._restarts += 1
        if self._restarts > _RESTARTS_MAX:
            raise GdqError(f"the copy of table {name} has started {self._restarts} times: {reason}")
        before = table.states
        anew = steps.empty(before)
        table.restart = table.collided = None
        self._done(table, before, [anew], f"started again: {reason}")

    def _put_off(self, table: _Table, *numbers: int, restart: StartAgain | None = None) -> None:
        """Give ranges back undone: all of the table have to go together."""
        with self._changed:
            table.busy.difference_update(numbers)
            if restart is not None:
                table.restart = restart
            elif table.collided is None:
                table.collided = numbers[0]
            self._changed.notify_all()

    def _done(
        self, table: _Table, before: Sequence[Progress], after: Sequence[Progress], told: str | None = None
    ) -> None:
        """Note what a step has done, before anybody takes the next one of these ranges; and tell it."""
        with self._told:
            rows = sum(state.rows for state in table.ranges.values() if state not in before)
            if told is not None:
                self._tell(TableProgress(after[0].table, rows + sum(state.rows for state in after)), told)
            with self._changed:
                moved_at = min(table.taken_at[state.number] for state in before)  # before the step's snapshot
                table.busy.difference_update(state.number for state in before)
                others = {number: state for number, state in table.ranges.items() if state not in before}
                table.ranges = others | {state.number: state for state in after}
                positions = {state.number: state.position for state in before}
                # a table that is read block by block does not follow the changes with each step
                moved = [one.number for one in after if one.position != positions.get(one.number) or not one.begun]
                table.moved_at |= dict.fromkeys(moved, moved_at)
                oldest = self._oldest()
                self._changed.notify_all()
        if self._hold is not None:
            self._hold.release(oldest, _FOLLOW_SECONDS)

    def _oldest(self) -> float:
        """A moment that is not after the snapshot of any range, also of one whose first step is not done yet."""
        moments = [time.monotonic()]
        for table in self._tables:
            moments += [table.moved_at[number] for number, state in table.ranges.items() if state.begun]
            moments += [table.taken_at[number] for number in table.busy]
        return min(moments)
