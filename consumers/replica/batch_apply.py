"""A batch brought to the target: all its changes, and the position after it, in one transaction.

TRUNCATE and changes of columns stand in their place. ALTER TABLE waits for all writers of a table, so the rows of one
version of its columns all come before those of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
from psycopg import Connection

from gdq.batch import Batch
from gdq.call import scalar
from gdq.consumers.replica.batch_changes import BatchChanges, CopyAgain, Move, TableChanges, changes_of, copy_first
from gdq.consumers.replica.changes import IN_STAGE, Applied, Staged, make_stage, stage_again, stage_changes, tells_pairs
from gdq.consumers.replica.column_changes import VersionGoneError, change_columns, source_columns
from gdq.consumers.replica.dead_letters import DeadLetters
from gdq.consumers.replica.joint_apply import table_applier
from gdq.consumers.replica.last_images import last_images_sql, numbers_tell
from gdq.consumers.replica.omitted_values import added_up_sql, check_answers, fill_left_out
from gdq.consumers.replica.origin import PassedOrigins
from gdq.consumers.replica.policy import Policies
from gdq.consumers.replica.sequences import set_sequences
from gdq.consumers.replica.source_tables import SourceTable, source_tables
from gdq.consumers.replica.staging_ahead import READING, StagingAhead, Wanted
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import Fires, ReplicaTable, describe_table
from gdq.consumers.replica.table_ddl import OnDrop, leave_table
from gdq.consumers.replica.table_names import follow_names, require_name
from gdq.consumers.replica.version_rows import version_rows
from gdq.errors import GdqError, mapped_errors

# Rows of a batch from which on it is worth the statements to stage what comes next meanwhile, and how many tables.
_AHEAD_ROWS = 1_000
_AHEAD_TABLES = 4

# How a batch is written. What is staged is sorted in memory; a small sample of it tells enough.
_WRITING = "set local default_statistics_target = 10; set local work_mem = '64MB'"

# A consumer that moves back, as its server crashes, does no harm: the target's position decides.
_MOVING = {"synchronous_commit": "off"}

# Batches whose images are added up after one with a key in doubt: it had to be read twice.
_DOUBTFUL_BATCHES = 10


@contextmanager
def _placed(batch: Batch) -> Iterator[None]:
    """Have an error of the block say in which changes it is."""
    try:
        yield
    except GdqError as error:
        place = f"This is in the changes after tick {batch.tick_from} up to tick {batch.tick_to}."
        error.detail = f"{error.detail}\n{place}" if error.detail else place
        raise


@dataclass(frozen=True, slots=True)
class _LogRows:
    """The SELECT of a table's log rows. `numbers_tell`: its last images may be taken for what is left of each key."""

    table: ReplicaTable
    query: str
    numbers_tell: bool


