"""The loop of a replica that a slot feeds: it copies the published tables, then applies the slot's transactions.

The position in the target decides whether a transaction was applied; the slot is confirmed after the target's commit,
and only keeps the log after it. A batch waits until the source shows its transactions to everybody. So a snapshot sees
all that the target has, and a copy at a snapshot misses nothing that will not come again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from gdq.call import scalar
from gdq.consumers.replica.batch_changes import CopyAgain
from gdq.consumers.replica.column_changes import SourceColumns
from gdq.consumers.replica.copy_workers import WORKERS, ShowProgress, no_progress
from gdq.consumers.replica.definition_follow import DefinitionFollower, OnDdl
from gdq.consumers.replica.foreign_keys import foreign_keys, joined_tables
from gdq.consumers.replica.origin import PassedOrigins, TakenOrigin, bear_origin, kept_tables, origin_of
from gdq.consumers.replica.policy import OnError, Policies
from gdq.consumers.replica.replica import AppliedBatch
from gdq.consumers.replica.sessions import check_databases, open_sessions, require_usage
from gdq.consumers.replica.slot.published import PublishedTable, current_snapshot, published_tables
from gdq.consumers.replica.slot.slot_apply import SlotApplier
from gdq.consumers.replica.slot.slot_copies import SlotCopies, written_lsn
from gdq.consumers.replica.slot.slot_definitions import SlotDefinitions
from gdq.consumers.replica.slot.slot_state import SlotReplicaState
from gdq.consumers.replica.table import OnTriggers, suppress_triggers
from gdq.consumers.replica.table_copy import CHUNK_ROWS, CopyOptions, refuse_copies
from gdq.consumers.replica.table_ddl import leave_table, rename_table
from gdq.consumers.replica.writing_side import refuse_source
from gdq.consumers.slot.batch import SlotBatch
from gdq.consumers.slot.replication import REPLICATION_WAIT_SECONDS, lsn_number, lsn_text
from gdq.consumers.slot.slot import check_primary, drop_slot, slot_name
from gdq.consumers.slot.source import SlotSource, lost_slot_error
from gdq.errors import GdqError
from gdq.qualified_sql import qualified

_LOOK_SECONDS = 0.01

# Copies of one table without a transaction applied in between: each ALTER TABLE that comes during a copy needs another.
_TRIES_MAX = 20

_SLOT = qualified("""
select s.confirmed_flush_lsn::text, coalesce(s.wal_status = 'lost', false),
       pg_catalog.to_jsonb(s) ->> 'invalidation_reason'
  from pg_catalog.pg_replication_slots s
 where s.slot_name = %s and s.plugin = 'pgoutput' and s.database = pg_catalog.current_database()""")
_STANDBYS = qualified("select pg_catalog.current_setting('synchronous_standby_names') <> ''")


class SlotReplica:
    """Keeps the tables of one target equal to the tables of a queue's publication, which have the same names there.

    `source`, `target`: connection strings, `source` of a role with REPLICATION; `name`: the replica's, and that in its
    slot's name. `tables`: only these published tables, as `schema.table`. `slot_wait`: seconds to wait for another
    reader to leave the slot. Otherwise as Replica.
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
        on_conflict: Sequence[str] = (),
        on_error: OnError = "stop",
        on_ddl: OnDdl = "keep",
        triggers: OnTriggers = "refuse",
        workers: int = WORKERS,
        chunk_rows: int = CHUNK_ROWS,
        slot_wait: float = REPLICATION_WAIT_SECONDS,
        tell: Callable[[str], None] = lambda _: None,
        show: ShowProgress = no_progress,
    ) -> None:
        self.queue = queue
        self.name = name
        self.slot = slot_name(queue, name)
        self._tables = tables
        self._options = CopyOptions(
            create=create, overwrite=overwrite, workers=workers, chunk_rows=chunk_rows, show=show
        )
        self._no_copy = no_copy
        self._asked = set(copy_again)
        self._wanted = set(copy_again)
        self._slot_wait = slot_wait
        self._tell = tell
        self._seen: dict[str, tuple[SourceColumns, int]] = {}
        policies = Policies.parse(on_conflict, on_error)
        with ExitStack() as stack:
            self.source, there = open_sessions(stack, source, target, f"gdq:{queue}/{name}")
            self.state = SlotReplicaState(there, queue, name, origin_of(self.source))
            bear_origin(there, self.state.source)
            self._target_origin = origin_of(there)
            passed = PassedOrigins(self._target_origin, origin)
            fires = suppress_triggers(there, triggers)
            self._applier = SlotApplier(self.source, self.state, policies, passed, fires=fires)
            feed = SlotDefinitions(self.source, self.state)
            self._definitions = DefinitionFollower(feed, on_ddl, tell, self._applier.forget_tables)
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
        """Copy what is to be copied, then apply transactions and yield the batches that held changes.

        `once`: up to what is committed now; else until `stop`, which is called between batches and while waiting. The
        `tick` of a batch is its LSN. ResyncRequired if the slot is lost.
        """
        self._begin()
        tries, stood = 0, -1
        while self._copy_missing(stop):
            try:
                yield from self._batches(once=once, stop=stop)
            except CopyAgain as again:
                tries, stood = (tries + 1 if self.state.lsn == stood else 0), self.state.lsn
                if tries == _TRIES_MAX:
                    raise GdqError(f"{', '.join(sorted(again.tables))} changed again after each copy") from again
                self._wanted |= again.tables
            else:
                return

    def drop(self) -> bool:
        """Drop the slot and delete what the target keeps of the replica; the tables stay. False if gone."""
        self.state.load()
        if self.state.position is None:
            return False
        self.state.check(self._system(), self.slot)
        drop_slot(self.source, self.queue, self.name)
        with self.state.connection.transaction():
            self.state.drop()
        return True

    def _begin(self) -> None:
        """Find the replica as it was left, or begin it where its slot begins."""
        check_primary(self.source, "a replica that a slot feeds")
        check_databases(self.source, self.state.connection)
        refuse_source(self.state.connection, self.queue, self.name)
        self.state.load()
        self.state.check(self._system(), self.slot)
        confirmed = self._confirmed()
        if self.state.position is None:
            self._refuse_reader()
            self.state.begin_at(confirmed)
        elif confirmed > self.state.lsn:
            # it was made anew or read by somebody else, or the target was restored
            self._tell(f"slot {self.slot} has no changes before {lsn_text(confirmed)}: all tables are copied again")
            self.state.begin_anew_at(confirmed)
        self.state.note_copies(written_lsn(self.source))
        # a copy that was interrupted goes on as it began
        self._no_copy = self._no_copy and not self.state.tables

    def _refuse_reader(self) -> None:
        """GdqError if a consumer or a view has read the slot."""
        for table in ("slot_position", "slot_view"):
            found = qualified("select pg_catalog.to_regclass(%s) is not null")
            read = qualified(f"select count(*) from gdq_target.{table} where slot_name = %s")
            if scalar(self.source, found, f"gdq_target.{table}") and scalar(self.source, read, self.slot):
                raise GdqError(
                    f"slot {self.slot} is read by a consumer or a view of this name",
                    hint="Give the replica another name, and make its slot with gdq create-slot.",
                )

    def _system(self) -> str:
        return str(scalar(self.source, "select system_identifier from pg_catalog.pg_control_system()"))

    def _confirmed(self) -> int:
        """The LSN from which on the slot has changes; GdqError if there is no slot, ResyncRequired if it is lost."""
        slot = self.source.execute(_SLOT, [self.slot]).fetchone()
        if slot is None:
            raise GdqError(
                f"there is no slot {self.slot}",
                hint=f"Make it with gdq create-slot {self.queue} {self.name} TABLES, without the tables if the queue "
                "has a slot already.",
            )
        if slot[1] or slot[0] is None:
            raise lost_slot_error(self.slot, slot[2])
        return lsn_number(slot[0])

    def _published(self) -> dict[str, PublishedTable]:
        """The published tables that the replica takes."""
        published = published_tables(self.source, self.queue, self._tables)
        if unknown := sorted(set(self._tables or ()) - published.keys()):
            raise GdqError(
                f"the publication of queue {self.queue} has no table {', '.join(unknown)}", hint="Write schema.table."
            )
        return published

    def _copy_missing(self, stop: Callable[[], bool]) -> bool:
        """Copy the tables that have no copy, or whose copy misses changes; False if a signal came before."""
        published = self._published()
        self._leave(published)
        self._applier.check_policies(set(published))
        if unknown := sorted(self._wanted - published.keys()):
            raise GdqError(f"the replica has no table {', '.join(unknown)}", hint="Write schema.table.")
        missing = sorted(self._wanted | self._stale(published))
        if missing and self._applier.tables.jointly:
            missing = self._joined(missing, published)
        self.state.two_ways = self._target_origin in kept_tables(self.source).sources
        refuse_copies(self.state, [name for name in missing if name in self.state.tables and name not in self._asked])
        self._applier.forget_tables()
        require_usage(self.source, self.state.connection, published)
        if missing and not self._settled(max(published[name].published for name in missing), stop):
            return False
        self._definitions.drop_gone()
        options = replace(self._options, copy=not self._no_copy)
        copies = SlotCopies(self.source, self.state, self._applier, options, self._tell)
        if missing and not copies.copy([published[name] for name in missing], stop):
            return False
        self._no_copy = False
        self._wanted.clear()
        self._asked.clear()
        self._altered_before(0, published)
        return True

    def _joined(self, missing: Sequence[str], published: Collection[str]) -> list[str]:
        """Tables, and those that foreign keys join with them: these fire, so all are copied at one snapshot."""
        groups = joined_tables(published, foreign_keys(self.state.connection, published))
        return sorted(name for group in groups if not set(group).isdisjoint(missing) for name in group)

    def _leave(self, published: dict[str, PublishedTable]) -> None:
        """Follow tables to their new names, leave those that the source has dropped, and that --tables leaves out.

        GdqError for one that is not published any more.
        """
        for name in sorted((self.state.tables.keys() | self.state.begun.keys()) - published.keys()):
            known = self.state.known(name)
            if known is None or known.relid is None or self._renamed(name, known.relid, published):
                continue
            if scalar(self.source, "select not exists (select from pg_class where oid = %s::oid)", known.relid):
                with self.state.connection.transaction():
                    leave_table(self.state, name, dropped=True, on_drop="keep", tell=self._tell)
                continue
            if self._tables is None:
                raise GdqError(
                    f"table {name} is no longer published for queue {self.queue}: its copy stands still",
                    hint="Publish it again, or have the replica leave it: name the others by --tables.",
                )
            self.state.forget(name)

    def _renamed(self, name: str, oid: int, published: dict[str, PublishedTable]) -> bool:
        """Give a table of the target the source's new name, if that is free there; False if there is none."""
        found = [now for now, table in published.items() if table.oid == oid and self.state.known(now) is None]
        if not found:
            return False
        with self.state.connection.transaction():
            rename_table(self.state, name, found[0])
        self._applier.forget_tables()
        if name in self.state.ends:
            self.state.ends[found[0]] = self.state.ends.pop(name)
        return True

    def _stale(self, published: dict[str, PublishedTable]) -> set[str]:
        """The tables that have no copy, or one that the slot does not bring up to date."""
        stored = self.state.tables
        return {
            name
            for name, table in published.items()
            if name not in stored or not (table.is_as(stored[name].columns) or table.shows_where(stored[name].columns))
        }

    def _settled(self, published: int, stop: Callable[[], bool]) -> bool:
        """Wait for the transactions that may have changed a table before it was published; False if a signal came.

        They are in no slot, so a copy must see them. So must the first copy those that wait for a standby: their
        commit may be in the log before the slot's beginning.
        """
        began = current_snapshot(self.source)
        if not self.state.tables and scalar(self.source, _STANDBYS):
            published = began.xmax
        waited_for = {xid for xid in began.running if xid < published}
        if waited_for:
            self._tell("waiting for transactions that began before the tables were published")
        while waited_for & current_snapshot(self.source).running:
            if stop():
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def _batches(self, *, once: bool, stop: Callable[[], bool]) -> Iterator[AppliedBatch]:
        self._definitions.look()
        try:
            reader = SlotSource(
                self.source,
                self.queue,
                self.name,
                wait_seconds=self._slot_wait,
                pause=partial(_pause, stop),
                position=self.state.lsn,
                passed=self._passed,
            )
        except GdqError:
            if stop():
                return  # a signal came while it waited for the slot
            raise
        with reader as opened, closing(opened.batches(once=once, stop=self._definitions.watched(stop))) as batches:
            for batch in batches:
                started = time.monotonic()
                if not self._is_seen(batch, stop):
                    return
                published = self._checked()
                altered = self._altered_before(batch.lsn, published)
                self._definitions.drop_gone()
                tables, applied = self._applier.apply(batch, published, altered)
                batch.commit()
                self._definitions.make_new()
                if not tables:
                    continue
                yield AppliedBatch(
                    self.name,
                    batch.lsn,
                    tables,
                    applied.inserted,
                    applied.updated,
                    applied.deleted,
                    applied.conflicts,
                    applied.dead_letters,
                    round(time.monotonic() - started, 3),
                )

    def _passed(self, lsn: int) -> None:
        """Store that the log up to an LSN has no changes; CopyAgain if a table was changed in a way no row shows."""
        published = self._checked()
        self._definitions.drop_gone()
        self._applier.pass_by(lsn, published, self._altered_before(lsn, published))
        self._definitions.make_new()

    def _checked(self) -> dict[str, PublishedTable]:
        """The published tables as they are by now; CopyAgain for those of which the slot does not send all."""
        published = self._published()
        self._leave(published)
        if stale := self._stale(published):
            raise CopyAgain(*stale)
        return published

    def _altered_before(self, lsn: int, published: dict[str, PublishedTable]) -> set[str]:
        """The tables that got other columns before an LSN, and have had none since: it is known when they were seen."""
        for name, table in published.items():
            seen = self._seen.get(name)
            if table.columns.columns == self.state.tables[name].columns.columns:
                self._seen.pop(name, None)
            elif seen is None or seen[0] != table.columns:
                self._seen[name] = table.columns, written_lsn(self.source)
        return {name for name, (_, since) in self._seen.items() if since <= lsn}

    def _is_seen(self, batch: SlotBatch, stop: Callable[[], bool]) -> bool:
        """Wait until new snapshots of the source see a batch's transactions; False if a signal came before.

        The server sends a commit as soon as it is in the log. It is not seen yet while it waits for a standby.
        """
        xids = {one.xid for one in batch.transactions if one.xid}
        while True:
            now = current_snapshot(self.source)
            if all(now.sees(now.full(xid)) for xid in xids):
                return True
            if stop():
                return False
            time.sleep(_LOOK_SECONDS)


def _pause(stop: Callable[[], bool], seconds: float) -> bool:
    """Sleep; True if a signal came."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not stop():
        time.sleep(min(_LOOK_SECONDS, seconds))
    return stop()
