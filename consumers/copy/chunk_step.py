"""The steps of a chunked copy, each in one transaction of the target at one snapshot of the source.

A step brings the rows that ranges of a table have in the target to the snapshot, and adds the next chunk to one range
as the snapshot sees it. Each worker has two sessions for its steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.copy.chunk_goal import Goal
from gdq.consumers.copy.chunk_progress import Progress, store
from gdq.consumers.copy.chunk_table import ChunkTable, describe_table
from gdq.consumers.copy.chunk_target import ChunkTarget
from gdq.consumers.copy.leader import COPY_SETTINGS
from gdq.consumers.views.snapshot_holder import SnapshotHolder, hold_snapshot
from gdq.errors import GdqError, ResyncRequired, TruncatedPosition, mapped_errors
from gdq.qualified_sql import qualified
from gdq.sql_text import raw

_CHUNK_ROWS_MIN = 1_000
# A chunk that takes longer halves the next ones, one that takes a tenth of it doubles them, up to the size asked for.
_CHUNK_SECONDS = 10.0

_EVENT = qualified("""
select e.kind, e.data->>'kind' from gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot,
                                                     array[%s::pg_catalog.regclass]) e
 where e.kind <> 'message' limit 1""")

_POSITION = qualified("select gdq.tick_position(%s, tick_id) from gdq.add_tick(%s, %s::pg_snapshot)")


def record_tick(connection: Connection[Any], queue: str, snapshot: str) -> str:
    """Record a snapshot as a tick, whose nonce tells a server that has lost it from one that has it; its position."""
    with mapped_errors():
        return str(scalar(connection, _POSITION, queue, queue, snapshot))


class StartAgain(Exception):  # noqa: N818 (a signal between two parts, no error)
    """Something happened to a table that its log's rows do not show: its copy starts again."""

    def __init__(self, table: str, reason: str) -> None:
        super().__init__(reason)
        self.table, self.reason = table, reason


@dataclass(frozen=True, slots=True)
class _Held:
    """A table that is read at a held snapshot, and the snapshot that its rows are at, which is a position."""

    holder: SnapshotHolder
    table: ChunkTable
    snapshot: str
    position: str

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
            else:
                after = [self._grown(_Held(holder, table, holder.snapshot, self.tick(holder.snapshot)), state)]
            store(self.target.connection, self.copy, [state], after)
        return after

    def advance(self, states: Sequence[Progress], grown: Progress | None = None) -> list[Progress]:
        """Bring ranges of one table to a new snapshot, and add a chunk to one of them that is not whole."""
        began = time.monotonic()
        with self._step([states[0].table]) as holder:
            held = self._moved(holder, states)
            after = [self._grown(held, state) if state is grown else held.at(state) for state in states]
            store(self.target.connection, self.copy, states, after)
        if grown is not None:
            self._fit_size(time.monotonic() - began)
        return after

    def join(self, states: Sequence[Progress]) -> Progress:
        """Bring a table's ranges, which are whole, to a new snapshot; they are one range then."""
        with self._step([states[0].table]) as holder:
            held = self._moved(holder, states)
            rows = sum(state.rows for state in states)
            joined = replace(held.at(states[0]), after=None, upto=None, until=None, rows=rows)
            store(self.target.connection, self.copy, states, [joined])
            self.finish(holder, joined)
        return joined

    def arrive(self, states: Sequence[Progress], goal: Goal | None) -> list[Progress]:
        """Bring tables that are one whole range each to the copy's tick: one snapshot now, or an earlier one."""
        with self._step([state.table for state in states]) as holder:
            position = self.tick(holder.snapshot) if goal is None else goal.position
            arrived = []
            for state in states:
                held = self._taken_to(goal, holder, state) if goal else self._moved(holder, [state], position)
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
        held = hold_snapshot(self.reader, self.queue, tables, stopped=lambda: self.stopped)
        with held as holder, self.target.writing():
            holder.connection.execute(raw(COPY_SETTINGS))
            yield holder

    def _moved(self, holder: SnapshotHolder, states: Sequence[Progress], position: str | None = None) -> _Held:
        """Bring the rows that ranges of one table have to the held snapshot.

        StartAgain if something happened that the rows of its log do not show.
        """
        table = self.describe(holder, states[0].table)
        changed = []
        try:
            with mapped_errors():
                for state in states:
                    if state.described is not None and state.described != table.described:
                        raise StartAgain(state.table, "its columns have changed")
                    if state.snapshot is not None:
                        self._refuse_events(holder, state.table, state.snapshot)
                        changed.append(table.changed_rows(holder, state.snapshot, state.after, state.upto))
                self.target.change(holder, table, [query for query in changed if query is not None], states[0].target)
        except (TruncatedPosition, ResyncRequired) as error:
            raise StartAgain(table.name, "changes since its last chunk are gone") from error
        return _Held(holder, table, holder.snapshot, position or self.tick(holder.snapshot))

    def _taken_to(self, goal: Goal, holder: SnapshotHolder, state: Progress) -> _Held:
        """Bring a table to an earlier snapshot than the held one, forward or back from where its rows are."""
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
            self.target.change(holder, table, [changed] if changed is not None else [], state.target)
        return _Held(holder, table, goal.snapshot, goal.position)

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
        upto = held.table.next_bound(held.holder.connection, state.upto, state.until, self._size)
        rows = self.target.insert(held.holder, held.table, held.table.rows(state.upto, upto), state.target)
        return held.placed(replace(state, upto=upto, whole=upto == state.until, rows=state.rows + rows))

    def _fit_size(self, seconds: float) -> None:
        if seconds > _CHUNK_SECONDS:
            self._size = max(self._size // 2, min(_CHUNK_ROWS_MIN, self.chunk_rows))
        elif seconds < _CHUNK_SECONDS / 10:
            self._size = min(self._size * 2, self.chunk_rows)
