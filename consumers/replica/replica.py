"""The loop of a replica: it copies tables, then applies batch after batch, each in one transaction of the target.

A batch's rows and the position after it commit together in the target; the consumer in the source is moved afterwards.
So the target's position decides whether a batch was applied, and the consumer only keeps the changes after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self

import psycopg

import gdq
from gdq.call import call, scalar
from gdq.consumer import ConsumerInfo, consumer_info, register_consumer, seek, unregister_consumer
from gdq.consumers.replica.batch_apply import BatchApplier
from gdq.consumers.replica.batch_changes import CopyAgain
from gdq.consumers.replica.batches import ReplicaConsumer
from gdq.consumers.replica.column_changes import VersionGoneError
from gdq.consumers.replica.copies import copy_tables
from gdq.consumers.replica.copy_workers import WORKERS, ShowProgress, no_progress
from gdq.consumers.replica.definition_follow import DefinitionFollower, OnDdl, QueueDefinitions
from gdq.consumers.replica.joined_copy import JoinedCopy
from gdq.consumers.replica.origin import (
    PassedOrigins,
    TakenOrigin,
    bear_origin,
    check_capture,
    kept_tables,
    origin_of,
)
from gdq.consumers.replica.pause import PauseWatch
from gdq.consumers.replica.policy import OnError, Policies
from gdq.consumers.replica.sessions import check_databases, open_sessions, require_usage
from gdq.consumers.replica.skip import SkipInfo, skip_changes
from gdq.consumers.replica.source_tables import CaptureOffError, NewTableWatch, require_capture, source_tables
from gdq.consumers.replica.state import SLOT, ReplicaState, check_replica
from gdq.consumers.replica.table import OnTriggers, suppress_triggers
from gdq.consumers.replica.table_copy import CHUNK_ROWS, CopyOptions, refuse_copies
from gdq.consumers.replica.table_ddl import OnDrop, leave_table
from gdq.consumers.replica.table_names import follow_names
from gdq.consumers.replica.writing_side import refuse_source
from gdq.errors import GdqError, ResyncRequired, TruncatedPosition
from gdq.queue import check_tables
from gdq.source import Position
from gdq.table_copy import resynced
from gdq.typed.batch_rows import may_read_logs


@dataclass(frozen=True, slots=True)
class AppliedBatch:
    """A batch that a replica has applied: the tick that the target is equal to since, and the rows changed there."""

    replica_name: str
    tick: int
    tables: int
    inserted: int
    updated: int
    deleted: int
    conflicts: int
    dead_letters: int
    seconds: float


class _LogDropped(Exception):  # noqa: N818 (a signal)
    """A log that this replica's copies have made needless was dropped before the batch was read whole."""


class _Misplaced(Exception):  # noqa: N818 (a signal)
    """The consumer stands elsewhere than the target."""


