"""What a follower of definitions asks about a slot: the target stands at an LSN, and columns may change after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumers.replica.slot.published import published_tables
from gdq.consumers.replica.slot.slot_state import SlotReplicaState
from gdq.consumers.slot.catalog import SlotCatalog
from gdq.consumers.slot.replication import committed_lsn


@dataclass(frozen=True, slots=True)
class SlotDefinitions:
    """A slot's feed, which has no event of DDL: a definition is made when the target has the rows and the columns."""

    source: Connection[Any]
    state: SlotReplicaState

    def now(self) -> Callable[[], bool]:
        # what a run up to now will reach; more may be written, and not yet flushed
        lsn = committed_lsn(self.source)
        # tables that were copied later than others are of one moment when all copies are passed
        return lambda: self.state.lsn >= lsn and not self.state.ends and self._has_columns()

    def key(self, relid: int) -> list[str]:
        tables = published_tables(self.source, self.state.queue, [self.state.names[relid]])
        found = [table for table in tables.values() if table.oid == relid]
        return sorted(SlotCatalog(self.source).describe(found[0].relation).key) if found else []

    def _has_columns(self) -> bool:
        """True if the target's tables have the columns that the source's have."""
        copied = self.state.tables
        tables = published_tables(self.source, self.state.queue, list(copied))
        return all(table.columns.columns == copied[name].columns.columns for name, table in tables.items())
