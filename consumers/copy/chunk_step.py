"""The steps of a chunked copy, each in one transaction of the target at one snapshot of the source.

A step brings the rows that ranges of a table have in the target to the snapshot, and adds the next chunk to one range
as the snapshot sees it. Each worker has two sessions for its steps. What is read at a snapshot is applied after it has
been given back, where it is not in the way of the next rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from psycopg import Connection
from psycopg.errors import DeadlockDetected, ExclusionViolation, UniqueViolation

from gdq.call import scalar
from gdq.consumers.copy.chunk_bounds import ChunkBounds
from gdq.consumers.copy.chunk_goal import Goal
from gdq.consumers.copy.chunk_progress import Progress, StartAgain, store
from gdq.consumers.copy.chunk_reading import ReadingStep
from gdq.consumers.copy.chunk_table import ChunkTable, describe_table
from gdq.consumers.copy.chunk_target import ChunkTarget, Staged
from gdq.consumers.copy.leader import COPY_SETTINGS
from gdq.consumers.views.snapshot_holder import SnapshotHolder, hold_snapshot
from gdq.errors import GdqError, ResyncRequired, TruncatedPosition, mapped_errors
from gdq.qualified_sql import qualified
from gdq.sql_text import raw

# What rows of two snapshots do to each other where the target has another unique key than the source's.
COLLISIONS = (UniqueViolation, ExclusionViolation, DeadlockDetected)

_CHUNK_ROWS_MIN = 1_000
# A chunk takes about so long, up to the size asked for: what a step does beside its rows is little then, and its
# snapshot is not old. A size is at most doubled or halved at once.
_CHUNK_SECONDS = 5.0

_EVENT = qualified("""
select e.kind, e.data->>'kind' from gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot,
                                                     array[%s::pg_catalog.regclass]) e
 where e.kind <> 'message' limit 1""")

_SUMMARISE = qualified("select gdq.summarise_logs(array(select gdq.log_segments(%s, %s::text[]::regclass[])))")

_POSITION = qualified("select gdq.tick_position(%s, tick_id) from gdq.add_tick(%s, %s::pg_snapshot)")


def summarise_log(connection: Connection[Any], queue: str, tables: Sequence[str]) -> None:
    """Have the tables' logs summarised, so that a short part of them is found without reading the rest.

    Each step reads the changes since the last one: where no ticker runs, all of the log after a bulk load.
    """
    connection.execute(_SUMMARISE, [queue, list(tables)])


def record_tick(connection: Connection[Any], queue: str, snapshot: str) -> str:
    """Record a snapshot as a tick, whose nonce tells a server that has lost it from one that has it; its position."""
    with mapped_errors():
        return str(scalar(connection, _POSITION, queue, queue, snapshot))


@dataclass(frozen=True, slots=True)
class _Held:
    """A table that is read at a held snapshot, and the snapshot that its rows are at, which is a position.

    They are when `staged` has been applied.
    """

    holder: SnapshotHolder
    table: ChunkTable
    snapshot: str
    position: str
    staged: Staged | None = None

    def placed(self, state: Progress) -> Progress:
        """A range whose rows are those of the snapshot."""
        return replace(state, described=self.table.described, snapshot=self.snapshot, position=self.position)

    def at(self, state: Progress) -> Progress:
        """A range whose rows, if it has any, are those of the snapshot."""
        return self.placed(state) if state.begun else state


@dataclass(slots=True)
class ChunkSteps:
    """One worker's sessions, and the steps that it does with them.

    `tick` records a snapshot as a tick of the queue, and gives its position. `chunk_rows`: the rows of a chunk.
    `stopped`: set by another thread that has no use for further steps.
    """

    queue: str
    copy: str
    reader: Connection[Any]
    target: ChunkTarget
    tick: Callable[[str], str]
    chunk_rows: int
    stopped: bool = False
    _size: int = 0
    _bounds: ChunkBounds = field(default_factory=ChunkBounds)

    def __post_init__(self) -> None:
        self._size = self.chunk_rows

    def prepare(self, holder: SnapshotHolder, table: str) -> None:
        """What is done in the transaction of a table's first step, before it is looked at; for those who need it."""

    def describe(self, holder: SnapshotHolder, table: str) -> ChunkTable:
        """The table as the held snapshot has it, with the columns that are copied."""
        return describe_table(holder.connection, self.queue, table)

    def finish(self, holder: SnapshotHolder, joined: Progress) -> None:
        """What is done in the transaction that joins a table's ranges; for those who need it."""

    def begin(self, state: Progress, ranges: int, *, grow: bool = True) -> list[Progress]:
        """A table's first step: it is checked, and divided into so many ranges, if it is large.

        `grow`: a table that is not divided gets its first chunk at once.
        """
        with self._step([state.table]) as holder:
            self.prepare(holder, state.table)
            table = self.describe(holder, state.table)
            self.target.check(table, state.target)
            bounds = table.dividing_bounds(holder.connection, ranges, self.chunk_rows) if ranges > 1 else []
            if bounds or not grow:
                after = state.divided(bounds, table.described)
            elif not table.key:
                after = [self._read(holder, table, state, follow=False, apart=False)]
            else:
                after = [self._grown(_Held(holder, table, holder.snapshot, self.tick(holder.snapshot)), state)]
            store(self.target.connection, self.copy, [state], after)
        return after

    def advance(
        self, states: Sequence[Progress], grown: Progress | None = None, *, follow: bool = False
    ) -> list[Progress]:
        """Bring ranges of one table to a new snapshot, and add a chunk to one of them that is not whole.

        A table without a key is read on instead, while it is not whole, and follows the changes if `follow` says so.
        """
        if states[0].is_read:
            return [self._read_on(states[0], follow=follow)]
        began = time.monotonic()
        with self._step([states[0].table]) as holder:
            held = self._moved(holder, states)
            if grown is None:
                holder.release()
            self.target.apply(held.staged)
            after = [self._grown(held, state) if state is grown else held.at(state) for state in states]
            store(self.target.connection, self.copy, states, after)
        if grown is not None:
            self._fit_size(time.monotonic() - began)
        return after

    def join(self, states: Sequence[Progress]) -> Progress:
        """Bring a table's ranges, which are whole, to a new snapshot; they are one range then."""
        with self._step([states[0].table]) as holder:
            held = self._moved(holder, states)
            holder.release()
            self.target.apply(held.staged)
            rows = sum(state.rows for state in states)
            joined = replace(held.at(states[0]), after=None, upto=None, until=None, rows=rows)
            store(self.target.connection, self.copy, states, [joined])
            self.finish(holder, joined)
        return joined

    def arrive(self, states: Sequence[Progress], goal: Goal | None) -> list[Progress]:
        """Bring tables that are one whole range each to the copy's tick: one snapshot now, or an earlier one."""
        with self._step([state.table for state in states]) as holder:
            position = self.tick(holder.snapshot) if goal is None else goal.position
            read = [
                self._taken_to(goal, holder, state, number) if goal else self._moved(holder, [state], position, number)
                for number, state in enumerate(states, 1)
            ]
            holder.release()
            arrived = []
            for state, held in zip(states, read, strict=True):
                self.target.apply(held.staged)
                arrived.append(replace(held.at(state), arrived=True))
                store(self.target.connection, self.copy, [state], arrived[-1:])
        return arrived

    def empty(self, states: Sequence[Progress]) -> Progress:
        """Delete the rows of a table, whose copy starts again."""
        anew = states[0].begun_anew()
        with self.target.writing():
            self.target.empty(anew.target)
            store(self.target.connection, self.copy, states, [anew])
        return anew

    @contextmanager
    def _step(self, tables: Sequence[str]) -> Iterator[SnapshotHolder]:
        """A snapshot of the source, and a transaction of the target; values have one text on both sides."""
        summarise_log(self.reader, self.queue, tables)
        held = hold_snapshot(self.reader, self.queue, tables, stopped=lambda: self.stopped)
        with held as holder, self.target.writing():
            holder.connection.execute(raw(COPY_SETTINGS))
            yield holder

    def _moved(
        self, holder: SnapshotHolder, states: Sequence[Progress], position: str | None = None, number: int = 1
    ) -> _Held:
        """What brings the rows that ranges of one table have to the held snapshot, staged under a number.

        StartAgain if something happened that the rows of its log do not show.
        """
        table = self.describe(holder, states[0].table)
        with self._following(holder, table, states):
            changed = [
                table.changed_rows(holder, state.snapshot, state.after, state.upto)
                for state in states
                if state.snapshot is not None
            ]
            found = [query for query in changed if query is not None]
            staged = self.target.stage(holder, table, found, states[0].target, number)
        return _Held(holder, table, holder.snapshot, position or self.tick(holder.snapshot), staged)

    @contextmanager
    def _following(self, holder: SnapshotHolder, table: ChunkTable, states: Sequence[Progress]) -> Iterator[None]:
        """What the changes of ranges of a table are read in: StartAgain if they do not show all that has happened."""
        try:
            with mapped_errors():
                for state in states:
                    if state.described is not None and state.described != table.described:
                        raise StartAgain(state.table, "its columns have changed")
                    if state.snapshot is not None:
                        self._refuse_events(holder, state.table, state.snapshot)
                yield
        except (TruncatedPosition, ResyncRequired) as error:
            raise StartAgain(table.name, "changes since its last chunk are gone") from error

    def _read_on(self, state: Progress, *, follow: bool) -> Progress:
        """A step of a table that is read block by block."""
        try:
            return self._read_step(state, follow=follow, apart=False)
        except COLLISIONS:  # a row has come to a place that is read now, and the target has it from its place before
            return self._read_step(state, follow=follow, apart=True)

    def _read_step(self, state: Progress, *, follow: bool, apart: bool) -> Progress:
        with self._step([state.table]) as holder:
            after = self._read(holder, self.describe(holder, state.table), state, follow=follow, apart=apart)
            store(self.target.connection, self.copy, [state], [after])
        return after

    def _read(
        self, holder: SnapshotHolder, table: ChunkTable, state: Progress, *, follow: bool, apart: bool
    ) -> Progress:
        with self._following(holder, table, [state]):
            step = ReadingStep(self.copy, self.target, self.tick, holder, table, state, self.chunk_rows, apart)
            return step.run(follow=follow)

    def _taken_to(self, goal: Goal, holder: SnapshotHolder, state: Progress, number: int) -> _Held:
        """What brings a table to an earlier snapshot than the held one, forward or back from where its rows are."""
        assert state.snapshot is not None
        table = self.describe(holder, state.table)
        with mapped_errors():
            event = self._event(holder, state.table, goal.snapshot)
            if event is not None:
                raise goal.refuse_event(state.table, event)
            if state.described != table.described:
                raise StartAgain(state.table, "its columns have changed")
            if goal.is_after(state.snapshot):
                self._refuse_events(holder, state.table, state.snapshot)
                changed = table.images(holder, state.snapshot, goal.snapshot)
            else:
                changed = table.images(holder, goal.snapshot, state.snapshot, back=True)
            found = [changed] if changed is not None else []
            staged = self.target.stage(holder, table, found, state.target, number)
        return _Held(holder, table, goal.snapshot, goal.position, staged)

    def _refuse_events(self, holder: SnapshotHolder, table: str, since: str) -> None:
        """StartAgain for what happened to a table since a snapshot, GdqError if its capture is off."""
        event = self._event(holder, table, since)
        if event is not None:
            raise StartAgain(table, event)

    def _event(self, holder: SnapshotHolder, table: str, since: str) -> str | None:
        """What happened to a table since a snapshot that rows of its log do not show; GdqError if capture is off."""
        event = holder.connection.execute(_EVENT, [self.queue, since, holder.snapshot, table]).fetchone()
        if event is None:
            return None
        if event[1] == "off":
            raise GdqError(
                f"capture of table {table} is off, so that its copy cannot be kept right",
                hint="gdq.maintain() or a ticker switches it on. Then run the copy again.",
            )
        return str(event[0])

    def _grown(self, held: _Held, state: Progress) -> Progress:
        """A range, whose rows are at the held snapshot, with one chunk more."""
        connection, size = held.holder.connection, self._size
        upto = self._bounds.next(connection, held.table, state.upto, state.until, size, number=state.number)
        rows = self.target.insert(held.holder, held.table, held.table.rows(state.upto, upto), state.target)
        return held.placed(replace(state, upto=upto, whole=upto == state.until, rows=state.rows + rows))

    def _fit_size(self, seconds: float) -> None:
        fitting = int(self._size * min(max(_CHUNK_SECONDS / max(seconds, 0.001), 0.5), 2))
        self._size = min(max(fitting, _CHUNK_ROWS_MIN), self.chunk_rows)
