"""Change source of a view that reads a logical slot, that is the write-ahead log.

Only the position in the target, a snapshot, decides which changes are applied. A refresh reads all transactions
committed since the slot's confirmed position, and applies those that the new snapshot sees and the old one does not.
A transaction that is committed but not yet seen comes again: the slot is confirmed only up to it, after the target's
commit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from psycopg import Connection, sql

from gdq.call import scalar
from gdq.consumers.slot.assembly import Assembly
from gdq.consumers.slot.copy_text import copy_text
from gdq.consumers.slot.pgoutput import RelationMessage, RowMessage, TruncateMessage, TupleData
from gdq.consumers.slot.replication import (
    REPLICATION_WAIT_SECONDS,
    ReplicationData,
    ReplicationKeepalive,
    lsn_number,
    lsn_text,
    open_replication,
)
from gdq.consumers.slot.slot import publication_name, slot_name
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.consumers.slot.transaction import SlotTransaction
from gdq.consumers.slot.views.tables import PublishedTable, published_tables
from gdq.consumers.views.change_source import ChangeSource, LogColumn, log_columns_of
from gdq.consumers.views.own_objects import check_own_tables
from gdq.consumers.views.signals import NeedsFull
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.errors import GdqError
from gdq.owner_sql import OwnerSql
from gdq.qualified_sql import qualified
from gdq.sql_text import quote, raw
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings
from gdq.view.view import ViewInfo

if TYPE_CHECKING:
    from gdq.consumers.slot.replication import Replication

_WAIT_SECONDS = 0.5

# Memory for the changes of one table before they go to a file.
_MEMORY_BYTES = 8 * 1024 * 1024

# slot_view: all commits before `lsn` are in the target, whose position was `snapshot` then. `tables`:
# PublishedTables.mark at that time; NULL if the slot may lack changes of a transaction that was open then.
# slot_asked: a write to it gets the log flushed; slot_view cannot serve for that, since the target's transaction, whose
# snapshot is taken by then, changes its row.
_CREATE = """
    select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('gdq target', 0));
    create schema if not exists gdq_target;
    create table if not exists gdq_target.slot_asked (
      slot_name pg_catalog.text primary key, asked_at pg_catalog.timestamptz not null default pg_catalog.now());
    create table if not exists gdq_target.slot_view (
      slot_name pg_catalog.text primary key, lsn pg_catalog.pg_lsn not null, tables pg_catalog.text);
    alter table gdq_target.slot_view add column if not exists snapshot pg_catalog.text"""
_MADE = qualified("""
    select exists (select from pg_catalog.pg_attribute a join pg_catalog.pg_class c on c.oid = a.attrelid
                     join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                    where n.nspname = 'gdq_target' and c.relname = 'slot_view' and a.attname = 'snapshot')""")
_ASK = """
    insert into gdq_target.slot_asked (slot_name) values (%s)
    on conflict (slot_name) do update set asked_at = excluded.asked_at"""
_MOVE = """
    insert into gdq_target.slot_view (slot_name, lsn, tables, snapshot) values (%s, %s::pg_catalog.pg_lsn, %s, %s)
    on conflict (slot_name) do update
      set lsn = excluded.lsn, tables = excluded.tables, snapshot = excluded.snapshot"""
_DURABLE = qualified("""
    select pg_catalog.set_config('synchronous_commit', 'local', true)
     where pg_catalog.current_setting('synchronous_commit') = 'off'""")
_SLOT = qualified("""
    select s.confirmed_flush_lsn::text, coalesce(s.wal_status = 'lost', false), v.lsn::text, v.tables, v.snapshot
      from pg_catalog.pg_replication_slots s left join gdq_target.slot_view v on v.slot_name = s.slot_name
     where s.slot_name = %s and s.plugin = 'pgoutput' and s.database = pg_catalog.current_database()""")


@dataclass(slots=True)
class _TableChanges:
    """The changes of one table as text for COPY: the op, then the columns of a log row."""

    table: PublishedTable
    relation: str
    columns: Sequence[LogColumn]
    places: Sequence[int]
    rows: IO[bytes]
    count: int = 0

    def add(self, op: bytes, image: TupleData, old: TupleData | None = None) -> None:
        """Add one image of a row; a large value that was not sent is taken from `old`."""
        texts = [op]
        for place in self.places:
            value = image[place]
            if value.unchanged and old is not None:
                value = old[place]
            if value.unchanged:
                raise NeedsFull(f"a large value of {self.table.name} did not come through the slot")
            texts.append(rb"\N" if value.data is None else copy_text(value.data))
        self.rows.write(b"\t".join(texts) + b"\n")
        self.count += 1

    @property
    def select(self) -> str:
        """SELECT of the rows with a log row's names: a row is one image, so one column serves old and new names."""
        listed = {
            label: f"c{n}"
            for n, c in enumerate(self.columns, 1)
            for label in (c.log_key, c.log_old, c.log_new)
            if label
        }
        named = "".join(f", {own} as {quote(label)}" for label, own in listed.items())
        return f"select op as ev_op{named} from pg_temp.{self.relation}"

    def write(self, owned: OwnerSql) -> None:
        """Create and fill the relation, which ends with the transaction."""
        kinds = {f"c{n}": column.type for n, column in enumerate(self.columns, 1)}
        if owned.role is None:
            self._copy(owned.connection, self.relation, kinds)
            return
        # no type's input function runs in COPY: a domain's check could be code of the view's owner
        self._copy(owned.connection, f"{self.relation}_texts", dict.fromkeys(kinds, "text"))
        values = ", ".join(["op", *(f"{name}::{kind} as {name}" for name, kind in kinds.items())])
        owned.run(f"drop table if exists pg_temp.{self.relation}")
        owned.run(
            f"create temp table {self.relation} on commit drop as select {values} from pg_temp.{self.relation}_texts"
        )

    def _copy(self, connection: Connection[Any], relation: str, kinds: Mapping[str, str]) -> None:
        typed = "".join(f", {name} {kind}" for name, kind in kinds.items())
        # another view of the group may have created one of this name in the same transaction
        drop = f"drop table if exists pg_temp.{relation}"
        connection.execute(raw(f"{drop}; create temp table {relation} (op text{typed}) on commit drop"))
        self.rows.seek(0)
        copy_in = sql.SQL("copy pg_temp.{} from stdin (encoding 'UTF8')").format(sql.Identifier(relation))
        with connection.cursor().copy(copy_in) as copy:
            while block := self.rows.read(2**16):
                copy.write(block)


