"""A batch brought to the target: all its changes, and the position after it, in one transaction.

TRUNCATE and changes of columns stand in their place. ALTER TABLE waits for all writers of a table, so the rows of one
version of its columns all come before those of the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
from psycopg import Connection
from psycopg.rows import namedtuple_row

from gdq.batch import Batch
from gdq.call import scalar
from gdq.consumers.replica.change_reader import ChangeReader
from gdq.consumers.replica.changes import Applied, empty_table, netted_sql, stage_changes
from gdq.consumers.replica.column_changes import change_columns, source_columns
from gdq.consumers.replica.dead_letters import DeadLetters
from gdq.consumers.replica.policy import Policies
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import ReplicaTable, describe_table
from gdq.consumers.replica.table_apply import TableApplier
from gdq.errors import GdqError, mapped_errors
from gdq.queue import table_info

# Events of the queue that rows do not show. An event without a number says that capture is off: the gap comes later.
_EVENTS = """
select distinct e.tbl from gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot) e
 where e.kind <> 'message' and e.ev_id is not null"""

_TABLE_EVENTS = """
select t.name, g.ev_id, g.kind, g.data
  from unnest(%s::text[]) t(name), gdq.batch_gaps(%s, %s, t.name::regclass) g order by g.ev_id"""


class CopyAgain(Exception):  # noqa: N818 (a signal)
    """These tables have to be copied before the batch can be applied."""

    def __init__(self, *tables: str) -> None:
        super().__init__(*tables)
        self.tables = set(tables)


@dataclass(slots=True)
class _TableChanges:
    """What a batch has of a table: the last TRUNCATE's number, the versions with rows, and those that DDL made."""

    truncated: int | None = None
    with_rows: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)


@contextmanager
def _placed(batch: Batch) -> Iterator[None]:
    """Have an error of the block say in which changes it is."""
    try:
        yield
    except GdqError as error:
        place = f"This is in the changes after tick {batch.tick_from} up to tick {batch.tick_to}."
        error.detail = f"{error.detail}\n{place}" if error.detail else place
        raise


