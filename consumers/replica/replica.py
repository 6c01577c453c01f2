"""The loop of a replica: it copies tables, then applies batch after batch, each in one transaction of the target.

A batch's rows and the position after it commit together in the target; the consumer in the source is moved afterwards.
So the target's position decides whether a batch was applied, and the consumer only keeps the changes after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import Connection
from psycopg.rows import namedtuple_row

import gdq
from gdq.batch import Batch
from gdq.call import call, scalar
from gdq.conninfo import connect, is_pooled
from gdq.consumer import Consumer, ConsumerInfo, consumer_info, register_consumer, seek, unregister_consumer
from gdq.consumers.replica.apply import Applier
from gdq.consumers.replica.changes import Applied
from gdq.consumers.replica.policy import Policies
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import ReplicaTable, describe_table
from gdq.consumers.replica.table_copy import apply_settings, copy_tables
from gdq.errors import GdqError, ResyncRequired, TruncatedPosition, mapped_errors
from gdq.queue import check_tables, table_info
from gdq.table_copy import resynced
from gdq.typed.batch_rows import may_read_logs

# A batch joins the changes of many ticks: a row that was changed several times is written once.
MAX_EVENTS = 200_000

# In the source: how a batch's rows are read. The planner overestimates what lies in a BRIN range.
_READING = "set local enable_seqscan = off; set local max_parallel_workers_per_gather = 0; set local work_mem = '64MB'"

# Events of the queue that rows do not show. An event without a number says that capture is off: the gap comes later.
_EVENTS = """
select distinct e.tbl from gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot) e
 where e.kind <> 'message' and e.ev_id is not null"""

_TABLE_EVENTS = """
select t.name, g.ev_id, g.kind, g.data
  from unnest(%s::text[]) t(name), gdq.batch_gaps(%s, %s, t.name::regclass) g order by g.ev_id"""

_SAME_DATABASE = """
select c.system_identifier::text, (select d.oid from pg_database d where d.datname = current_database())
  from pg_control_system() c"""


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
    seconds: float


class _CopyAgain(Exception):  # noqa: N818 (a signal)
    """These tables have to be copied before the batch can be applied."""

    def __init__(self, *tables: str) -> None:
        super().__init__(*tables)
        self.tables = set(tables)


class _Misplaced(Exception):  # noqa: N818 (a signal)
    """The consumer stands elsewhere than the target."""


class Replica:
    """Keeps the tables of one target equal to captured tables of a queue, which have the same names there.

    `source`, `target`: connection strings; `name`: the replica's, and its consumer's. `tables`: captured tables, as
    `schema.table`, taken at the first start; None for all, also later ones. `overwrite`: replace rows that a target
    table has before its first copy. `copy_again`: tables whose copy is to be replaced. `on_conflict`: answers to
    conflicts, as Policies.parse() reads them. `tell` gets a line for each copy.
    """

    def __init__(
        self,
        source: str | None,
        target: str,
        queue: str,
        name: str,
        *,
        tables: Sequence[str] | None = None,
        overwrite: bool = False,
        copy_again: Sequence[str] = (),
        on_conflict: Sequence[str] = (),
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.queue = queue
        self.name = name
        self._tables = tables
        self._overwrite = overwrite
        self._wanted = set(copy_again)
        self._tell = tell
        policies = Policies.parse(on_conflict)
        self._described: dict[str, ReplicaTable] = {}
        self._sequences_set = False
        with ExitStack() as stack:
            self.source = stack.enter_context(connect(source, application_name=f"gdq:{queue}/{name}", autocommit=True))
            there = stack.enter_context(connect(target, application_name=f"gdq:{queue}/{name}", autocommit=True))
            self.state = ReplicaState(there, queue, name)
            for connection in (self.source, there):
                if is_pooled(connection):
                    raise GdqError(
                        "a replica needs sessions of its own", hint="Connect to the servers, past the pooler."
                    )
                apply_settings(connection)
            self._may_suppress = _suppress_triggers(there)
            self._applier = Applier(name, self.source, there, policies)
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
        """
        self._begin()
        while True:
            copied = self._copy_missing()
            try:
                yield from self._batches(once=once, stop=stop)
            except _CopyAgain as again:
                self._wanted |= again.tables
            except _Misplaced:
                self._go_where_the_target_is()
            except ResyncRequired:
                # the consumer's resync names the tables, unless capture is off
                if not copied and not self._consumer().resync:
                    raise
            else:
                return

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
        if _identity(self.source) == _identity(self.state.connection):
            raise GdqError("source and target are the same database", hint="--to names the target.")
        check_tables(self.source, self.queue)
        self.state.load()
        registered = any(info.consumer_name == self.name for info in consumer_info(self.source, self.queue))
        if self.state.position is None or (not registered and not self.state.tables):
            self._register()
        elif not registered:
            raise GdqError(
                f'the consumer "{self.name}" of queue {self.queue} is gone, and with it the changes after the copies',
                hint=f"gdq drop-replica {self.queue} {self.name}, then replicate anew with --overwrite.",
            )
        else:
            call(self.source, "check_position", self.queue, self.state.position)

    def _register(self) -> None:
        """Register the consumer; the target stores its position first, so that a consumer of others is recognised."""
        with self.source.transaction():
            if not register_consumer(self.source, self.queue, self.name, tables=self._tables):
                raise GdqError(
                    f'queue {self.queue} has a consumer "{self.name}", which is not this replica\'s',
                    hint="Choose another name for the replica, or unregister the consumer.",
                )
            self.state.begin(gdq.position(self.source, self.queue, self.name))

    def _consumer(self) -> ConsumerInfo:
        return next(info for info in consumer_info(self.source, self.queue) if info.consumer_name == self.name)

    def _copy_missing(self) -> bool:
        """Copy the tables that have no copy, or whose copy misses changes; True if there were any."""
        consumer = self._consumer()
        captured = {info.table_name for info in table_info(self.source, self.queue)}
        taken = captured if consumer.tables is None else set(consumer.tables)
        for table in sorted(self.state.tables.keys() - taken):
            if consumer.tables is None:
                raise GdqError(
                    f"table {table} is no longer captured by queue {self.queue}: its copy stands still",
                    hint=f"Capture it again, or have the replica leave it: gdq set-tables {self.queue} {self.name} ...",
                )
            self.state.forget(table)
        self._applier.policies.check_tables(taken)
        self._hand_over()
        resync = set(consumer.resync or [])
        if "messages" in resync:
            resynced(self.source, self.queue, self.name, None, _snapshot(self.source))
        if unknown := sorted(self._wanted - taken):
            raise GdqError(f"the replica has no table {', '.join(unknown)}", hint="Write schema.table.")
        missing = sorted((taken - self.state.tables.keys()) | (resync & taken) | self._wanted)
        if not missing:
            return False
        self._described.clear()
        described = [self._describe(table) for table in missing]
        copy_tables(self.source, self.state, described, overwrite=self._overwrite, tell=self._tell)
        self._wanted.clear()
        self._hand_over()
        return True

    def _hand_over(self) -> None:
        """Have the source give each table's changes from its copy's snapshot on; also where that was interrupted."""
        for table in [table for table in self.state.tables.values() if not table.handed_over]:
            try:
                resynced(self.source, self.queue, self.name, table.table_name, table.snapshot)
            except ResyncRequired:  # capture missed changes after the copy
                self._wanted.add(table.table_name)
            else:
                self.state.handed_over(table.table_name)

    def _go_where_the_target_is(self) -> None:
        """Move the consumer to the target's position; TruncatedPosition if changes after it are gone.

        It stands elsewhere after somebody moved it, or after the target was restored.
        """
        seek(self.source, self.queue, self.name, tick=self.state.tick)
        for table in self.state.tables.values():
            try:
                resynced(self.source, self.queue, self.name, table.table_name, table.snapshot)
            except TruncatedPosition:  # the position is past the copy
                continue

    def _batches(self, *, once: bool, stop: Callable[[], bool]) -> Iterator[AppliedBatch]:
        with (
            Consumer(self.source, self.queue, self.name, max_events=MAX_EVENTS) as consumer,
            closing(consumer.batches(once=once, stop=stop)) as batches,
        ):
            for batch in batches:
                started = time.monotonic()
                tick = self.state.tick
                if batch.tick_to == tick:  # applied, but the consumer was not moved
                    continue
                if batch.tick_from != tick:
                    raise _Misplaced
                tables, applied = self._apply(batch)
                batch.commit()
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
                    round(time.monotonic() - started, 3),
                )

    def _apply(self, batch: Batch) -> tuple[int, Applied]:
        """Apply a batch and move the target's position, in one transaction; the numbers of tables and of rows."""
        self.source.execute(_READING)
        truncated = self._truncated(batch)
        changed = sorted({*batch.tables(), *truncated})
        if unknown := [table for table in changed if table not in self.state.tables]:
            raise _CopyAgain(*unknown)
        found = [self._changes(batch, table) for table in changed]
        changes = [(table, select) for table, select in found if select is not None or table.name in truncated]
        position = str(batch.position)
        applied = Applied()
        target = self.state.connection
        with target.transaction():
            self.state.hold()
            target.execute("set local default_statistics_target = 10")
            for table, log_rows in changes:
                applied += self._applier.apply(table, log_rows, truncated.get(table.name), batch.tick_to)
            self._set_sequences(batch)
            self.state.move(position)
        self.state.position = position
        return len(changes), applied

    def _changes(self, batch: Batch, name: str) -> tuple[ReplicaTable, str | None]:
        """A table and the SELECT of its log rows, None without any; _CopyAgain if its columns have changed since."""
        table = self._describe(name)
        versions = batch.versions(name)
        if any(version.id != table.version for version in versions):
            raise _CopyAgain(name)
        if not versions:
            return table, None
        with mapped_errors():
            return table, scalar(self.source, "select gdq.batch_sql(%s, %s, %s::regclass)", batch.id, batch.token, name)

    def _truncated(self, batch: Batch) -> dict[str, int]:
        """The tables that were truncated in a batch, with the number of the last TRUNCATE.

        _CopyAgain for tables with changes that no row shows: gaps of capture, DDL, TRUNCATE of a partition.
        """
        values = [self.queue, batch.snapshot_from, batch.snapshot_to]
        with mapped_errors(), self.source.cursor(row_factory=namedtuple_row) as cursor:
            named = {table for (table,) in cursor.execute(_EVENTS, values, prepare=True)}
            if not named:
                return {}
            captured = {info.table_name for info in table_info(self.source, self.queue)}
            # an event may have an older name of its table
            looked_at = named if named <= captured else set(self.state.tables)
            looked_at &= self.state.tables.keys()
            if gone := sorted(looked_at - captured):
                raise GdqError(f"table {', '.join(gone)} is no longer captured by queue {self.queue}")
            events: list[Any] = cursor.execute(_TABLE_EVENTS, [sorted(looked_at), batch.id, batch.token]).fetchall()
        found: dict[str, int] = {}
        stale = set()
        for event in events:
            if event.kind == "truncate" and "partition" not in (event.data or {}):
                found[event.name] = event.ev_id
            # a new name or an empty new partition does not concern the rows
            elif event.kind != "ddl" or event.data.keys() & {"new_version", "dropped"}:
                stale.add(event.name)
        if stale:
            raise _CopyAgain(*stale)
        return found

    def _describe(self, name: str) -> ReplicaTable:
        if name not in self._described:
            self._described[name] = describe_table(
                self.source, self.state.connection, self.queue, name, may_suppress=self._may_suppress
            )
            self._applier.answers(self._described[name])
        return self._described[name]

    def _set_sequences(self, batch: Batch) -> None:
        """Bring the target's sequences to their values at the batch's end: at first all, then those that changed."""
        for value in batch.sequences(changed=self._sequences_set):
            if value.last_value is None:
                continue
            try:
                self.state.connection.execute(
                    "select setval(%s::regclass, %s, %s)", [value.sequence_name, value.last_value, value.is_called]
                )
            except psycopg.errors.UndefinedTable:
                raise GdqError(
                    f"the target has no sequence {value.sequence_name}",
                    hint=f"Create it there, or leave it out: gdq remove-sequence {self.queue} {value.sequence_name}",
                ) from None
        self._sequences_set = True


def _suppress_triggers(target: Connection[Any]) -> bool:
    """Keep the target's triggers and foreign keys from firing in this session; False if the role may not."""
    try:
        target.execute("set session_replication_role = replica")
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


def _identity(connection: Connection[Any]) -> Any:
    """What no two databases share: the server's identifier and the database's number."""
    return connection.execute(_SAME_DATABASE).fetchone()


def _snapshot(source: Connection[Any]) -> str:
    return str(scalar(source, "select pg_current_snapshot()::text"))
