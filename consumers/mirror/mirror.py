"""`gdq mirror`: captured tables kept equal as lake tables: copied at a snapshot, then their changes applied.

A table's commit in the lake moves the table's own position, so that a mirror that is killed goes on from where each
table is: its changes are read between that position and the end of the consumer's batch. The consumer moves when all
tables of a batch are committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

import psycopg

from gdq.batch import Batch
from gdq.call import scalar
from gdq.conninfo import connect
from gdq.consumer import Consumer, ConsumerInfo, consumer_info, register_consumer, set_tables
from gdq.consumers.lake.open import import_ahead, open_lake
from gdq.consumers.lake.readers import LakeReaders
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.mirror.batch_changes import CopyAgain, TableLog
from gdq.consumers.mirror.batch_reader import BatchReader, KeptTable
from gdq.consumers.mirror.choice import TableChoice, mirror_kind, mirror_target, table_lake_name
from gdq.consumers.mirror.chunked_load import Stopped
from gdq.consumers.mirror.copies import Copies, TableCopy
from gdq.consumers.mirror.current import CurrentRows
from gdq.consumers.mirror.evolution import ColumnPolicy, bring_in_line, make_ready
from gdq.consumers.mirror.feed import ChangeFeed
from gdq.consumers.mirror.load_folder import LoadFolders
from gdq.consumers.mirror.row_versions import RowVersions
from gdq.consumers.mirror.state import History, MirrorState, mirror_mark
from gdq.consumers.mirror.table import CopyTarget, LakeMove, MirrorTable, TooManyChanges, describe_table, history_of
from gdq.consumers.replica.pause import PauseWatch
from gdq.consumers.replica.sessions import apply_settings
from gdq.consumers.replica.source_tables import (
    CaptureOffError,
    NewTableWatch,
    SourceTable,
    require_capture,
    source_tables,
)
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition, TargetState
from gdq.errors import GdqError, ResyncRequired, TruncatedPosition
from gdq.extra import extra_named
from gdq.queue import table_info
from gdq.table_copy import resynced
from gdq.typed.batch_rows import may_read_logs

if TYPE_CHECKING:
    from gdq.consumers.mirror.spark_tables import SparkTables

# A commit costs the lake a file for each table: a batch joins the changes of many ticks.
MAX_EVENTS = 500_000
_PAUSE_SECONDS = 1.0
# Old versions of a lake table are removed after its first commit, then after so many further ones.
_EXPIRY_COMMITS = 50
# How old a version gets, in seconds, by the kind of the target.
_KEEP: dict[str, float] = {"parquet": 3600, "delta": 7 * 86_400, "iceberg": 7 * 86_400}

_Form = CurrentRows | ChangeFeed | RowVersions
_FORMS: dict[History | None, Callable[[str], _Form]] = {None: CurrentRows, "feed": ChangeFeed, "scd2": RowVersions}


@dataclass(frozen=True, slots=True)
class MirroredBatch:
    """One batch of a mirror that changed lake tables: how many tables, and rows deleted plus rows inserted."""

    mirror_name: str
    tick: int
    tables: int
    rows: int
    seconds: float


class Mirror:
    """Keeps the captured tables of a queue that `words` choose as lake tables of `target`; close it by `with`.

    `source`: the connection string of the database with gdq. `name`: of the mirror and its consumer. `target`:
    "delta:/folder", "iceberg:/folder", "iceberg:CATALOG" or "parquet:/folder", for Delta and Parquet also a URI as
    s3://bucket/folder; each table is schema.table in it.
    `words`: tables, `schema.table`, and schemas, whose later tables are mirrored too. `history`:
    what each lake table is, instead of the table as it is: "feed", its change feed, or "scd2", the
    versions of its rows. `columns`: the policy for columns that change, as words like "dropped=keep".
    `spark`: have Spark copy large tables and apply their changes.
    `keep`: how old versions of lake tables get; None: an hour for Parquet, else a week.
    `tell` gets a line for each copy.
    """

    def __init__(
        self,
        source: str | None,
        queue: str,
        name: str,
        target: str,
        words: Sequence[str],
        *,
        history: History | None = None,
        columns: Sequence[str] = (),
        keep: timedelta | None = None,
        spark: bool = False,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.queue = queue
        self.name = name
        self.target = mirror_target(target)
        self._tell = tell
        self._form = _FORMS[history](queue)
        self._keep = _KEEP[self.target.partition(":")[0]] if keep is None else keep.total_seconds()
        self._policy = ColumnPolicy.parse(columns, history)
        self._again: set[str] = set()
        self._kept: dict[int, KeptTable] = {}
        import_ahead(mirror_kind(self.target))
        with ExitStack() as stack:
            self.source = stack.enter_context(connect(source, application_name=f"gdq:{queue}/{name}", autocommit=True))
            apply_settings(self.source)
            self._choice = TableChoice.parse(self.source, words)
            self._mark = mirror_mark(self.source, queue, name)
            self._state = MirrorState(self.source, queue, name)
            self._reader = BatchReader(self.source, queue, name, self._state, tell)
            self._spark = self._started(stack, source) if spark else None
            self._loads, self._loads_left = LoadFolders(self.target, self._mark), True
            self._readers = stack.enter_context(LakeReaders(self.source))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(
        self, *, once: bool = True, stop: Callable[[], bool] = lambda: False
    ) -> Generator[MirroredBatch, None, None]:
        """Copy what is to be copied, then apply batches and yield those that changed lake tables.

        `once`: up to a tick that is taken now; else until `stop`, which is called between batches and while waiting.
        A mirror that is paused waits and says so; `once` it is a GdqError.
        """
        self._begin()
        pause = PauseWatch(self.source, self.queue, self.name, self._tell, "mirror")
        goes_on = True
        while goes_on:
            if once:
                pause.refuse()
            elif not pause.wait(stop):
                return
            taken = source_tables(self.source, self.queue, self.name)
            news = NewTableWatch(self.source, self.queue, self.name, [r for r in taken if taken[r].is_there])
            try:
                if not self._copy_missing(taken, stop):
                    return
                yield from self._batches(once=once, stop=pause.watched(news.watched(stop)))
                if once:
                    pause.refuse()  # it may have ended the batches
            except CopyAgain as again:
                self._again |= again.tables
            except (ResyncRequired, CaptureOffError, psycopg.errors.UndefinedTable) as error:
                if not self._waits_for(error, taken, once=once):
                    raise
                goes_on = not stop()
            else:
                goes_on = not stop() and (news.found or not once)

    def _started(self, stack: ExitStack, given: str | None) -> SparkTables:
        kind = mirror_kind(self.target)
        if kind == "parquet" and "://" in self.target:
            raise GdqError(
                "Spark mirrors tables as Parquet into folders alone, not into an object store",
                hint="Leave out --engine spark, or choose delta: or iceberg:.",
            )
        with extra_named():
            from gdq.consumers.mirror.spark_tables import SparkTables  # noqa: PLC0415 (half a gigabyte of package)

        spark = SparkTables(self.source, given, self.queue, f"mirror {self.name}", kind, self._form.history)
        stack.callback(spark.close)
        return spark

    def _waits_for(self, error: Exception, taken: dict[int, SourceTable], *, once: bool) -> bool:
        """True if another attempt will do after an error, which it may be too early for."""
        if isinstance(error, ResyncRequired):
            return bool(self._consumer().resync)
        if isinstance(error, CaptureOffError):
            time.sleep(0 if once else _PAUSE_SECONDS)
            return not once
        # a table or its log has gone since it was listed
        return "gdq_log." in str(error) or source_tables(self.source, self.queue, self.name) != taken

    def _begin(self) -> None:
        """Find the mirror as it was left, or make it, with its consumer."""
        if not may_read_logs(self.source):
            raise GdqError(
                "this role may not read the logs of changes", hint="Connect as the owner of gdq, or grant gdq_admin."
            )
        known = self._state.load()
        if known and self._state.target != self.target:
            raise GdqError(
                f'mirror "{self.name}" writes to {self._state.target}, not to {self.target}',
                hint="Give another --name, or drop the mirror first: gdq drop-mirror.",
            )
        if known and self._state.history != self._form.history:
            kept = f"history {self._state.history}" if self._state.history else "the tables as they are"
            raise GdqError(f'mirror "{self.name}" keeps {kept}', hint="Give another --target and --name.")
        if not known:
            self._reach_target()
        with self.source.transaction():
            if register_consumer(self.source, self.queue, self.name, tables=self._choice.consumed):
                self._state.begin(self.target, self._form.history)
                return
        if not known:
            raise GdqError(
                f'queue {self.queue} has a consumer "{self.name}", which is not this mirror\'s',
                hint="Give the mirror another --name.",
            )
        set_tables(self.source, self.queue, self.name, self._choice.consumed)

    def _reach_target(self) -> None:
        """GdqError if the target cannot be reached: then no consumer holds the log for a mirror that was mistyped."""
        for table in table_info(self.source, self.queue):
            if self._choice.has(table.table_name):
                self._lake(table.table_name).state()
                return

    def _lake(self, table: str) -> LakeTable:
        return open_lake(table_lake_name(self.target, table), f"mirror {self.name}", self._mark)

    def _consumer(self) -> ConsumerInfo:
        return next(info for info in consumer_info(self.source, self.queue) if info.consumer_name == self.name)

    def _copy_missing(self, taken: dict[int, SourceTable], stop: Callable[[], bool]) -> bool:
        """Copy the tables whose lake table is missing, of other columns, or cannot catch up; False if `stop` came."""
        there = {
            table.relid: table for table in taken.values() if table.is_there and self._choice.has(table.table_name)
        }
        names = {table.table_name for table in there.values()}
        resync = set(self._consumer().resync or [])
        self._pass_over(resync - names, taken)
        for relid in self._kept.keys() - there.keys():
            self._tell(f"{self._kept.pop(relid).table.name} is not captured any more: its lake table stays as it is")
        self._again |= resync & names
        for table in sorted(there.values(), key=lambda one: one.table_name):
            if stop():
                return False
            kept = self._kept.get(table.relid)
            if kept is not None and kept.table.captured == table and table.table_name not in self._again:
                continue
            try:
                self._kept[table.relid] = self._opened(table, stop)
            except Stopped:
                return False
            except (GdqError, psycopg.errors.UndefinedObject):
                if not self._state.load():  # the mirror was dropped meanwhile
                    self._loads.remove_all()
                raise
            self._again.discard(table.table_name)
        self._readers.close()
        if self._loads_left:
            # also those of tables that were dropped, renamed or made small in the midst of their load
            self._loads.remove_all()
            self._loads_left = False
        return True

    def _pass_over(self, tables: set[str], taken: dict[int, SourceTable]) -> None:
        """Say that what is not mirrored needs no copy: other tables of the queue, messages."""
        relids = [table.relid for table in taken.values() if table.table_name in tables]
        for lost in [*map(str, relids), *([None] if "messages" in tables else [])]:
            now = scalar(self.source, "select pg_catalog.pg_current_snapshot()::text")
            resynced(self.source, self.queue, self.name, lost, now)

    def _opened(self, captured: SourceTable, stop: Callable[[], bool]) -> KeptTable:
        """A table with its lake table, which is copied unless it can go on from where it stands."""
        name = captured.table_name
        place = table_lake_name(self.target, name)
        lake = self._lake(name)
        state = lake.state()
        if self._spark is not None:
            lake.sweep()
        table, stored = self._described(captured), state.stored
        if stored is not None and stored.plan and table.history != history_of(stored.plan):
            form = f"as history {found}" if (found := history_of(stored.plan)) else "as it is"
            raise GdqError(f"{place} holds the table {form}", hint="Give another --target and --name.")
        if state.foreign is not None:
            self._tell(f"{name}: {state.foreign}, which is not the mirror's: copied again")
        elif stored is not None and name not in self._again and stored.position:
            try:
                ready = bring_in_line(table, lake, stored, self._form.own, self._policy)
            except Diverged:  # somebody else has changed it meanwhile
                state, ready = lake.state(), None
            if ready is not None:
                if ready[1] != stored:
                    self._tell(f"{name}: has other columns, which its lake table has got")
                return KeptTable(ready[0], lake, ready[1])
        return self._copied(captured, lake, state, stop)

    def _described(self, captured: SourceTable) -> MirrorTable:
        kind = table_lake_name(self.target, captured.table_name).kind
        table = describe_table(self.source, self.queue, captured, kind, history=self._form.history)
        self._form.check(table)
        return table

    def _copied(
        self, captured: SourceTable, lake: LakeTable, state: TargetState, stop: Callable[[], bool]
    ) -> KeptTable:
        """Copy a table as one snapshot has it, and have the consumer go on from there; Stopped if `stop` comes."""
        started, name = time.monotonic(), captured.table_name
        require_capture(self.source, self.queue, [name])
        place = table_lake_name(self.target, name)
        by_spark = self._spark is not None and self._spark.takes(captured)
        folder = None if by_spark else self._loads.of(place, lake)
        copies = Copies(self.source, self.queue, self.name, self._described, folder, self._readers, self._tell)
        self._loads_left = True
        with copies.rows(captured, lake, stop) as copy:
            table, stored = make_ready(copy.table, lake, state, self._form.own, self._policy)
            new = StoredPosition(self._mark, str(place), table.plan, copy.position)
            if not by_spark or not self._copied_by_spark(table, copy, LakeMove(place, lake, stored, new)):
                change = self._form.copied(table, CopyTarget(lake, copy.position, stored), copy.rows)
                lake.commit(change, stored, new)
        try:
            resynced(self.source, self.queue, self.name, str(captured.relid), copy.snapshot)
        except (ResyncRequired, TruncatedPosition):
            # capture missed changes after the copy, or somebody moved the consumer
            raise CopyAgain(name) from None
        self._tell(f"{name}: copied in {time.monotonic() - started:.1f} s")
        return KeptTable(table, lake, new)

    def _batches(self, *, once: bool, stop: Callable[[], bool]) -> Iterator[MirroredBatch]:
        with (
            Consumer(self.source, self.queue, self.name, max_events=MAX_EVENTS) as consumer,
            closing(consumer.batches(once=once, stop=stop)) as batches,
        ):
            for batch in batches:
                started = time.monotonic()
                tables, rows = self._apply(batch)
                self._state.note(batch.tick_to, {kept.table.name: kept.stored.position for kept in self._kept.values()})
                batch.commit()
                if tables:
                    seconds = round(time.monotonic() - started, 3)
                    yield MirroredBatch(self.name, batch.tick_to, tables, rows, seconds)

    def _apply(self, batch: Batch) -> tuple[int, int]:
        """Bring each table to the end of a batch; returns the tables that changed, and the rows."""
        position, tables, rows = str(batch.position), 0, 0
        for kept, log in self._reader.changed(batch, self._kept):
            try:
                new = StoredPosition(self._mark, kept.stored.target, kept.table.plan, position)
                changed = self._changed(kept, log, new)
                if changed is None:
                    continue
                rows += changed
            except TooManyChanges:
                raise CopyAgain(kept.table.name) from None
            except Diverged as error:
                self._tell(f"{kept.table.name}: {error}: it is copied again")
                raise CopyAgain(kept.table.name) from None
            kept.stored = new
            if kept.commits % _EXPIRY_COMMITS == 0:
                kept.lake.expire(self._keep)
            kept.commits += 1
            tables += 1
        return tables, rows

    def _changed(self, kept: KeptTable, log: TableLog, new: StoredPosition) -> int | None:
        """Commit what a log has of a table; the rows deleted and inserted, None if there was nothing to commit."""
        if self._spark is not None and self._spark.takes(kept.table.captured):
            move = LakeMove(table_lake_name(self.target, kept.table.name), kept.lake, kept.stored, new)
            try:
                done = self._spark.apply(kept.table, log, move)
            except GdqError:
                self._reader.check_captured(self._kept)  # a table that has gone or is another one
                raise
            if done is not None:
                return done
        change = self._form.changed(kept.table, kept.lake, self.source, log)
        return None if change is None else kept.lake.commit(change, kept.stored, new)

    def _copied_by_spark(self, table: MirrorTable, copy: TableCopy, move: LakeMove) -> bool:
        assert self._spark is not None
        try:
            return self._spark.copy(table, copy, move)
        except Diverged:  # others have changed it meanwhile
            raise CopyAgain(table.name) from None