@dataclass(frozen=True, slots=True)
class SlotViewState:
    """The server's data about a view's slot, and the data stored with the target (table gdq_target.slot_view).

    `confirmed`: LSN before which the slot sends nothing; `stored` is None before the first refresh.
    """

    confirmed: int
    lost: bool
    stored: int | None
    mark: str | None
    snapshot: PgSnapshot | None

    @property
    def known(self) -> bool:
        """True if the slot has all changes since the target's position: it was not recreated or read by others."""
        return self.stored is not None and self.snapshot is not None and not self.lost and self.confirmed <= self.stored


def slot_view_state(control: Connection[Any], view: ViewInfo) -> SlotViewState | None:
    """The state of a view's slot, None if there is no slot; creates the tables that store it."""
    check_own_tables(control, "slot_asked", "slot_view", in_source=True)
    if control.execute(_MADE).fetchone() != (True,):
        control.execute(_CREATE)
        check_own_tables(control, "slot_asked", "slot_view", in_source=True)
    row = control.execute(_SLOT, [slot_name(view.queue_name, view.view_name)]).fetchone()
    if row is None:
        return None
    confirmed, lost, stored, mark, snapshot = row
    return SlotViewState(
        confirmed=lsn_number(confirmed or "0/0"),
        lost=lost or confirmed is None,
        stored=None if stored is None else lsn_number(stored),
        mark=mark,
        snapshot=None if snapshot is None else PgSnapshot.parse(snapshot),
    )