class BatchApplier:
    """Applies batches to a target in whose session some triggers fire: if any, all tables are changed at once.

    `passed`: the origins whose changes are left out. `on_drop`: what becomes of tables that are dropped in the source;
    `tell` gets a line for each.
    """

    def __init__(
        self,
        source: Connection[Any],
        state: ReplicaState,
        policies: Policies,
        passed: PassedOrigins,
        *,
        fires: Fires,
        on_drop: OnDrop = "keep",
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._target = state.connection
        self._state = state
        self._fires = fires
        self._ahead = StagingAhead(source, self._target)
        # rows of the last batch, and of this one so far
        self._rows_before = self._rows_staged = 0
        self._letters = DeadLetters(self._target, state.name)
        self.tables = table_applier(state, policies, self._letters, fires)
        self._rows: dict[tuple[int, str, tuple[int, ...]], _LogRows | None] = {}
        self._doubtful: dict[str, int] = {}
        self._begin_ahead: Callable[[], None] = lambda: None
        self._following: list[Wanted] | None = None
        self._passed = passed
        self._on_drop = on_drop
        self._tell = tell
        self._captured: dict[int, SourceTable] = {}
        self._described: dict[str, ReplicaTable] = {}
        self._sequences_set = False

    def apply(self, batch: Batch, following: Callable[[], Batch | None]) -> tuple[int, Applied]:
        """Apply a batch and move the target's position; the numbers of tables and of rows. CopyAgain if need be.

        `following`: opens the next batch, in the open transaction of the source, for the source to begin with it.
        """
        self._prepare()
        # all that is asked about the batch comes before it may be finished
        changes = changes_of(self._source, self._state, self._passed, batch, all_sequences=not self._sequences_set)
        applied = Applied()
        with self._target.transaction():
            self._state.hold()
            self.tables.begin()
            self._target.execute(_WRITING)
            with _placed(batch):
                self._empty([name for name, found in changes.tables.items() if found.truncated is not None])
            names = sorted(changes.tables)
            for place, name in enumerate(names, 1):
                self._begin_ahead = partial(self._stage_ahead, batch, names[place:], changes, following)
                with _placed(batch):
                    applied += self._apply_table(batch, name, changes.tables[name])
            with _placed(batch):
                applied += self.tables.finish()
            for move in changes.moves:
                self._move(move)
            set_sequences(self._target, self._state.queue, changes.sequences)
            self._state.move(changes.position)
        self._state.position = changes.position
        self._sequences_set = True
        return len(changes.tables), applied

    def stage_between(self, reader: Connection[Any], captured: SourceTable, since: str, till: str) -> None:
        """Stage a table's changes between two snapshots, as a session of the source sees them at the later one."""
        query = "select gdq.delta_sql(%s, %s::regclass, %s::pg_snapshot, %s::pg_snapshot, %s)"
        table = self.describe(captured)
        omitted = [column.name for column in table.columns if column.omitted]
        with mapped_errors():
            log_rows = str(scalar(reader, query, self._state.queue, str(captured.relid), since, till, omitted))
        if captured.origin and not self._passed.leave_some(reader, log_rows):
            return
        log_rows = self._passed.without(table, log_rows) if captured.origin else log_rows
        net = added_up_sql(table, log_rows, None, whole=self.tables.needs_whole(table))

        def stage() -> Staged:
            stage_changes(reader, self._target, table, net, paired=True)
            fill_left_out(self.tables, table)
            return Staged(paired=tells_pairs(table))

        self.tables.apply(table, stage, self._state.tick)

    def _prepare(self) -> None:
        """Make the open transaction of the source one that reads a batch's rows, and moves the consumer."""
        self._source.execute("; ".join(f"set local {name} = '{value}'" for name, value in (READING | _MOVING).items()))
        self._ahead.give_back()
        self._rows.clear()
        self._following = None
        self._rows_before, self._rows_staged = self._rows_staged, 0

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
            self._source,
            target or self._target,
            self._state.queue,
            name or captured.table_name,
            captured,
            version=version,
            fires=self._fires,
        )
        check_answers(table, self.tables.answers(table))
        return table

    def _at_version(self, name: str, version: int) -> ReplicaTable:
        """A table of the batch at a version, as it was described last."""
        table = self._described.get(name)
        if table is None or table.version != version:
            table = self._described[name] = self.describe(self._source_table(name), version=version, name=name)
        return table

    def _source_table(self, name: str) -> SourceTable:
        """A captured table as the source had it when it was looked at last."""
        relid = self._state.tables[name].relid
        assert relid is not None
        if relid not in self._captured:
            self._captured = source_tables(self._source, self._state.queue, self._state.name)
        return self._captured[relid]

    def check_policies(self, tables: set[str]) -> None:
        """GdqError if an answer to conflicts names a table that the replica does not take."""
        self.tables.policies.check_tables(tables)

    def close(self) -> None:
        """End the sessions that stage ahead."""
        self._ahead.close()

    def forget_tables(self) -> None:
        """Look at the tables anew when they are needed next."""
        self._described.clear()
        self._captured.clear()
        self._letters.look_anew()

    def _move(self, move: Move) -> None:
        """Give the tables of the target their new names, or leave one."""
        name = self._state.names.get(move.relid)
        if name is None:
            return
        if move.what == "renamed":
            taken = source_tables(self._source, self._state.queue, self._state.name)
            follow_names(self._state, taken)
            require_name(self._state, move.relid, taken)
        else:
            dropped = move.what == "dropped"
            leave_table(self._state, name, dropped=dropped, on_drop=self._on_drop, tell=self._tell)
        self.forget_tables()

    def _empty(self, names: Sequence[str]) -> None:
        """Delete all rows of tables that were truncated in the source."""
        for name in names:
            if other := self._state.shared_with(name):
                raise GdqError(
                    f"table {name} was truncated in the source, and has rows of replica {other} in the target",
                    hint=f"Delete this source's rows there, then copy those that are left: --copy-again '{name}'",
                )
        self.tables.empty(names)
        for name in names:
            self._letters.forget(name)

    def _apply_table(self, batch: Batch, name: str, found: TableChanges) -> Applied:
        """Apply a table's changes: one version of its columns after the other, or all at once after ALTER TABLE."""
        applied = Applied()
        for version in sorted({*found.log_rows, *found.made}):
            self._follow_columns(name, version, found)
            if version in found.log_rows and not self.tables.jointly:
                applied += self._apply_rows(batch, name, {version: found.log_rows[version]}, found)
        if self.tables.jointly:
            applied += self._apply_rows(batch, name, found.log_rows, found)
        return applied

    def _follow_columns(self, name: str, version: int, found: TableChanges) -> None:
        """Give a target table the columns of a later version."""
        now, relid = self._state.tables[name].columns, self._state.tables[name].relid
        assert relid is not None
        if version <= now.version:
            return
        try:
            columns = source_columns(self._source, self._state.queue, relid, version)
        except VersionGoneError:
            if version in found.log_rows:
                raise
            return  # no row has these columns: the next version's follow those before
        if self.tables.jointly and columns.key != now.key and min(found.log_rows, default=version) < version:
            copy_first(self._source, self._state, set(), {name})  # rows of both keys are not told apart
        change_columns(self._source, self._target, name, now, columns, relid=relid)
        self._state.altered(name, columns)
        self._letters.rename_columns(name, now, columns)

    def _apply_rows(self, batch: Batch, name: str, parts: Mapping[int, str], found: TableChanges) -> Applied:
        """Apply the rows of some versions of a table's columns, whose SELECTs `parts` has."""
        rows = self._read_rows(batch, name, parts) if parts else None
        if rows is not None:
            stage, add_up = (partial(self._stage, name, rows, found, add_up=one) for one in (False, True))
            return self.tables.apply(rows.table, stage, batch.tick_to, add_up if rows.numbers_tell else None)
        if name in self.tables.cleared:
            table = self._at_version(name, self._state.tables[name].columns.version)
            return self.tables.apply(table, partial(self._stage_nothing, table), batch.tick_to)
        return Applied()

    def _stage(self, name: str, rows: _LogRows, found: TableChanges, *, add_up: bool) -> Staged:
        """Stage a table's net change. `add_up`: with the old rows of pairs, and where it may be edited."""
        takes_last = not add_up and self._takes_last(name, rows)
        staged = self._staged(rows, found, takes_last=takes_last, only_read=not add_up)
        if takes_last and staged.doubtful:
            self._doubtful[name] = _DOUBTFUL_BATCHES
            staged = self._staged(rows, found, takes_last=False, only_read=True)
        elif self._doubtful.get(name):
            self._doubtful[name] -= 1
        fill_left_out(self.tables, rows.table)
        self._begin_ahead()
        return staged

    def _staged(self, rows: _LogRows, found: TableChanges, *, takes_last: bool, only_read: bool) -> Staged:
        """Where a table's net change is staged by now: `only_read` where it may be left if nothing is refused."""
        query = self._net_sql(rows, found, takes_last=takes_last)
        ahead = self._ahead.taken(query)
        staged = Staged(paired=tells_pairs(rows.table))
        if ahead is None:
            self._rows_staged += stage_changes(self._source, self._target, rows.table, query, paired=True)
            return staged.counted(self._target) if takes_last else staged
        self._rows_staged += (ahead.coming or 0) + (ahead.going or 0)
        if only_read and rows.numbers_tell:
            return ahead
        stage_again(self._target, rows.table, ahead)
        return staged

    def _stage_nothing(self, table: ReplicaTable) -> Staged:
        """Make the staging table of a table without changes."""
        make_stage(self._target, table)
        return IN_STAGE

    def _stage_ahead(
        self, batch: Batch, names: Sequence[str], changes: BatchChanges, following: Callable[[], Batch | None]
    ) -> None:
        """Have these tables staged, which come next, and then the first ones of the next batch."""
        if max(self._rows_before, self._rows_staged) < _AHEAD_ROWS:
            return
        wanted, are_all = self._wanted(batch, names, changes)
        if are_all and changes.plain:
            if self._following is None:
                self._following = self._wanted_of(following)
            wanted += self._following
        self._ahead.begin(wanted)

    def _wanted_of(self, following: Callable[[], Batch | None]) -> list[Wanted]:
        """What the first tables of the next batch want, whose own turn decides whether that was right.

        Whatever speaks against it shows in that turn, too.
        """
        try:
            with self._source.transaction():
                batch = following()
                if batch is None:
                    return []
                changes = changes_of(self._source, self._state, self._passed, batch)
                return self._wanted(batch, sorted(changes.tables), changes)[0] if changes.plain else []
        except (CopyAgain, GdqError, psycopg.Error):
            return []

    def rest(self) -> None:
        """Give up what was begun for a batch that does not come next, or not at once."""
        self._ahead.begin([])

    def _wanted(self, batch: Batch, names: Sequence[str], changes: BatchChanges) -> tuple[list[Wanted], bool]:
        """What the first of these tables want that may be staged ahead; True if these are all."""
        wanted: list[Wanted] = []
        for name in names:
            found = changes.tables[name]
            if found.made or len(found.log_rows) != 1 or len(wanted) == _AHEAD_TABLES:
                return wanted, False  # its columns change, or it has time
            if (rows := self._read_rows(batch, name, found.log_rows)) is not None:
                wanted.append(Wanted(rows.table, self._net_sql(rows, found, takes_last=self._takes_last(name, rows))))
        return wanted, True

    def _takes_last(self, name: str, rows: _LogRows) -> bool:
        """True if a table's last images are taken for what is left of each key."""
        return rows.numbers_tell and not self._doubtful.get(name)

    def _net_sql(self, rows: _LogRows, found: TableChanges, *, takes_last: bool) -> str:
        """The SELECT of a table's net change after the last TRUNCATE: by the last images, or by adding all up."""
        if takes_last:
            return last_images_sql(rows.table, rows.query, found.truncated)
        return added_up_sql(rows.table, rows.query, found.truncated, whole=self.tables.needs_whole(rows.table))

    def _read_rows(self, batch: Batch, name: str, parts: Mapping[int, str]) -> _LogRows | None:
        """A table at the last of some versions, and its log rows; None if all of them are passed over."""
        versions = tuple(parts)
        if (batch.id, name, versions) not in self._rows:
            self._rows[batch.id, name, versions] = self._found_rows(batch, name, parts)
        return self._rows[batch.id, name, versions]

    def _found_rows(self, batch: Batch, name: str, parts: Mapping[int, str]) -> _LogRows | None:
        captured, version = self._source_table(name), max(parts)
        with_origins = captured.origin
        if self.tables.jointly:
            # the target has the columns of the batch's end
            version = max(version, self._state.tables[name].columns.version)
        log_rows, omitted = version_rows(
            self._source, batch.queue, captured.relid, parts, version, with_origin=with_origins
        )
        # the target may have other columns by now than rows that came from there
        if with_origins and not self._passed.leave_some(self._source, log_rows):
            return None
        table = self._at_version(name, version).omitting(omitted)
        if with_origins:
            return _LogRows(table, self._passed.without(table, log_rows), numbers_tell=False)
        # old rows are wanted beside what the target refused before, and by policies; numbers are of one version alone
        plain = len(parts) == 1 and not self.tables.jointly
        plain = plain and not (self._letters.has_any(name) or self.tables.needs_whole(table) or table.omits)
        tell = plain and numbers_tell(self._source, captured.relid, table, batch.snapshot_from)
        return _LogRows(table, log_rows, numbers_tell=tell)
