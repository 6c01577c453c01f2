"""A batch brought to the target: all its changes, and the position after it, in one transaction.

TRUNCATE and changes of columns stand in their place. ALTER TABLE waits for all writers of a table, so the rows of one
version of its columns all come before those of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import psycopg
from psycopg import Connection

from gdq.batch import Batch
from gdq.call import scalar
from gdq.conninfo import conninfo_of
from gdq.consumers.copy.wal_writer import wal_writer_awake
from gdq.consumers.replica.apply_workers import WRITING, ApplyWorkers
from gdq.consumers.replica.batch_changes import BatchChanges, CopyAgain, Move, TableChanges, changes_of, copy_first
from gdq.consumers.replica.batch_reading import BatchReading, LogRows
from gdq.consumers.replica.changes import IN_STAGE, Applied, Staged, make_stage, stage_again, stage_changes, tells_pairs
from gdq.consumers.replica.column_changes import VersionGoneError, change_columns, source_columns
from gdq.consumers.replica.dead_letters import DeadLetters
from gdq.consumers.replica.joint_apply import table_applier
from gdq.consumers.replica.omitted_values import added_up_sql, fill_left_out
from gdq.consumers.replica.origin import PassedOrigins
from gdq.consumers.replica.policy import Policies
from gdq.consumers.replica.refusal import RowsLackingError
from gdq.consumers.replica.sequences import set_sequences
from gdq.consumers.replica.source_tables import SourceTable, source_tables
from gdq.consumers.replica.staging_ahead import READING, StagingAhead, Wanted
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import Fires, ReplicaTable
from gdq.consumers.replica.table_apply import takes_parts
from gdq.consumers.replica.table_ddl import OnDrop, is_missing, leave_table
from gdq.consumers.replica.table_names import follow_names, require_name
from gdq.errors import GdqError, mapped_errors

# Rows of a batch from which on it is worth the statements to stage what comes next meanwhile, and how many tables.
_AHEAD_ROWS = 1_000
_AHEAD_TABLES = 4

# A consumer that moves back, as its server crashes, does no harm: the target's position decides.
_MOVING = {"synchronous_commit": "off"}


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
    """Applies batches to a target in whose session some triggers fire: if any, all tables are changed at once.

    `passed`: the origins whose changes are left out. `on_drop`: what becomes of tables that are dropped in the source;
    `tell` gets a line for each. `apply_workers`: tables whose changes are applied at once where nothing fires; all but
    one in transactions of their own.
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
        apply_workers: int = 1,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._target = state.connection
        self._state = state
        self._fires = fires
        # foreign keys that fire are looked at when one statement has changed all tables
        self._beside = ApplyWorkers(state, apply_workers - 1 if fires == "nothing" else 0)
        self._ahead = StagingAhead(source, self._target, apply_workers)
        # rows of the last batch, or as many as may come in the first, and of this one so far
        self._rows_before = self._rows_staged = 0
        self._letters = DeadLetters(self._target, state.name)
        self.tables = table_applier(state, policies, self._letters, fires)
        self._begin_ahead: Callable[[], None] = lambda: None
        self._following: list[Wanted] | None = None
        self._passed = passed
        self._on_drop = on_drop
        self._tell = tell
        self.reading = BatchReading(source, state, passed, self._letters, self.tables, fires)
        self._sequences_set = False

    def apply(self, batch: Batch, following: Callable[[], Batch | None]) -> tuple[int, Applied]:
        """Apply a batch and move the target's position; the numbers of tables and of rows. CopyAgain if need be.

        `following`: opens the next batch, in the open transaction of the source, for the source to begin with it.
        """
        self._prepare()
        # all that is asked about the batch comes before it may be finished
        changes = self._changes(batch)
        if self._follow_others(changes.moves):
            changes = self._changes(batch)
        try:
            with self._writing(), self._target.transaction():
                applied = self._apply_all(batch, changes, following)
                applied += self._apply_tables(batch, self._beside.left(), changes)
                # other sessions commit what they have of the batch: hardly anything but this commit comes after
                beside, given_up = self._beside.commit()
                applied += self._apply_tables(batch, given_up, changes)
        except BaseException:
            self._beside.give_up()
            self._forget()
            raise
        applied += beside
        self._state.position = changes.position
        self._sequences_set = True
        return len(changes.tables), applied

    def _changes(self, batch: Batch) -> BatchChanges:
        return changes_of(self._source, self._state, self._passed, batch, all_sequences=not self._sequences_set)

    def _follow_others(self, moves: Sequence[Move]) -> bool:
        """Take the new names of tables that the replica of another source has renamed in the target; True for any.

        The rows of a batch come before its own renames, and would look for the names of before.
        """
        names = [self._state.names.get(move.relid) for move in moves if move.what == "renamed"]
        if not any(name is not None and is_missing(self._target, name) for name in names):
            return False
        follow_names(self._state, source_tables(self._source, self._state.queue, self._state.name))
        self.reading.forget_tables()
        return True

    def _forget(self) -> None:
        """Forget what was noted of a batch that was rolled back; other sessions may have committed a part of it."""
        with suppress(psycopg.Error, GdqError):  # the batch's own error is told
            self._state.load()
        self.reading.forget_tables()

    def _apply_all(self, batch: Batch, changes: BatchChanges, following: Callable[[], Batch | None]) -> Applied:
        """Bring all that a batch has into the open transaction, and its position, but for what workers have of it."""
        applied = Applied()
        self._state.hold()
        self.tables.begin()
        self._target.execute(WRITING)
        with _placed(batch):
            self._empty([name for name, found in changes.tables.items() if found.truncated is not None])
        names = sorted(changes.tables)
        self._stage_ahead(batch, names, changes, following)
        self._apply_beside(batch, names[1:], changes)
        for place, name in enumerate(names, 1):
            if name in self._beside.tables:
                continue
            self._begin_ahead = partial(self._begin_others, batch, names[place:], changes, following)
            with _placed(batch):
                applied += self._apply_table(batch, name, changes.tables[name])
        with _placed(batch):
            applied += self.tables.finish()
        for move in changes.moves:
            self._move(move)
        set_sequences(self._target, self._state.queue, changes.sequences)
        self._state.move(changes.position)
        return applied

    def _apply_tables(self, batch: Batch, names: Sequence[str], changes: BatchChanges) -> Applied:
        """Apply the changes of tables that workers have not applied, and have no worker begin with them again."""
        self._begin_ahead = lambda: None
        applied = Applied()
        for name in names:
            with _placed(batch):
                applied += self._apply_table(batch, name, changes.tables[name])
        return applied

    def _apply_beside(self, batch: Batch, names: Sequence[str], changes: BatchChanges) -> None:
        """Have workers apply the changes of some of these tables, which are staged or being staged."""
        for name in names:
            if not self._beside.has_free or not changes.plain:
                return
            found = changes.tables[name]
            rows = self.reading.rows(batch, name, found.log_rows)
            if rows is None or not self.reading.takes_last(name, rows) or name in self._beside.tables:
                continue
            parts = self._ahead.promised(self.reading.net_sql(rows, found, takes_last=True))
            if parts is not None:
                self._beside.begin(rows.table, parts, batch.snapshot_to)

    def stage_between(self, reader: Connection[Any], captured: SourceTable, since: str, till: str) -> None:
        """Stage a table's changes between two snapshots, as a session of the source sees them at the later one."""
        query = "select gdq.delta_sql(%s, %s::regclass, %s::pg_snapshot, %s::pg_snapshot, %s)"
        table = self.reading.describe(captured)
        omitted = [column.name for column in table.columns if column.omitted]
        with mapped_errors():
            log_rows = str(scalar(reader, query, self._state.queue, str(captured.relid), since, till, omitted))
        if captured.origin and not self._passed.leave_some(reader, log_rows):
            return
        log_rows = self._passed.without(table, log_rows) if captured.origin else log_rows
        net = added_up_sql(table, log_rows, None, whole=self.tables.needs_whole(table))

        def stage() -> Sequence[Staged]:
            stage_changes(reader, self._target, table, net, paired=True)
            fill_left_out(self.tables, table)
            return [Staged(paired=tells_pairs(table))]

        self.tables.apply(table, stage, self._state.tick)

    def _prepare(self) -> None:
        """Make the open transaction of the source one that reads a batch's rows, and moves the consumer."""
        self._source.execute("; ".join(f"set local {name} = '{value}'" for name, value in (READING | _MOVING).items()))
        self._rows_before, self._rows_staged = self._rows_staged + self._ahead.give_back(), 0
        self.reading.begin()
        self._following = None

    def expect(self, events: int) -> None:
        """Say how many events are unread: if they are many, threads stage the first batch, too."""
        self._rows_staged = events

    def check_policies(self, tables: set[str]) -> None:
        """GdqError if an answer to conflicts names a table that the replica does not take."""
        self.tables.policies.check_tables(tables)

    def close(self) -> None:
        """End the sessions that stage ahead, and those of the workers."""
        self._ahead.close()
        self._beside.close()

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
        self.reading.forget_tables()

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
        rows = self.reading.rows(batch, name, parts) if parts else None
        if rows is not None:
            stage, add_up = (partial(self._stage, name, rows, found, add_up=one) for one in (False, True))
            return self.tables.apply(rows.table, stage, batch.tick_to, add_up if rows.numbers_tell else None)
        if name in self.tables.cleared:
            table = self.reading.table_at(name, self._state.tables[name].columns.version)
            return self.tables.apply(table, partial(self._stage_nothing, table), batch.tick_to)
        return Applied()

    def _stage(self, name: str, rows: LogRows, found: TableChanges, *, add_up: bool) -> Iterable[Staged]:
        """Stage a table's net change. `add_up`: with the old rows of pairs, and where it may be edited."""
        takes_last = not add_up and self.reading.takes_last(name, rows)
        if not takes_last:
            self.reading.trust(name)
        query = self.reading.net_sql(rows, found, takes_last=takes_last)
        ahead = self._ahead.taken(query)
        if ahead is not None and not add_up and rows.numbers_tell:
            self._begin_ahead()
            return self._trusted(name, ahead.all())
        if ahead is not None:
            stage_again(self._target, rows.table, ahead.all())
        else:
            self._rows_staged += stage_changes(self._source, self._target, rows.table, query, paired=True)
        self._begin_ahead()
        staged = Staged(paired=tells_pairs(rows.table))
        if takes_last:
            return self._trusted(name, [staged.counted(self._target)])
        fill_left_out(self.tables, rows.table)
        return [staged]

    def _trusted(self, name: str, parts: Iterable[Staged]) -> Iterator[Staged]:
        """Parts of a table's rows; RowsLackingError if the last image of a key is in doubt: all are added up then."""
        for part in parts:
            if part.doubtful:
                self.reading.doubt(name)
                raise RowsLackingError("has keys whose last image is not known")
            yield part

    def _stage_nothing(self, table: ReplicaTable) -> Sequence[Staged]:
        """Make the staging table of a table without changes."""
        make_stage(self._target, table)
        return IN_STAGE

    def _begin_others(
        self, batch: Batch, names: Sequence[str], changes: BatchChanges, following: Callable[[], Batch | None]
    ) -> None:
        """Have the tables after the one that is staged now begun by threads and workers."""
        self._stage_ahead(batch, names, changes, following)
        self._apply_beside(batch, names, changes)

    def _stage_ahead(
        self, batch: Batch, names: Sequence[str], changes: BatchChanges, following: Callable[[], Batch | None]
    ) -> None:
        """Have these tables staged, which come next, and then the first ones of the next batch."""
        if not self._has_many:
            return
        names = [name for name in names if name not in self._beside.tables]
        wanted, are_all = self._wanted(batch, names, changes)
        if are_all and changes.plain:
            if self._following is None:
                self._following = self._wanted_of(following)
            wanted += self._following
        self._ahead.begin(wanted)

    def _writing(self) -> AbstractContextManager[None]:
        """What the target needs while a batch is applied: many rows wait for its write-ahead log."""
        if not self._has_many:
            return nullcontext()
        return wal_writer_awake(conninfo_of(self._target), f"gdq:{self._state.queue}/{self._state.name}")

    @property
    def _has_many(self) -> bool:
        """True if the open batch seems to have many rows: as the one before, or by those that were staged."""
        return max(self._rows_before, self._rows_staged) >= _AHEAD_ROWS

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
            if (rows := self.reading.rows(batch, name, found.log_rows)) is not None:
                takes_last = self.reading.takes_last(name, rows)
                query = self.reading.net_sql(rows, found, takes_last=takes_last)
                wanted.append(Wanted(rows.table, query, in_parts=takes_last and takes_parts(rows.table)))
        return wanted, True