class SlotChangeSource(ChangeSource):
    """Change source of one view of engine postgres: the slot gdq_QUEUE_VIEW."""

    def __init__(
        self, control: Connection[Any], dsn: str, view: ViewInfo, *, wait_seconds: float = REPLICATION_WAIT_SECONDS
    ) -> None:
        """`control`: an autocommit connection to the source; `dsn`: the same for a role with REPLICATION.

        `wait_seconds`: how long to wait for another reader to leave the slot.
        """
        self._wait_seconds = wait_seconds
        self._control = control
        self._dsn = dsn
        self._view = view
        self._slot = ""
        self._stream: Replication | None = None
        self._found: dict[int, _TableChanges] = {}

    def begin(self) -> None:
        """Read the slot's state; GdqError if there is no slot, or the view's engine cannot use one."""
        view = self._view
        if view.engine != "postgres":
            raise GdqError(
                f"view {view.view_name} cannot be refreshed from a slot: only views of engine postgres can",
                hint="Leave --source out.",
            )
        self._slot = slot_name(view.queue_name, view.view_name)
        state = slot_view_state(self._control, view)
        if state is None:
            make = f"gdq create-slot {view.queue_name} {view.view_name} {' '.join(view.tables)}"
            there = f"without the tables if publication {publication_name(view.queue_name)} exists"
            raise GdqError(f"there is no slot {self._slot}", hint=f"Make it with {make}, {there}.")
        self._state = state
        self._mark = state.mark
        self._applied = state.confirmed

    def why_full(self, holder: SnapshotHolder) -> str | None:
        """Why the slot lacks changes since the stored position; None if it has all."""
        self._s1 = PgSnapshot.parse(holder.snapshot)
        view = self._view
        self._tables = published_tables(holder.connection, view.queue_name, view.tables, self._s1)
        if self._state.lost:
            return f"slot {self._slot} is lost: drop it and make it anew"
        if self._state.stored is None:
            return f"slot {self._slot} was not read for this view before"
        if not self._state.known:
            return f"slot {self._slot} is ahead of the target"
        if self._mark is None:
            return "a transaction was open that is older than what is published"
        return None if self._mark == self._tables.mark else "a table or what is published of it was changed"

    def changed(self, holder: SnapshotHolder, s0: str | None) -> dict[str, str]:
        """Read the slot up to the held snapshot; NeedsFull after a TRUNCATE, or if a table's columns changed."""
        if self._state.lost:
            return {}
        since = None if s0 is None else PgSnapshot.parse(s0)
        if since is not None and self._state.snapshot is not None and not since.covers(self._state.snapshot):
            # the target was restored to an older version, as a lake table may be
            raise NeedsFull(f"slot {self._slot} is ahead of the target")
        if since is None or not self._state.known or self._mark is None:
            self._mark = self._mark_of_load()
        if since is not None:
            self._found = self._empty(holder)
        self._read(self._ask(), since)
        return {one.table.name: one.select for one in self._found.values() if one.count}

    def write(self, connection: Connection[Any]) -> None:
        """Put the changes into temporary tables."""
        apply_view_settings(connection, READ_SETTINGS)
        for one in self._found.values():
            if one.count:
                one.write(OwnerSql(connection, self._view.acts_as))
        apply_view_settings(connection, READ_SETTINGS | self._view.settings)

    def move(self, connection: Connection[Any]) -> None:
        """Store the LSN up to which the target has the slot's changes."""
        if self._state.lost:
            connection.execute(qualified("delete from gdq_target.slot_view where slot_name = %s"), [self._slot])
            return
        with connection.transaction():
            # the slot forgets confirmed changes, so the commit must be on disk before they are confirmed
            connection.execute(_DURABLE)
            connection.execute(_MOVE, [self._slot, lsn_text(self._applied), self._mark, self._s1.text])

    def applied(self) -> None:
        """Confirm the applied log to the server, which may then remove it."""
        if self._stream is not None:
            self._stream.confirm(self._applied)

    def close(self) -> None:
        """End the slot's session and free the changes."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        for one in self._found.values():
            one.rows.close()
        self._found = {}

    def _mark_of_load(self) -> str | None:
        """The mark to store with a full load; None if the next refresh must be a full load too.

        It must if a transaction is open that wrote before its table was published: those changes never come through the
        slot. Or if a commit waits for a standby: it may be in the log before the slot's start, and is not yet seen.
        """
        since = self._tables.published
        if not self._state.known:
            waits = scalar(
                self._control, qualified("select pg_catalog.current_setting('synchronous_standby_names') <> ''")
            )
            since = self._s1.xmax if waits else since
        return None if any(xid < since for xid in self._s1.running) else self._tables.mark

    def _ask(self) -> int:
        """An LSN after all commits that the holder's snapshot sees, up to which the server is sure to send.

        The server sends only flushed log; the commit of the transaction here has it flushed.
        """
        with self._control.transaction():
            self._control.execute(_DURABLE)
            written = scalar(self._control, qualified("select pg_catalog.pg_current_wal_insert_lsn()::text"))
            self._control.execute(_ASK, [self._slot])
        return lsn_number(written)

    def _empty(self, holder: SnapshotHolder) -> dict[int, _TableChanges]:
        found = {}
        columns = log_columns_of(holder.connection, self._view.queue_name, self._view.tables)
        for number, (oid, table) in enumerate(self._tables.tables.items(), 1):
            places = {column.split(" ", 2)[2]: place for place, column in enumerate(table.columns)}
            logged = [column for column in columns[table.name] if column.name in places]
            if len(logged) < len(columns[table.name]):
                raise NeedsFull(f"a generated column of {table.name} does not come through the slot")
            rows = cast("IO[bytes]", tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES, prefix="gdq-slot-"))  # noqa: SIM115
            found[oid] = _TableChanges(table, f"gdq_slot_{number}", logged, [places[c.name] for c in logged], rows)
        return found

    def _read(self, goal: int, s0: PgSnapshot | None) -> None:
        """Read the commits before `goal`, keep the changes between s0 and s1, and find the LSN to confirm."""
        self._stream = open_replication(
            self._control,
            self._dsn,
            self._slot,
            self._view.queue_name,
            messages=False,
            wait_seconds=self._wait_seconds,
        )
        now = slot_view_state(self._control, self._view)
        if s0 is not None and (now is None or now.confirmed > self._state.confirmed):
            raise NeedsFull(f"slot {self._slot} was read by another meanwhile")
        assembly, sent, before = Assembly(self._slot), 0, self._state.confirmed
        first_open: int | None = None
        stays = goal
        try:
            while sent < goal:
                message = self._stream.receive(_WAIT_SECONDS)
                if isinstance(message, ReplicationKeepalive):
                    sent = max(sent, message.lsn)
                one = assembly.take(message) if isinstance(message, ReplicationData) else None
                if one is None:
                    continue
                sent = max(sent, one.end_lsn)
                xid = self._s1.full(one.xid)
                try:
                    if not self._s1.sees(xid):
                        first_open = before if first_open is None else first_open
                    elif s0 is not None and not s0.sees(xid):
                        self._take(one)
                finally:
                    one.close()
                if first_open is not None and one.prepared_lsn is not None:
                    stays = min(stays, one.prepared_lsn)
                before = max(before, one.end_lsn)
            # confirming past a PREPARE would lose its changes: the slot then sends only the COMMIT PREPARED
            stays = assembly.confirmable(stays)
            self._applied = max(min(stays, goal if first_open is None else first_open), self._state.confirmed)
        finally:
            assembly.close()

    def _take(self, transaction: SlotTransaction) -> None:
        relations = dict(transaction.relations)
        for _, message in transaction.messages():
            if isinstance(message, RelationMessage):
                relations[message.oid] = message
            elif isinstance(message, TruncateMessage):
                for oid in message.oids:
                    if oid in self._found:
                        raise NeedsFull(f"truncate of {self._found[oid].table.name}")
            elif isinstance(message, RowMessage) and message.oid in self._found:
                self._take_row(message, relations.get(message.oid))

    def _take_row(self, row: RowMessage, relation: RelationMessage | None) -> None:
        into = self._found[row.oid]
        if relation is None or not into.table.is_sent_as(relation) or (row.op != "insert" and row.old is None):
            raise NeedsFull(f"table {into.table.name} was changed")
        if row.old is not None:
            into.add(b"o", row.old)
        if row.new is not None:
            into.add(b"n", row.new, row.old)