class BatchApplier:
    """Applies batches to a target in whose session triggers do not fire, if `may_suppress`."""

    def __init__(self, source: Connection[Any], state: ReplicaState, policies: Policies, *, may_suppress: bool) -> None:
        self._source = source
        self._target = state.connection
        self._state = state
        self._may_suppress = may_suppress
        self._reader = ChangeReader(source)
        self._letters = DeadLetters(self._target, state.name)
        self._tables = TableApplier(state.name, self._target, policies, self._letters)
        self._log_rows: dict[tuple[str, int], str] = {}
        self._described: dict[str, ReplicaTable] = {}
        self._sequences_set = False

    def apply(self, batch: Batch) -> tuple[int, Applied]:
        """Apply a batch and move the target's position; the numbers of tables and of rows. CopyAgain if need be."""
        self._reader.prepare()
        self._log_rows.clear()
        changes = self._changes(batch)
        position = str(batch.position)
        applied = Applied()
        with self._target.transaction():
            self._state.hold()
            self._target.execute("set local default_statistics_target = 10")
            names = sorted(changes)
            for place, name in enumerate(names, 1):
                following = names[place] if place < len(names) else None
                self._reader.then = None if following is None else self._query(batch, following, changes[following])
                with _placed(batch):
                    applied += self._apply_table(batch, name, changes[name])
            self._set_sequences(batch)
            self._state.move(position)
        self._state.position = position
        return len(changes), applied

    def describe(self, name: str, version: int | None = None) -> ReplicaTable:
        """A table as the source has it at a version, None for the newest, and as the target has it."""
        table = self._described.get(name)
        if table is None or version not in (None, table.version):
            table = describe_table(
                self._source, self._target, self._state.queue, name, version, may_suppress=self._may_suppress
            )
            self._tables.answers(table)
            self._described[name] = table
        return table

    def check_policies(self, tables: set[str]) -> None:
        """GdqError if an answer to conflicts names a table that the replica does not take."""
        self._tables.policies.check_tables(tables)

    def close(self) -> None:
        """End the session that reads ahead."""
        self._reader.close()

    def forget_tables(self) -> None:
        """Look at the tables anew when they are needed next."""
        self._described.clear()

    def _changes(self, batch: Batch) -> dict[str, _TableChanges]:
        """What a batch has of each table; CopyAgain for those that were not copied, or whose rows do not tell all."""
        changes = self._events(batch)
        for name in batch.tables():
            changes.setdefault(name, _TableChanges()).with_rows = [version.id for version in batch.versions(name)]
        if unknown := changes.keys() - self._state.tables.keys():
            raise CopyAgain(*unknown)
        for name, found in changes.items():
            # what capture was made to log otherwise, without DDL, is in no line with the rows that are there
            known = {self._state.tables[name].columns.version, *found.made}
            if not known.issuperset(found.with_rows):
                raise CopyAgain(name)
        # a batch names some tables that have nothing in it
        return {name: found for name, found in changes.items() if found != _TableChanges()}

    def _events(self, batch: Batch) -> dict[str, _TableChanges]:
        """The tables that were truncated in a batch, or whose columns changed.

        CopyAgain for tables with changes that no row shows: gaps of capture, other options of it, TRUNCATE of a
        partition.
        """
        found: dict[str, _TableChanges] = {}
        stale = set()
        for event in self._read_events(batch):
            data = event.data or {}
            if event.kind == "truncate" and "partition" not in data:
                found.setdefault(event.name, _TableChanges()).truncated = event.ev_id
            elif event.kind != "ddl" or "dropped" in data or "options" in data:
                stale.add(event.name)
            # a new name or an empty new partition does not concern the rows
            elif "new_version" in data:
                found.setdefault(event.name, _TableChanges()).made.append(data["new_version"])
        if stale:
            raise CopyAgain(*stale)
        return found

    def _read_events(self, batch: Batch) -> list[Any]:
        """The events of a batch's tables that are no rows and no messages."""
        values = [self._state.queue, batch.snapshot_from, batch.snapshot_to]
        with mapped_errors(), self._source.cursor(row_factory=namedtuple_row) as cursor:
            named = {table for (table,) in cursor.execute(_EVENTS, values, prepare=True)}
            if not named:
                return []
            captured = {info.table_name for info in table_info(self._source, self._state.queue)}
            # an event may have an older name of its table
            looked_at = named if named <= captured else set(self._state.tables)
            looked_at &= self._state.tables.keys()
            if gone := sorted(looked_at - captured):
                raise GdqError(f"table {', '.join(gone)} is no longer captured by queue {self._state.queue}")
            return cursor.execute(_TABLE_EVENTS, [sorted(looked_at), batch.id, batch.token]).fetchall()

    def _apply_table(self, batch: Batch, name: str, found: _TableChanges) -> Applied:
        """Apply a table's changes: one version of its columns after the other."""
        if found.truncated is not None:
            empty_table(self._target, name)
            self._letters.forget(name)
        applied = Applied()
        for version in sorted({*found.with_rows, *found.made}):
            now = self._state.tables[name].columns
            if version > now.version:
                columns = source_columns(self._source, self._state.queue, name, version)
                change_columns(self._source, self._target, name, now, columns)
                self._state.altered(name, columns)
                self._letters.rename_columns(name, now, columns)
            if version not in found.with_rows:
                continue
            table = self.describe(name, version)
            query = self._net_sql(batch, table, version, found)
            applied += self._tables.apply(table, partial(self._stage, table, query), batch.tick_to)
        return applied

    def _stage(self, table: ReplicaTable, query: str) -> bool:
        """Fill the staging table with a table's net change; True, as the source tells which rows are pairs."""
        stage_changes(self._reader, self._target, table, query, paired=True)
        return True

    def _query(self, batch: Batch, name: str, found: _TableChanges) -> str | None:
        """The SELECT of a table's changes, which may be read ahead; None if its columns change, or it has no rows."""
        if found.made or len(found.with_rows) != 1:
            return None
        [version] = found.with_rows
        return self._net_sql(batch, self.describe(name, version), version, found)

    def _net_sql(self, batch: Batch, table: ReplicaTable, version: int, found: _TableChanges) -> str:
        """The SELECT of a table's changes at one version of its columns, after the last TRUNCATE."""
        log_rows = self._rows_sql(batch, table.name, version)
        return netted_sql(table, log_rows, found.truncated, whole=self._tables.needs_whole(table))

    def _rows_sql(self, batch: Batch, name: str, version: int) -> str:
        """The SELECT of a table's log rows of one version."""
        known = self._log_rows.get((name, version))
        if known is None:
            with mapped_errors():
                query = "select gdq.batch_sql(%s, %s, %s::regclass, %s)"
                known = str(scalar(self._source, query, batch.id, batch.token, name, version))
            self._log_rows[name, version] = known
        return known

    def _set_sequences(self, batch: Batch) -> None:
        """Bring the target's sequences to their values at the batch's end: at first all, then those that changed."""
        for value in batch.sequences(changed=self._sequences_set):
            if value.last_value is None:
                continue
            try:
                self._target.execute(
                    "select setval(%s::regclass, %s, %s)", [value.sequence_name, value.last_value, value.is_called]
                )
            except psycopg.errors.UndefinedTable:
                raise GdqError(
                    f"the target has no sequence {value.sequence_name}",
                    hint="Create it there, or leave it out: "
                    f"gdq remove-sequence {self._state.queue} {value.sequence_name}",
                ) from None
        self._sequences_set = True
