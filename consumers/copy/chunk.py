"""The chunked copy: tables in short transactions, resumable after a kill, that arrive at one tick of the queue.

Each step takes a snapshot of the source, brings the rows that are in the target already to it, and adds the next chunk
as that snapshot sees it. So at any moment a target holds the rows up to some key as of one snapshot, which stands
beside them. The changes between two snapshots are read from the log once. In the last step all tables share a snapshot,
which becomes a tick of the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from psycopg import Connection

from gdq.call import scalar, try_while_locked
from gdq.conninfo import Connectable, connect, conninfo_from
from gdq.consumer import consumer_info, register_consumer, set_tables, unregister_consumer
from gdq.consumers.copy.chunk_progress import Progress, begin_copy, store
from gdq.consumers.copy.chunk_table import ChunkTable, captured_tables, describe_table
from gdq.consumers.copy.chunk_target import ChunkTarget
from gdq.consumers.copy.leader import COPY_SETTINGS
from gdq.consumers.copy.pieces import CopyChoice, describe_source_table
from gdq.consumers.copy.table_definition import create_table
from gdq.consumers.views.snapshot_holder import SnapshotHolder, hold_snapshot
from gdq.era import check_position
from gdq.errors import GdqError, ResyncRequired, TruncatedPosition, mapped_errors
from gdq.qualified_sql import qualified
from gdq.sql_text import raw
from gdq.table_copy import resynced

CHUNK_ROWS = 50_000
_CHUNK_ROWS_MIN = 1_000
# A chunk that takes longer halves the next ones, one that takes a tenth of it doubles them, up to the size asked for.
_CHUNK_SECONDS = 10.0
# A table that starts again so often in one run meets a cause that does not go away.
_RESTARTS_MAX = 20
# A consumer that reads on meanwhile may pass the tick at which the copy arrives.
_ARRIVALS_MAX = 20

_EVENT = qualified("""
select e.kind, e.data->>'kind' from gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot,
                                                     array[%s::pg_catalog.regclass]) e
 where e.kind <> 'message' limit 1""")

_EXPECTED = qualified("""
select sum(greatest(c.reltuples, 0::real))
  from (select %s::pg_catalog.regclass as relid) as one
  join pg_catalog.pg_class c on c.oid = one.relid
    or c.oid = any (array(select t.relid::oid from pg_catalog.pg_partition_tree(one.relid) t where t.isleaf))""")

_POSITION = qualified("select gdq.tick_position(%s, tick_id) from gdq.add_tick(%s, %s::pg_snapshot)")


@dataclass(frozen=True, slots=True)
class ChunkedTable:
    """One table of a chunked copy: its name, its target's, and the rows that its chunks had."""

    table_name: str
    target_name: str
    rows: int


@dataclass(frozen=True, slots=True)
class ChunkedCopy:
    """A finished chunked copy. `position`: the tick that all tables are at, as text for check_position().

    `snapshot`: the tick's pg_snapshot. `done_before`: an earlier call had finished it, and this one did nothing.
    """

    tables: tuple[ChunkedTable, ...]
    snapshot: str
    position: str
    done_before: bool


class _StartAgain(Exception):  # noqa: N818 (a signal between two parts, no error)
    """Something happened to a table that its log's rows do not show: its copy starts again."""

    def __init__(self, table: str, reason: str) -> None:
        super().__init__(reason)
        self.table, self.reason = table, reason


