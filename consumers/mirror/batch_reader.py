"""What a batch changes of each mirrored table, which is read from where its lake table stands: the start may differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.batch import Batch
from gdq.call import call
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.mirror.batch_changes import CopyAgain, TableEvents, TableLog, log_rows, table_events
from gdq.consumers.mirror.state import MirrorState
from gdq.consumers.mirror.table import MirrorTable
from gdq.consumers.replica.source_tables import source_tables
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.consumers.views.target import StoredPosition
from gdq.errors import DivergedPosition, EraEnded, TruncatedPosition
from gdq.source import Position


@dataclass(slots=True)
class KeptTable:
    """A table that is mirrored, with its lake table, the position that this stands at, and the commits of this run."""

    table: MirrorTable
    lake: LakeTable
    stored: StoredPosition
    commits: int = 0


@dataclass(frozen=True, slots=True)
class BatchReader:
    """Finds what batches of `queue` change for the mirror `name`, of which `state` is the note."""

    source: Connection[Any]
    queue: str
    name: str
    state: MirrorState
    tell: Callable[[str], None]

    def changed(self, batch: Batch, mirrored: Mapping[int, KeptTable]) -> list[tuple[KeptTable, TableLog]]:
        """The tables that a batch may change, with what the log has of them.

        CopyAgain if a table has other columns or another name now, or changes that no row tells.
        """
        self.check_captured(mirrored)
        with_rows, by_start, stale = set(batch.tables()), dict[str, list[KeptTable]](), set[str]()
        for kept in mirrored.values():
            if (since := self._since(kept, batch)) is not None:
                by_start.setdefault(since, []).append(kept)
        found = []
        for since, some in by_start.items():
            captured = [kept.table.captured for kept in some]
            events = table_events(self.source, self.queue, captured, since, batch.snapshot_to)
            for kept in some:
                table = kept.table.captured
                event = events.get(table.relid, TableEvents())
                if event.stale is not None:
                    self.tell(f"{kept.table.name}: {event.stale}: it is copied again")
                    stale.add(kept.table.name)
                elif since != batch.snapshot_from or kept.table.name in with_rows or event.truncates:
                    select = log_rows(self.source, self.queue, table, since, batch.snapshot_to)
                    begin = Position.parse(kept.stored.position).tick
                    ends = (since, batch.snapshot_to, begin, batch.tick_to)
                    found.append((kept, TableLog(table, select, tuple(event.truncates), *ends)))
        if stale:
            raise CopyAgain(*stale)
        self.check_captured(mirrored)
        return found

    def check_captured(self, mirrored: Mapping[int, KeptTable]) -> None:
        """CopyAgain if tables are not as they were read: then the SELECTs may have other columns."""
        taken = source_tables(self.source, self.queue, self.name)
        if any(taken.get(relid) != kept.table.captured for relid, kept in mirrored.items()):
            raise CopyAgain

    def _since(self, kept: KeptTable, batch: Batch) -> str | None:
        """The snapshot after which a table's changes are to be applied; None if it has those of the batch.

        That of its own position, but the batch's start where the note says that it had all changes up to there.
        CopyAgain if the server does not know its position, or does not have the changes after it.
        """
        position = kept.stored.position
        noted = self.state.tick is not None and self.state.tick == batch.tick_from
        own = PgSnapshot.parse(Position.parse(position).snapshot)
        start = PgSnapshot.parse(batch.snapshot_from)
        if noted and self.state.positions.get(kept.table.name) == position:
            own = own if own.covers(start) else start
        else:
            try:
                call(self.source, "check_position", self.queue, position)
            except (DivergedPosition, EraEnded, TruncatedPosition):
                self.tell(f"{kept.table.name}: the server does not have all changes after its position")
                raise CopyAgain(kept.table.name) from None
        return None if own.covers(PgSnapshot.parse(batch.snapshot_to)) else own.text
