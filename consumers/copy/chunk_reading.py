"""One step of a chunked copy of a table without a key: blocks are read, and now and then the changes meanwhile.

The table is read from its first block to its last in many snapshots. The first reading brings all rows. Those that have
changed meanwhile are in doubt (chunk_doubt): the next reading brings them alone, and so on, until none is in doubt.
All others follow the changes from then on. A reading that one snapshot is enough for leaves no doubt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gdq.consumers.copy.chunk_blocks import BlockReader, Place
from gdq.consumers.copy.chunk_doubt import READ, Doubts
from gdq.consumers.copy.chunk_progress import Progress
from gdq.consumers.copy.chunk_table import ChunkTable
from gdq.consumers.copy.chunk_target import ChunkTarget, Staged
from gdq.consumers.copy.target_columns import same_form
from gdq.consumers.views.row_copy import copy_rows
from gdq.consumers.views.snapshot_holder import SnapshotHolder

# Seconds after which a step begins with no further blocks, and the bytes of the first, which take a moment anywhere.
_SECONDS = 5.0
_FIRST_BYTES = 2 * 2**20

# Bytes that a row of a chunk may have: a step reads no more than the blocks of its rows.
_BYTES_A_ROW = 5_000

# Readings of several steps. Rows that are in doubt after them come and go all the time, as equal ones do: they are
# counted in one snapshot, however long that takes.
_READINGS = 4


@dataclass(slots=True)
class ReadingStep:
    """A step of `copy` at a held snapshot, in an open transaction of the target.

    `tick` records the snapshot as a tick, and gives its position. `chunk_rows`: the rows of a chunk. `apart`: rows wait
    beside the target's table until those have left it that are gone, for their unique values.
    """

    copy: str
    target: ChunkTarget
    tick: Callable[[str], str]
    holder: SnapshotHolder
    table: ChunkTable
    state: Progress
    chunk_rows: int
    apart: bool
    _doubts: Doubts = field(init=False)
    _reader: BlockReader = field(init=False)

    def __post_init__(self) -> None:
        place = Place.of(self.state.upto)
        connection = self.target.connection
        self._doubts = Doubts(connection, self.copy, self.table, self.state.target, place.reading)
        self._reader = BlockReader(self.holder, self.table, place, self._doubts.condition(self.holder))

    def run(self, *, follow: bool) -> Progress:
        """Read on; the table's state after it. `follow`: what has changed is looked at, too, as at a reading's end."""
        place, snapshot = self._reader.place, self.holder.snapshot
        waits = self.apart or place.reading > 1
        if waits:
            self._doubts.make_stage()
        rows = self._read(READ if waits else f"{self.state.target} ({self.table.listed})")
        settles = self.state.begun and (follow or self.apart or self._reader.at_end)
        staged = self._staged() if settles else None
        after = self.state
        if settles or not after.begun:
            after = replace(after, snapshot=snapshot, position=self.tick(snapshot), described=self.table.described)
        self.holder.release()
        if staged is not None and place.begun:
            self._doubts.note(staged)
        gone = self._doubts.purge() if settles else 0
        if staged is not None and self._doubts.leave_sure(staged):
            self.target.apply(staged)
        if waits:
            rows = self._doubts.insert_read()
        after = replace(after, rows=after.rows + rows - gone, upto=self._reader.place.bound)
        if not self._reader.at_end:
            return after
        again = self._doubts.end_reading()
        return replace(after, upto=Place(place.reading + 1).bound if again else None, whole=not again)

    def _read(self, into: str) -> int:
        """Copy rows for a while; returns their number."""
        began = time.monotonic()
        bounded = self._reader.place.reading < _READINGS
        left, size = (max(1, one // self._reader.block_bytes) for one in (self.chunk_rows * _BYTES_A_ROW, _FIRST_BYTES))
        rows = 0
        names = [name for name, _ in self.table.columns]
        form = same_form(self.holder.connection, self.table.name, self.target.connection, self.state.target, names)
        while not self._reader.at_end:
            started = time.monotonic()
            if bounded and (left <= 0 or started - began > _SECONDS):
                break
            query = self._reader.next(min(size, left) if bounded else size)
            rows += copy_rows(self.holder.connection, f"({query})", self.target.connection, into, form=form).rows
            left -= size
            if time.monotonic() - started < _SECONDS / 10:
                size *= 2
        return rows

    def _staged(self) -> Staged | None:
        """What has changed since the table was looked at last, however often it came and went."""
        assert self.state.snapshot is not None
        changed = self.table.images(self.holder, self.state.snapshot, self.holder.snapshot, every=True)
        return self.target.stage(self.holder, self.table, [] if changed is None else [changed], self.state.target)
