"""How a batch's rows are read: each table at a version, its log rows, and the SELECT of their net change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from psycopg import Connection

from gdq.batch import Batch
from gdq.consumers.replica.batch_changes import TableChanges
from gdq.consumers.replica.dead_letters import DeadLetters
from gdq.consumers.replica.last_images import last_images_sql, numbers_tell
from gdq.consumers.replica.omitted_values import added_up_sql, check_answers
from gdq.consumers.replica.origin import PassedOrigins
from gdq.consumers.replica.source_tables import SourceTable, source_tables
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import Fires, ReplicaTable, describe_table
from gdq.consumers.replica.table_apply import TableApplier
from gdq.consumers.replica.version_rows import version_rows

# Batches whose images are added up after one with a key in doubt: it had to be read twice.
_DOUBTFUL_BATCHES = 10


@dataclass(frozen=True, slots=True)
class LogRows:
    """The SELECT of a table's log rows. `numbers_tell`: its last images may be taken for what is left of each key."""

    table: ReplicaTable
    query: str
    numbers_tell: bool


@dataclass(slots=True)
class BatchReading:
    """What is known of the tables of batches. `passed`: the origins whose changes are left out.

    `letters`: rows that the target has refused. `tables`: what applies changes. `fires`: which triggers do there.
    """

    source: Connection[Any]
    state: ReplicaState
    passed: PassedOrigins
    letters: DeadLetters
    tables: TableApplier
    fires: Fires
    _rows: dict[tuple[int, str, tuple[int, ...]], LogRows | None] = field(default_factory=dict, init=False)
    _doubtful: dict[str, int] = field(default_factory=dict, init=False)
    _captured: dict[int, SourceTable] = field(default_factory=dict, init=False)
    _described: dict[str, ReplicaTable] = field(default_factory=dict, init=False)

    def begin(self) -> None:
        """Forget the rows of the last batch."""
        self._rows.clear()

    def forget_tables(self) -> None:
        """Look at the tables anew when they are needed next."""
        self._described.clear()
        self._captured.clear()
        self.letters.look_anew()

    def describe(
        self,
        captured: SourceTable,
        target: Connection[Any] | None = None,
        *,
        version: int | None = None,
        name: str | None = None,
    ) -> ReplicaTable:
        """A table as the source has it at a version, None for the newest, and as the target has it under a name.

        `target`: another session of the target, which sees what it has not committed.
        """
        table = describe_table(
            self.source,
            target or self.state.connection,
            self.state.queue,
            name or captured.table_name,
            captured,
            version=version,
            fires=self.fires,
        )
        check_answers(table, self.tables.answers(table))
        return table

    def table_at(self, name: str, version: int) -> ReplicaTable:
        """A table of the batch at a version, as it was described last."""
        table = self._described.get(name)
        if table is None or table.version != version:
            table = self._described[name] = self.describe(self._source_table(name), version=version, name=name)
        return table

    def _source_table(self, name: str) -> SourceTable:
        """A captured table as the source had it when it was looked at last."""
        relid = self.state.tables[name].relid
        assert relid is not None
        if relid not in self._captured:
            self._captured = source_tables(self.source, self.state.queue, self.state.name)
        return self._captured[relid]

    def doubt(self, name: str) -> None:
        """Add up the images of a table for some batches: numbers have not told the order of a key's changes."""
        self._doubtful[name] = _DOUBTFUL_BATCHES

    def trust(self, name: str) -> None:
        """Note that a batch has passed in which no key of a table was in doubt."""
        if self._doubtful.get(name):
            self._doubtful[name] -= 1

    def takes_last(self, name: str, rows: LogRows) -> bool:
        """True if a table's last images are taken for what is left of each key."""
        return rows.numbers_tell and not self._doubtful.get(name)

    def net_sql(self, rows: LogRows, found: TableChanges, *, takes_last: bool) -> str:
        """The SELECT of a table's net change after the last TRUNCATE: by the last images, or by adding all up."""
        if takes_last:
            return last_images_sql(rows.table, rows.query, found.truncated)
        return added_up_sql(rows.table, rows.query, found.truncated, whole=self.tables.needs_whole(rows.table))

    def rows(self, batch: Batch, name: str, parts: Mapping[int, str]) -> LogRows | None:
        """A table at the last of some versions, and its log rows; None if all of them are passed over."""
        versions = tuple(parts)
        if (batch.id, name, versions) not in self._rows:
            self._rows[batch.id, name, versions] = self._found_rows(batch, name, parts)
        return self._rows[batch.id, name, versions]

    def _found_rows(self, batch: Batch, name: str, parts: Mapping[int, str]) -> LogRows | None:
        captured, version = self._source_table(name), max(parts)
        with_origins = captured.origin
        if self.tables.jointly:
            # the target has the columns of the batch's end
            version = max(version, self.state.tables[name].columns.version)
        log_rows, omitted = version_rows(
            self.source, batch.queue, captured.relid, parts, version, with_origin=with_origins
        )
        # the target may have other columns by now than rows that came from there
        if with_origins and not self.passed.leave_some(self.source, log_rows):
            return None
        table = self.table_at(name, version).omitting(omitted)
        if with_origins:
            return LogRows(table, self.passed.without(table, log_rows), numbers_tell=False)
        # old rows are wanted beside what the target refused before, and by policies; numbers are of one version alone
        plain = len(parts) == 1 and not self.tables.jointly
        plain = plain and not (self.letters.has_any(name) or self.tables.needs_whole(table) or table.omits)
        tell = plain and numbers_tell(self.source, captured.relid, table, batch.snapshot_from)
        return LogRows(table, log_rows, numbers_tell=tell)