def copy_in_chunks(
    connection: Connectable,
    queue: str,
    tables: Sequence[str],
    target: str,
    *,
    copy: str,
    into: Mapping[str, str] | None = None,
    consumer: str | None = None,
    chunk_rows: int = CHUNK_ROWS,
    create: bool = False,
    anew: bool = False,
    progress: Callable[[str, str, int, int | None], None] | None = None,
) -> ChunkedCopy:
    """Copy captured tables of a queue to another database in short transactions, and bring them to one tick.

    `target`: its connection string; its tables have primary keys and no rows. `into`: target tables by source table,
    where the names differ. `copy`: the copy's name; after an interruption the same call goes on where it was. Meanwhile
    a consumer of that name with "copy " before it keeps the log. `consumer` gets all changes after the tick, and none
    before; it is registered if it is missing. `create`: make tables that the target lacks, with columns and primary
    key. `anew`: delete what an earlier call has copied. `progress` is called after every step with the table, "copied"
    or why it starts again, the rows copied so far, and about how many there will be. GdqError if a table cannot be
    copied; DivergedPosition if the source has lost the state that was copied.
    """

    source = conninfo_from(connection)
    expected: dict[str, int | None] = {}

    def told(state: Progress, what: str) -> None:
        if progress is not None:
            if state.table not in expected:
                expected[state.table] = copier.expected_rows(state.table)
            progress(state.table, what, state.rows, expected[state.table])

    with ChunkedCopier(
        source, queue, tables, target, copy, into or {}, consumer,
        chunk_rows=chunk_rows, create=create, anew=anew, tell=told,
    ) as copier:  # fmt: skip
        return copier.run()