class Replica:
    """Keeps the tables of one target equal to captured tables of a queue, which have the same names there.

    `source`, `target`: connection strings; `name`: the replica's, and its consumer's. `tables`: captured tables, as
    `schema.table`, taken at the first start; None for all, also later ones. `create`: make tables that the target
    lacks. `overwrite`: replace rows that a target table has before its first copy. `no_copy`: at the first start
    the target has the rows already. `origin`: which changes are brought, see TakenOrigin. `copy_again`: tables
    whose copy is to be replaced. `on_drop`: what becomes of a table that the source drops. `on_conflict`: answers
    to conflicts, as Policies.parse() reads them; `on_error`: what is done about rows that the target refuses;
    `on_ddl`: what becomes of indexes, constraints, defaults and NOT NULL that change in the source. `triggers`: what is
    done about those that this role cannot keep from firing. `workers`: tables, or parts of large ones, copied at once;
    `chunk_rows`: the rows of such a part. `apply_workers`: tables whose changes are applied at once, each in a
    transaction. `tell` gets a line for each copy, and what `show` opens the rows so far.
    """

    def __init__(
        self,
        source: str | None,
        target: str,
        queue: str,
        name: str,
        *,
        tables: Sequence[str] | None = None,
        create: bool = False,
        overwrite: bool = False,
        no_copy: bool = False,
        origin: TakenOrigin = "any",
        copy_again: Sequence[str] = (),
        on_drop: OnDrop = "keep",
        on_conflict: Sequence[str] = (),
        on_error: OnError = "stop",
        on_ddl: OnDdl = "keep",
        triggers: OnTriggers = "refuse",
        workers: int = WORKERS,
        chunk_rows: int = CHUNK_ROWS,
        apply_workers: int = 1,
        tell: Callable[[str], None] = lambda _: None,
        show: ShowProgress = no_progress,
    ) -> None:
        self.queue = queue
        self.name = name
        self._tables = tables
        self._copies = CopyOptions(
            create=create, overwrite=overwrite, workers=workers, chunk_rows=chunk_rows, show=show
        )
        self._no_copy = no_copy
        self._registered_now = False
        self._on_drop = on_drop
        self._asked, self._wanted, self._missed = set(copy_again), set(copy_again), set[int]()
        self._tell = tell
        policies = Policies.parse(on_conflict, on_error)
        with ExitStack() as stack:
            self.source, there = open_sessions(stack, source, target, f"gdq:{queue}/{name}")
            self.state = ReplicaState(there, queue, name, origin_of(self.source))
            self._target_origin = origin_of(there)
            bear_origin(there, self.state.source)
            self._applier = BatchApplier(
                self.source,
                self.state,
                policies,
                PassedOrigins(self._target_origin, origin),
                fires=suppress_triggers(there, triggers),
                on_drop=on_drop,
                apply_workers=apply_workers,
                tell=tell,
            )
            feed = QueueDefinitions(self.source, self.state)
            self._definitions = DefinitionFollower(feed, on_ddl, tell, self._applier.reading.forget_tables)
            stack.callback(self._applier.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(
        self, *, once: bool = True, stop: Callable[[], bool] = lambda: False
    ) -> Generator[AppliedBatch, None, None]:
        """Copy what is to be copied, then apply batches and yield those that held changes.

        `once`: up to a tick that is taken now; else until `stop`, which is called between batches and while waiting.
        A replica that is paused waits and says so; `once` it is a GdqError. It also waits while capture of a table is
        off; `once` it is a CaptureOffError.
        """
        self._begin()
        pause = PauseWatch(self.source, self.queue, self.name, self._tell)
        while True:
            copied = self._copied(pause, once=once, stop=stop)
            if copied is None:
                return
            news = NewTableWatch(self.source, self.queue, self.name, self.state.names.keys())
            try:
                watched = self._definitions.watched(pause.watched(news.watched(stop)))
                yield from self._batches(once=once, stop=watched)
            except CopyAgain as again:
                self._wanted |= again.tables
            except _Misplaced:
                self._go_where_the_target_is()
            except _LogDropped:
                continue
            except ResyncRequired:
                # the consumer's resync names the tables, unless capture is off
                if not copied and not self._consumer().resync:
                    raise
            else:
                if not self._goes_on(pause, news, once=once, stop=stop):
                    return

    def _goes_on(self, pause: PauseWatch, news: NewTableWatch, *, once: bool, stop: Callable[[], bool]) -> bool:
        """Whether the loop goes on after its last batch, since tables have come; GdqError if a pause has ended it."""
        if once:
            pause.refuse()
        return news.found and not stop()

    def skip(self, tick: int) -> list[SkipInfo]:
        """Pass over the changes up to a tick, and note in the target what they were; no program may run the replica."""
        check_tables(self.source, self.queue)
        check_replica(self.state.connection, self.name)
        self._begin()
        skipped = skip_changes(self.source, self.state, tick)
        seek(self.source, self.queue, self.name, tick=tick)
        return skipped

    def drop(self) -> bool:
        """Unregister the consumer and delete what the target keeps of the replica; the tables stay. False if gone.

        A consumer of that name of which the target knows nothing is somebody else's, and stays.
        """
        self.state.load()
        if self.state.position is None:
            return False
        unregister_consumer(self.source, self.queue, self.name)
        with self.state.connection.transaction():
            self.state.drop()
        return True

    def _begin(self) -> None:
        """Find the replica as it was left, or register it."""
        if not may_read_logs(self.source):
            raise GdqError(
                "this role may not read the logs of changes", hint="Connect as the owner of gdq, or grant gdq_admin."
            )
        check_databases(self.source, self.state.connection)
        refuse_source(self.state.connection, self.queue, self.name)
        check_tables(self.source, self.queue)
        self.state.load()
        if self.state.position is not None and Position.parse(self.state.position).kind == SLOT:
            raise GdqError(f'replica "{self.name}" is fed by a slot, not by the queue', hint="Give --source slot.")
        registered = any(info.consumer_name == self.name for info in consumer_info(self.source, self.queue))
        if self.state.position is None or (not registered and not self.state.tables):
            self._register()
        elif not registered and self.state.read_from != self.state.source:
            raise GdqError(f'the target holds a replica "{self.name}" of another source', hint="Choose another name.")
        elif not registered:
            raise GdqError(
                f'the consumer "{self.name}" of queue {self.queue} is gone, and with it the changes after the copies',
                hint=f"gdq drop-replica {self.queue} {self.name}, then replicate anew with --overwrite.",
            )
        else:
            call(self.source, "check_position", self.queue, self.state.position)
            self.state.note_source()

    def _register(self) -> None:
        """Register the consumer; the target stores its position first, so that a consumer of others is recognised."""
        with self.source.transaction():
            if not register_consumer(self.source, self.queue, self.name, tables=self._tables):
                raise GdqError(
                    f'queue {self.queue} has a consumer "{self.name}", which is not this replica\'s',
                    hint="Choose another name for the replica, or unregister the consumer.",
                )
            self.state.begin(gdq.position(self.source, self.queue, self.name))
        self._registered_now = True

    def _consumer(self) -> ConsumerInfo:
        return next(info for info in consumer_info(self.source, self.queue) if info.consumer_name == self.name)

    def _copied(self, pause: PauseWatch, *, once: bool, stop: Callable[[], bool]) -> bool | None:
        """Call _copy_missing() when nothing is paused and capture is on; None if `stop` came before.

        `once`: GdqError while the replica is paused, CaptureOffError while capture is off.
        """
        while True:
            if once:
                pause.refuse()
            elif not pause.wait(stop):
                return None
            taken = source_tables(self.source, self.queue, self.name)
            try:
                copied = self._copy_missing(stop)
                return None if copied and stop() else copied
            except psycopg.errors.UndefinedTable:  # a table has got another name, or has gone
                if source_tables(self.source, self.queue, self.name) == taken:
                    raise
                self.state.load()  # other tables may have been copied meanwhile
            except CaptureOffError as error:
                if once:
                    raise
                if not pause.held(error, stop):
                    return None

    def _copy_missing(self, stop: Callable[[], bool]) -> bool:
        """Copy the tables that have no copy, or whose copy misses changes; True if there were any.

        After `stop` some may be left out.
        """
        consumer, taken = self._consumer(), source_tables(self.source, self.queue, self.name)
        self._applier.expect(consumer.unread_events or 0)
        there = {table.table_name: table for table in taken.values() if table.is_there}
        self._leave(self.state.names.keys() - taken.keys())
        self._leave(self.state.begun_names.keys() - {table.relid for table in there.values()})
        self._applier.check_policies(there.keys() | self.state.tables.keys())
        kept = kept_tables(self.source)
        check_capture(kept, self.queue, there.values())
        self.state.two_ways = self._target_origin in kept.sources
        self._hand_over()
        resync = set(consumer.resync or [])
        gone = [str(table.relid) for table in taken.values() if table.table_name in resync - there.keys()]
        for lost in [*gone, *([None] if "messages" in resync else [])]:
            now = scalar(self.source, "select pg_current_snapshot()::text")
            resynced(self.source, self.queue, self.name, lost, now)
        if unknown := sorted(self._wanted - there.keys()):
            raise GdqError(f"the replica has no table {', '.join(unknown)}", hint="Write schema.table.")
        asked = resync | self._wanted | {name for name, table in there.items() if table.relid in self._missed}
        missing = [there[name] for name in sorted(there) if name in asked or there[name].relid not in self.state.names]
        if not missing:
            return False
        require_capture(self.source, self.queue, [table.table_name for table in missing])
        require_usage(self.source, self.state.connection, there)
        follow_names(self.state, taken)
        copied_before = [self.state.names[table.relid] for table in missing if table.relid in self.state.names]
        refuse_copies(self.state, [table for table in copied_before if table not in self._asked])
        self._applier.reading.forget_tables()
        self._definitions.drop_gone()
        options = replace(self._copies, copy=not (self._no_copy and self._registered_now))
        if options.copy and self._applier.tables.jointly:
            joined = JoinedCopy(self.source, self.state, self._applier, self._tell)
            missing = joined.copy(there.values(), missing, overwrite=options.overwrite)
        describe = self._applier.reading.describe
        if not copy_tables(
            self.source, self.state, missing, describe, options, anew=self._asked, tell=self._tell, stop=stop
        ):
            return True
        self._registered_now = False
        self._wanted.clear()
        self._missed.clear()
        self._asked.clear()
        self._hand_over()
        return True

    def _leave(self, relids: set[int]) -> None:
        """Follow tables no longer that the consumer does not take any more."""
        for relid in relids:
            dropped = scalar(self.source, "select not exists (select from pg_class where oid = %s::oid)", relid)
            with self.state.connection.transaction():
                name = self.state.names.get(relid) or self.state.begun_names[relid]
                leave_table(self.state, name, dropped=dropped, on_drop=self._on_drop, tell=self._tell)

    def _hand_over(self) -> None:
        """Have the source give each table's changes from its copy's snapshot on; also where that was interrupted."""
        for table in [table for table in self.state.tables.values() if not table.handed_over]:
            if table.relid is None:
                continue
            try:
                resynced(self.source, self.queue, self.name, str(table.relid), table.snapshot)
            except ResyncRequired:  # capture missed changes after the copy
                self._missed.add(table.relid)  # by then it may have another name in the source
            else:
                self.state.handed_over(table.table_name)

    def _go_where_the_target_is(self) -> None:
        """Move the consumer to the target's position; TruncatedPosition if changes after it are gone.

        It stands elsewhere after somebody moved it, or after the target was restored.
        """
        seek(self.source, self.queue, self.name, tick=self.state.tick)
        for table in self.state.tables.values():
            if table.relid is None:
                continue
            try:
                resynced(self.source, self.queue, self.name, str(table.relid), table.snapshot)
            except TruncatedPosition:  # the position is past the copy
                continue

    def _batches(self, *, once: bool, stop: Callable[[], bool]) -> Iterator[AppliedBatch]:
        self._definitions.look()
        with (
            ReplicaConsumer(self.source, self.queue, self.name, self._applier.rest) as consumer,
            closing(consumer.batches(once=once, stop=stop)) as batches,
        ):
            for batch in batches:
                started = time.monotonic()
                tick = self.state.tick
                if batch.tick_to == tick:  # applied, but the consumer was not moved
                    continue
                if batch.tick_from != tick:
                    raise _Misplaced
                self._definitions.drop_gone()
                try:
                    tables, applied = self._applier.apply(batch, partial(consumer.following, batch))
                except (psycopg.errors.UndefinedTable, VersionGoneError) as error:
                    if isinstance(error, VersionGoneError) or "gdq_log." in str(error):
                        raise _LogDropped from error
                    raise
                batch.commit()
                self._definitions.make_new()
                if not tables:
                    continue
                yield AppliedBatch(
                    self.name,
                    batch.tick_to,
                    tables,
                    applied.inserted,
                    applied.updated,
                    applied.deleted,
                    applied.conflicts,
                    applied.dead_letters,
                    round(time.monotonic() - started, 3),
                )
