"""What a target keeps of a replica that a slot feeds: the position is an LSN, which moves with the rows.

All transactions whose commit ends at or before it are in the target, but for a table whose copy is newer: that holds
what the copy's snapshot sees. Both are compared until the position has passed the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg import Connection

from gdq.consumers.replica.state import SLOT, ReplicaState
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.errors import GdqError
from gdq.source import Position


class SlotReplicaState(ReplicaState):
    """The stored state of one replica that a slot feeds.

    `ends`: of each table whose copy may be newer than the position, an LSN after all that its snapshot sees.
    """

    def __init__(self, connection: Connection[Any], queue: str, name: str, source: str) -> None:
        super().__init__(connection, queue, name, source)
        self.system = ""
        self.slot = ""
        self.ends: dict[str, int] = {}
        self._snapshots: dict[str, PgSnapshot] = {}

    @property
    def lsn(self) -> int:
        """The LSN that the target stands at."""
        return self.tick

    def load(self) -> None:
        """As ReplicaState.load(), after a commit of a program that was killed and is still under way."""
        super().load()
        if self.position is not None:
            with self.connection.transaction():
                self.connection.execute("select from gdq_target.replica where name = %s for update", [self.name])
            super().load()

    def check(self, system: str, slot: str) -> None:
        """GdqError if the loaded position is not one of this server's slot."""
        self.system, self.slot = system, slot
        if self.position is None:
            return
        stored = Position.parse(self.position)
        if stored.kind != SLOT:
            raise GdqError(f'replica "{self.name}" is fed by the queue, not by a slot', hint="Leave --source out.")
        if stored.era != system:
            raise GdqError(
                f'the source of replica "{self.name}" is another server than the one that it was copied from',
                hint=f"gdq drop-replica {self.queue} {self.name}, then replicate anew with --overwrite.",
            )

    def begin_at(self, lsn: int) -> None:
        """Store the position of a replica that has copied nothing yet."""
        self.begin(self._text(lsn))

    def begin_anew_at(self, lsn: int) -> None:
        """Store that the slot has changes from an LSN on only, so that each table is to be copied again."""
        with self.moving(lsn):
            for table in self.tables.values():
                self.altered(table.table_name, table.columns.unmarked())

    @contextmanager
    def moving(self, lsn: int) -> Iterator[None]:
        """A transaction of the target that moves the position to an LSN; GdqError if another program has moved it."""
        position = self._text(lsn)
        with self.connection.transaction():
            self.hold()
            yield
            self.move(position)
        self.position = position
        for table in [table for table, end in self.ends.items() if end <= lsn]:
            self.handed_over(table)
            del self.ends[table]

    def note_copies(self, lsn: int) -> None:
        """Note, after load(), that no copy has anything that is logged after an LSN."""
        self.ends = {table.table_name: lsn for table in self.tables.values() if not table.handed_over}
        self._snapshots.clear()

    def has_copied(self, table: str, xid: int) -> bool:
        """True if a table's copy has the changes of a committed transaction, whose number has 32 bits."""
        if table not in self.ends:
            return False
        if table not in self._snapshots:
            self._snapshots[table] = PgSnapshot.parse(self.tables[table].snapshot)
        snapshot = self._snapshots[table]
        return snapshot.sees(snapshot.full(xid))

    def _text(self, lsn: int) -> str:
        return str(Position(SLOT, self.system, lsn, self.slot, ""))
