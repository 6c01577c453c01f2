"""A slot's transactions brought to the target: all their changes, and the position after them, in one transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from psycopg import Connection

from gdq.consumers.replica.batch_changes import CopyAgain
from gdq.consumers.replica.changes import IN_STAGE, Applied, Staged, make_stage
from gdq.consumers.replica.column_changes import change_columns
from gdq.consumers.replica.dead_letters import DeadLetters
from gdq.consumers.replica.joint_apply import table_applier
from gdq.consumers.replica.origin import PassedOrigins
from gdq.consumers.replica.policy import Policies
from gdq.consumers.replica.sequences import PresentSequences, set_sequences
from gdq.consumers.replica.slot.images import SlotImages
from gdq.consumers.replica.slot.published import PublishedTable, sent_columns
from gdq.consumers.replica.slot.slot_state import SlotReplicaState
from gdq.consumers.replica.table import Fires, ReplicaTable, SourceColumn, match_target
from gdq.consumers.slot.batch import SlotBatch
from gdq.consumers.slot.catalog import CatalogTable, SlotCatalog
from gdq.consumers.slot.pgoutput import RelationMessage, RowMessage, TruncateMessage
from gdq.consumers.slot.transaction import SlotTransaction
from gdq.errors import GdqError


@dataclass(slots=True)
class _TableChanges:
    """What a batch has of a table after its last TRUNCATE, if any; a description of it follows the other."""

    truncated: bool = False
    described: list[SlotImages] = field(default_factory=list)

    def truncate(self) -> None:
        self.truncated = True
        self.close()
        self.described.clear()

    def close(self) -> None:
        for images in self.described:
            images.close()


class SlotApplier:
    """Applies a slot's batches to a target in whose session some triggers fire: if any, all tables change at once.

    `passed`: origins whose changes are passed over.
    """

    def __init__(
        self,
        source: Connection[Any],
        state: SlotReplicaState,
        policies: Policies,
        passed: PassedOrigins,
        *,
        fires: Fires,
    ) -> None:
        self._source = source
        self._target = state.connection
        self._state = state
        self._fires = fires
        self._passed = passed
        self._sequences = PresentSequences(source, state.queue)
        self._letters = DeadLetters(self._target, state.name)
        self.tables = table_applier(state, policies, self._letters, fires)
        self._catalog = SlotCatalog(source)
        self._described: dict[CatalogTable, ReplicaTable] = {}

    def apply(
        self, batch: SlotBatch, published: dict[str, PublishedTable], altered: Collection[str]
    ) -> tuple[int, Applied]:
        """Apply a batch and move the target's position; the numbers of tables and of rows.

        `published`: the tables as the source has them by now; `altered`: those whose columns have been so since before
        the batch's end. CopyAgain for those whose rows do not tell all.
        """
        self._set_sequences()
        with self._changes(batch, published) as changes:
            applied = Applied()
            with self._state.moving(batch.lsn):
                self.tables.begin()
                self._target.execute("set local default_statistics_target = 10")
                self._empty([name for name, found in changes.items() if found.truncated])
                for name, found in sorted(changes.items()):
                    for images in found.described:
                        if sent_columns(images.table.relation) == published[name].columns.mark["sent"]:
                            applied += self._change_columns(published[name])
                        applied += self._apply_table(images, batch.lsn)
                    if name in self.tables.cleared:
                        applied += self._clear(published[name], batch.lsn)
                applied += self.tables.finish()
                self._note(published, altered)
            return len(changes), applied

    def pass_by(self, lsn: int, published: dict[str, PublishedTable], altered: Collection[str]) -> None:
        """Move the target's position behind log without changes."""
        self._set_sequences()
        with self._state.moving(lsn):
            self._note(published, altered)

    def describe(
        self, table: PublishedTable, source: Connection[Any] | None = None, target: Connection[Any] | None = None
    ) -> ReplicaTable:
        """A published table as the source has it, and as the target has it; GdqError if it cannot be kept equal.

        `source`, `target`: other sessions, which have locked it, or see what they have not committed. Any thread may
        call it with sessions of its own.
        """
        there = target or self._target
        self._refuse_generated(table, there)
        described = self._match(SlotCatalog(source or self._source).describe(table.relation), there)
        self.tables.answers(described)
        return described

    @staticmethod
    def key(table: PublishedTable, source: Connection[Any]) -> Sequence[str]:
        """The columns by which rows of a published table are found; none if it has no key."""
        return SlotCatalog(source).describe(table.relation).key

    def check_policies(self, tables: set[str]) -> None:
        """GdqError if an answer to conflicts names a table that the replica does not take."""
        self.tables.policies.check_tables(tables)

    def forget_tables(self) -> None:
        """Look at the tables anew when they are needed next."""
        self._described.clear()
        self._letters.look_anew()

    @contextmanager
    def _changes(self, batch: SlotBatch, published: dict[str, PublishedTable]) -> Iterator[dict[str, _TableChanges]]:
        """What a batch has of each table, without what its copy has; CopyAgain if a table was described otherwise."""
        names = {table.oid: name for name, table in published.items()}
        found: dict[str, _TableChanges] = {}
        with ExitStack() as stack:
            for one in batch.transactions:
                taken = names
                if self._state.ends:
                    taken = {oid: name for oid, name in names.items() if not self._state.has_copied(name, one.xid)}
                passes = self._passed.has(one.origin)
                for name, message, relation in _changes_of(one, taken):
                    if passes:
                        _pass_over(found.get(name), message, relation)
                        continue
                    if name not in found:
                        found[name] = _TableChanges()
                        stack.callback(found[name].close)
                    if relation is None or not isinstance(message, RowMessage):
                        found[name].truncate()
                        continue
                    described = found[name].described
                    if not described or described[-1].table.relation != relation:
                        described.append(self._images(relation, published[name]))
                    described[-1].add(message)
            yield found

    def _set_sequences(self) -> None:
        """Set sequences of the target to what they are in the source: no transaction of the log is ahead of that."""
        values = self._sequences.changed()
        set_sequences(self._target, self._state.queue, values)
        self._sequences.were_set(values)

    def _note(self, published: dict[str, PublishedTable], altered: Collection[str]) -> None:
        """Bring columns in line that changed without a row, and store what else of the tables has."""
        for name, table in published.items():
            stored = self._state.tables[name].columns
            if name in altered:
                self._change_columns(table)
            elif stored != table.columns and table.is_as(stored):
                self._state.altered(name, table.columns)

    def _empty(self, names: Sequence[str]) -> None:
        """Delete all rows of tables that were truncated in the source."""
        self.tables.empty(names)
        for name in names:
            self._letters.forget(name)

    def _clear(self, published: PublishedTable, lsn: int) -> Applied:
        """Delete the rows of a table without other changes, if the server has refused TRUNCATE."""
        table = self.describe(published)

        def stage() -> Sequence[Staged]:
            make_stage(self._target, table)
            return IN_STAGE

        return self.tables.apply(table, stage, lsn)

    def _change_columns(self, table: PublishedTable) -> Applied:
        """Bring a target table's columns in line with the source's, unless they are; what was to be applied before."""
        applied = Applied()
        stored = self._state.tables[table.name].columns
        if stored.columns != table.columns.columns:
            applied = self.tables.finish()
            change_columns(self._source, self._target, table.name, stored, table.columns, relid=table.oid)
            self._state.altered(table.name, table.columns)
            self._letters.rename_columns(table.name, stored, table.columns)
            self._described.clear()
        return applied

    def _images(self, relation: RelationMessage, now: PublishedTable) -> SlotImages:
        stored = self._state.tables[now.name].columns
        if sent_columns(relation) not in (now.columns.mark["sent"], stored.mark["sent"]):
            raise CopyAgain(now.name)
        self._catalog.forget(relation)
        return SlotImages(self._catalog.describe(relation))

    def _apply_table(self, images: SlotImages, lsn: int) -> Applied:
        table = self._describe(images.table)
        answer = self.tables.answers(table)["update_missing"]
        inserts = answer.action in ("apply", "newest") or self.tables.policies.on_error == "dead-letter"

        def stage() -> Sequence[Staged]:
            images.stage(self._target, table, whole=self.tables.needs_whole(table), inserts_missing=inserts)
            return IN_STAGE

        return self.tables.apply(table, stage, lsn)

    def _describe(self, table: CatalogTable) -> ReplicaTable:
        if table not in self._described:
            self._described[table] = self._match(table, self._target)
        return self._described[table]

    def _match(self, table: CatalogTable, target: Connection[Any]) -> ReplicaTable:
        columns = [
            SourceColumn(column.name, stage, column.name in table.key)
            for column, stage in zip(table.relation.columns, table.types, strict=True)
        ]
        # the log has the name that the table had then
        name = self._state.names.get(table.relation.oid, table.name)
        return match_target(target, name, columns, fires=self._fires)

    @staticmethod
    def _refuse_generated(table: PublishedTable, target: Connection[Any]) -> None:
        """GdqError if the target stores a column that the source computes, which a slot does not send."""
        query = """select a.attname from pg_attribute a
                    where a.attrelid = to_regclass(%s) and a.attname = any (%s) and a.attgenerated = ''"""
        stored = [name for (name,) in target.execute(query, [table.name, list(table.generated)])]
        if stored:
            raise GdqError(
                f"column {', '.join(stored)} of table {table.name} is generated in the source, which a slot does not "
                "send, and not in the target",
                hint="Generate it in the target too, or drop it there.",
            )


def _pass_over(
    found: _TableChanges | None, message: RowMessage | TruncateMessage, relation: RelationMessage | None
) -> None:
    """Have changes of the batch that a change which is passed over has overwritten left out."""
    if found is None or not found.described or not isinstance(message, RowMessage):
        return
    if found.described[-1].table.relation == relation:
        found.described[-1].pass_over(message)


def _changes_of(
    transaction: SlotTransaction, taken: dict[int, str]
) -> Iterator[tuple[str, RowMessage | TruncateMessage, RelationMessage | None]]:
    """The changes of some tables in a transaction: rows with the table's description, and TRUNCATE."""
    relations = dict(transaction.relations)
    for _, message in transaction.messages():
        if isinstance(message, RelationMessage):
            relations[message.oid] = message
        elif isinstance(message, TruncateMessage):
            yield from ((taken[oid], message, None) for oid in message.oids if oid in taken)
        elif isinstance(message, RowMessage) and message.oid in taken:
            yield taken[message.oid], message, relations[message.oid]