@dataclass(slots=True)
class ChunkedCopier:
    """Copies captured tables of a queue in chunks, see copy_in_chunks(); a context manager that holds the sessions.

    `tell` is called after every step, with the table's state and what was done.
    """

    source: str | None
    queue: str
    tables: Sequence[str]
    to: str
    copy: str
    into: Mapping[str, str] = field(default_factory=dict)
    consumer: str | None = None
    chunk_rows: int = CHUNK_ROWS
    create: bool = False
    anew: bool = False
    tell: Callable[[Progress, str], None] = lambda _state, _what: None
    _control: Connection[Any] = field(init=False)
    _reader: Connection[Any] = field(init=False)
    _target: ChunkTarget = field(init=False)
    _size: int = field(init=False, default=0)
    _restarts: int = field(init=False, default=0)
    _opened: ExitStack = field(init=False, default_factory=ExitStack)

    def __enter__(self) -> Self:
        if self.chunk_rows < 1:
            raise GdqError(f"chunks of {self.chunk_rows} rows: a chunk has at least one row")
        self._size = self.chunk_rows
        name = f"gdq:{self.queue}/copy"
        with ExitStack() as opening:
            self._control = opening.enter_context(connect(self.source, application_name=name, autocommit=True))
            self._reader = opening.enter_context(connect(self.source, application_name=name, autocommit=True))
            writer = opening.enter_context(connect(self.to, application_name=name, autocommit=True))
            self._target = ChunkTarget(writer)
            self._opened = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def run(self) -> ChunkedCopy:
        """Copy what is missing, and bring all tables to one tick. GdqError if a table cannot be copied."""
        states = self._begin()
        done_before = all(state.arrived for state in states) and not self._is_pinned()
        if not done_before:
            states = self._arrive(states)
            unregister_consumer(self._control, self.queue, self._pin)
        return _result(states, done_before=done_before)

    def expected_rows(self, table: str) -> int | None:
        """About how many rows a table has, None if its statistics do not tell."""
        rows = scalar(self._control, _EXPECTED, table)
        return int(rows) if rows else None

    @property
    def _pin(self) -> str:
        return f"copy {self.copy}"

    def _is_pinned(self) -> bool:
        return any(info.consumer_name == self._pin for info in consumer_info(self._control, self.queue))

    def _begin(self) -> list[Progress]:
        """Check the tables and what an earlier run has left, and have the log kept."""
        pairs = self._pairs()
        states = begin_copy(self._target.connection, self.copy, pairs)
        if self.anew:
            states = [self._begun_anew(s, "asked for") if s.snapshot is not None else s for s in states]
        arrived = [state.table for state in states if state.arrived]
        if len(arrived) == len(states):
            return states
        if arrived:  # they arrive together; a consumer may have changed the target's rows since
            raise GdqError(
                f'copy "{self.copy}" has finished, with table {", ".join(arrived)}',
                hint="Name further tables alone, or copy all of them anew.",
            )
        names = [name for name, _ in pairs]
        register_consumer(self._control, self.queue, self._pin, tables=names)
        if self.consumer is not None:
            register_consumer(self._control, self.queue, self.consumer, tables=names)
        for state in states:
            if state.position is not None:
                try:
                    check_position(self._control, self.queue, state.position)
                except TruncatedPosition:
                    continue  # the next step finds whether the changes of this table are gone
        return states

    def _pairs(self) -> list[tuple[str, str]]:
        """The tables and their targets, by qualified names."""
        names = captured_tables(self._control, self.queue, self.tables)
        if not names:
            raise GdqError("no table to copy", hint="Name at least one.")
        into = dict(zip(captured_tables(self._control, self.queue, list(self.into)), self.into.values(), strict=True))
        if self.create:
            self._create([name for name in names if name not in into])
        pairs = [(name, self._target.find(into.get(name, name))) for name in names]
        same = self._target.is_in(self._control)
        for name, target in pairs:
            if same and name == target:
                raise GdqError(f"table {name} would be copied into itself", hint="Name another target.")
        return pairs

    def _create(self, names: Sequence[str]) -> None:
        """Make the tables that the target lacks."""
        control = self._target.connection
        for name in names:
            with self._reader.transaction(), control.transaction():
                for session in (self._reader, control):
                    session.execute(raw(COPY_SETTINGS))
                if scalar(control, "select to_regclass(%s) is null", name):
                    create_table(self._reader, control, describe_source_table(self._reader, CopyChoice(name)))

    def _arrive(self, states: Sequence[Progress]) -> list[Progress]:
        """Copy all tables to their end, and then move them to one tick together, from which the consumer goes on."""
        for _ in range(_ARRIVALS_MAX):
            states = [self._copy_whole(state) for state in states]
            if not all(state.arrived for state in states):
                # what has gathered since the first tables were whole, so that the step of all tables is short
                states = [self._retried(state, self._advance) for state in states]
                if not all(state.whole for state in states):
                    continue
                try:
                    states = self._move_together(states)
                except _StartAgain as again:
                    states = [self._begun_anew(s, again.reason) if s.table == again.table else s for s in states]
                    continue
            try:
                self._hand_over(states)
            except TruncatedPosition:  # the consumer has read past the tick
                states = [replace(state, arrived=False) for state in self._reopen(states)]
                continue
            except ResyncRequired as gap:
                raise GdqError(f"capture had a gap during the copy: {gap}", hint="Run the copy again.") from gap
            return list(states)
        raise GdqError(
            f'consumer "{self.consumer}" has passed the tick of the copy {_ARRIVALS_MAX} times',
            hint="Stop what reads it, and run the copy again: it goes on.",
        )

    def _copy_whole(self, state: Progress) -> Progress:
        while not state.whole:
            state = self._retried(state, self._advance)
            self.tell(state, "copied")
        return state

    def _retried(self, state: Progress, step: Callable[[Progress], Progress]) -> Progress:
        try:
            return step(state)
        except _StartAgain as again:
            return self._begun_anew(state, again.reason)

    def _begun_anew(self, state: Progress, reason: str) -> Progress:
        self._restarts += 1
        if self._restarts > _RESTARTS_MAX:
            raise GdqError(f"the copy of table {state.table} has started {self._restarts} times: {reason}")
        anew = state.begun_anew()
        with self._target.writing():
            self._target.empty(state.target)
            store(self._target.connection, self.copy, state, anew)
        self.tell(anew, f"started again: {reason}")
        return anew

    def _reopen(self, states: Sequence[Progress]) -> list[Progress]:
        opened = [replace(state, arrived=False) for state in states]
        with self._target.writing():
            for before, after in zip(states, opened, strict=True):
                store(self._target.connection, self.copy, before, after)
        return opened

    def _advance(self, state: Progress) -> Progress:
        """One step of a table: its rows brought to a new snapshot, and the next chunk added if one is missing."""
        began = time.monotonic()
        with hold_snapshot(self._reader, self.queue, [state.table]) as holder, self._target.writing():
            table = self._followed(holder, state)
            after = self._moved(holder, table, state)
            if not state.whole:
                upto = table.next_bound(holder.connection, state.upto, self._size)
                rows = self._target.insert(holder, table, table.rows(state.upto, upto), state.target)
                after = replace(after, upto=upto, whole=upto is None, rows=state.rows + rows)
            store(self._target.connection, self.copy, state, after)
        seconds = time.monotonic() - began
        if seconds > _CHUNK_SECONDS:
            self._size = max(self._size // 2, min(_CHUNK_ROWS_MIN, self.chunk_rows))
        elif seconds < _CHUNK_SECONDS / 10:
            self._size = min(self._size * 2, self.chunk_rows)
        return after

    def _move_together(self, states: Sequence[Progress]) -> list[Progress]:
        """All tables brought to one snapshot, in one transaction of the target."""
        names = [state.table for state in states]
        with hold_snapshot(self._reader, self.queue, names) as holder, self._target.writing():
            position = self._tick(holder.snapshot)
            moved = []
            for state in states:
                after = self._moved(holder, self._followed(holder, state), state, position)
                moved.append(replace(after, arrived=True))
                store(self._target.connection, self.copy, state, moved[-1])
        return moved

    def _followed(self, holder: SnapshotHolder, state: Progress) -> ChunkTable:
        """The table at the held snapshot; _StartAgain if something happened that the rows of its log do not show."""
        table = describe_table(holder.connection, self.queue, state.table)
        if state.snapshot is None:
            self._target.check(table, state.target)
            return table
        if table.described != state.described:
            raise _StartAgain(state.table, "its columns have changed")
        try:
            with mapped_errors():
                values = [self.queue, state.snapshot, holder.snapshot, state.table]
                event = holder.connection.execute(_EVENT, values).fetchone()
        except TruncatedPosition as error:
            raise _StartAgain(state.table, "changes since its last chunk are gone") from error
        if event is not None and event[1] == "off":
            raise GdqError(
                f"capture of table {state.table} is off, so that its copy cannot be kept right",
                hint="gdq.maintain() or a ticker switches it on. Then run the copy again.",
            )
        if event is not None:
            raise _StartAgain(state.table, event[0])
        return table

    def _moved(
        self, holder: SnapshotHolder, table: ChunkTable, state: Progress, position: str | None = None
    ) -> Progress:
        """Bring the rows that the target has to the held snapshot."""
        if state.snapshot is not None:
            try:
                changed = table.changed_rows(holder, state.snapshot, state.upto)
                if changed is not None:
                    self._target.change(holder, table, changed, state.target)
            except (TruncatedPosition, ResyncRequired) as error:
                raise _StartAgain(state.table, "changes since its last chunk are gone") from error
        return replace(
            state,
            described=table.described,
            snapshot=holder.snapshot,
            position=position or self._tick(holder.snapshot),
        )

    def _tick(self, snapshot: str) -> str:
        """Record a snapshot as a tick, whose nonce tells a server that has lost it from one that has it."""
        with mapped_errors():
            return str(scalar(self._control, _POSITION, self.queue, self.queue, snapshot))

    def _hand_over(self, states: Sequence[Progress]) -> None:
        """Have the consumer go on from the copy's tick; TruncatedPosition if it has read past it."""
        if self.consumer is not None:
            try_while_locked(partial(self._position_consumer, self.consumer, states))

    def _position_consumer(self, consumer: str, states: Sequence[Progress]) -> None:
        names = [state.table for state in states]
        with mapped_errors(), self._control.transaction():
            [info] = [one for one in consumer_info(self._control, self.queue) if one.consumer_name == consumer]
            if info.tables is not None and not set(names) <= set(info.tables):
                set_tables(self._control, self.queue, consumer, [*info.tables, *names])
            for state in states:
                assert state.snapshot is not None
                resynced(self._control, self.queue, consumer, state.table, state.snapshot)


def _result(states: Sequence[Progress], *, done_before: bool) -> ChunkedCopy:
    last = states[0]
    assert last.snapshot is not None
    assert last.position is not None
    tables = tuple(ChunkedTable(state.table, state.target, state.rows) for state in states)
    return ChunkedCopy(tables, last.snapshot, last.position, done_before)
