"""The chunked copy: tables in short transactions, resumable after a kill, that arrive at one tick of the queue.

Tables, and ranges of the key of a large one, are copied side by side. Each step takes a snapshot of the source, brings
the rows that a range has in the target already to it, and adds the next chunk as that snapshot sees it. So at any
moment a target holds the rows of each range up to some key as of one snapshot, which stands beside them. In the last
step all tables share a snapshot, which becomes a tick of the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from psycopg import Connection

from gdq.call import scalar, try_while_locked
from gdq.conninfo import Connectable, connect, conninfo_from
from gdq.consumer import consumer_info, register_consumer, set_tables
from gdq.consumers.copy.chunk_goal import Goal, find_goal
from gdq.consumers.copy.chunk_log import LogHold
from gdq.consumers.copy.chunk_progress import Progress, StartAgain, begin_copy, join_copy, store
from gdq.consumers.copy.chunk_step import ChunkSteps, record_tick
from gdq.consumers.copy.chunk_table import captured_tables
from gdq.consumers.copy.chunk_target import ChunkTarget
from gdq.consumers.copy.chunk_work import ChunkWork, TableProgress, TellProgress
from gdq.consumers.copy.leader import COPY_SETTINGS
from gdq.consumers.copy.pieces import CopyChoice, describe_source_table
from gdq.consumers.copy.table_definition import create_table
from gdq.era import check_position
from gdq.errors import GdqError, ResyncRequired, TruncatedPosition, mapped_errors
from gdq.qualified_sql import qualified
from gdq.source import Position
from gdq.sql_text import raw
from gdq.table_copy import resynced

CHUNK_ROWS = 50_000
WORKERS = 2
# A consumer that reads on meanwhile may pass the tick at which the copy arrives.
_ARRIVALS_MAX = 20

_EXPECTED = qualified("""
select sum(greatest(c.reltuples, 0::real))
  from (select %s::pg_catalog.regclass as relid) as one
  join pg_catalog.pg_class c on c.oid = one.relid
    or c.oid = any (array(select t.relid::oid from pg_catalog.pg_partition_tree(one.relid) t where t.isleaf))""")


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


def copy_in_chunks(
    connection: Connectable,
    queue: str,
    tables: Sequence[str],
    target: str,
    *,
    copy: str,
    into: Mapping[str, str] | None = None,
    consumer: str | None = None,
    tick: int | None = None,
    workers: int = WORKERS,
    chunk_rows: int = CHUNK_ROWS,
    create: bool = False,
    anew: bool = False,
    progress: Callable[[str, str, int, int | None], None] | None = None,
) -> ChunkedCopy:
    """Copy captured tables of a queue to another database in short transactions, and bring them to one tick.

    `target`: its connection string; its tables have the source's keys and no rows. `into`: target tables by source
    table, where the names differ. `copy`: the copy's name; after an interruption the same call goes on where it was.
    Meanwhile a consumer of that name with "copy " before it keeps the log. `consumer` gets all changes after the tick,
    and none before; it is registered if it is missing. `tick`: an earlier tick at which the tables are to arrive, in
    place of one that is taken in the end. `workers`: sessions on either side that copy tables, and ranges of large
    ones, at once; a later call may have another number. `create`: make tables that the target lacks, with columns and
    primary key. `anew`: delete what an earlier call has copied. `progress` is called after every step, by one thread at
    a time, with the table, "copied" or why it starts again, the rows copied so far, and about how many there will be.
    GdqError if a table cannot be copied; DivergedPosition if the source has lost the state that was copied.
    """

    source = conninfo_from(connection)
    expected: dict[str, int | None] = {}

    def told(done: TableProgress, what: str) -> None:
        if progress is not None:
            if done.table not in expected:
                expected[done.table] = copier.expected_rows(done.table)
            progress(done.table, what, done.rows, expected[done.table])

    with ChunkedCopier(
        source, queue, tables, target, copy, into or {}, consumer,
        tick=tick, workers=workers, chunk_rows=chunk_rows, create=create, anew=anew, tell=told,
    ) as copier:  # fmt: skip
        return copier.run()


@dataclass(slots=True)
class ChunkedCopier:
    """Copies captured tables of a queue in chunks, see copy_in_chunks(); a context manager that holds the sessions.

    `tell` is called after every step, with the table's progress and what was done, by one thread at a time.
    """

    source: str | None
    queue: str
    tables: Sequence[str]
    to: str
    copy: str
    into: Mapping[str, str] = field(default_factory=dict)
    consumer: str | None = None
    tick: int | None = None
    workers: int = WORKERS
    chunk_rows: int = CHUNK_ROWS
    create: bool = False
    anew: bool = False
    tell: TellProgress = lambda _done, _what: None
    _control: Connection[Any] = field(init=False)
    _steps: list[ChunkSteps] = field(init=False)
    _hold: LogHold = field(init=False)
    _goal: Goal | None = field(init=False, default=None)
    _opened: ExitStack = field(init=False, default_factory=ExitStack)

    def __enter__(self) -> Self:
        if self.chunk_rows < 1:
            raise GdqError(f"chunks of {self.chunk_rows} rows: a chunk has at least one row")
        if self.workers < 1:
            raise GdqError(f"{self.workers} workers: a copy has at least one")
        with ExitStack() as opening:

            def session(place: str | None) -> Connection[Any]:
                name = f"gdq:{self.queue}/copy"
                return opening.enter_context(connect(place, application_name=name, autocommit=True))

            self._control = session(self.source)
            self._hold = LogHold(self._control, self.queue, f"copy {self.copy}", self.tick)
            self._steps = [
                ChunkSteps(
                    self.queue,
                    self.copy,
                    session(self.source),
                    ChunkTarget(session(self.to)),
                    self._tick,
                    self.chunk_rows,
                )
                for _ in range(self.workers)
            ]
            self._opened = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def run(self) -> ChunkedCopy:
        """Copy what is missing, and bring all tables to one tick. GdqError if a table cannot be copied."""
        tables = self._begin()
        arrived = [states[0] for states in tables if states[0].arrived]
        done_before = bool(arrived) and self._hold.found() is None
        if not done_before:
            arrived = self._arrive(tables)
            self._hold.end()
        return _result(arrived, done_before=done_before)

    def expected_rows(self, table: str) -> int | None:
        """About how many rows a table has, None if its statistics do not tell."""
        rows = scalar(self._control, _EXPECTED, table)
        return int(rows) if rows else None

    @property
    def _lead(self) -> ChunkSteps:
        """The worker whose session of the target holds the copy."""
        return self._steps[0]

    def _begin(self) -> list[list[Progress]]:
        """Check the tables and what an earlier run has left, and have the log kept."""
        pairs = self._pairs()
        names = [name for name, _ in pairs]
        if self.tick is not None:
            self._goal = find_goal(self._control, self.queue, self.tick, names, self.consumer)
        tables = begin_copy(self._lead.target.connection, self.copy, pairs)
        for steps in self._steps[1:]:
            join_copy(steps.target.connection, self.copy)
        if self.anew:
            tables = [self._emptied(states) for states in tables]
        arrived = [states[0].table for states in tables if states[0].arrived]
        if len(arrived) == len(tables):
            self._check_arrival(tables[0][0])
            return tables
        if arrived:  # they arrive together; a consumer may have changed the target's rows since
            raise GdqError(
                f'copy "{self.copy}" has finished, with table {", ".join(arrived)}',
                hint="Name further tables alone, or copy all of them anew.",
            )
        self._hold.begin(names)
        for state in (state for states in tables for state in states):
            if state.position is not None:
                try:
                    check_position(self._control, self.queue, state.position)
                except TruncatedPosition:
                    continue  # the next step finds whether the changes of this table are gone
        return tables

    def _check_arrival(self, state: Progress) -> None:
        """GdqError if the copy has arrived elsewhere than is asked for."""
        assert state.position is not None
        at = Position.parse(state.position).tick
        if self._goal is not None and at != self._goal.tick:
            raise GdqError(
                f'copy "{self.copy}" has arrived at tick {at}, not at tick {self._goal.tick}', hint="Copy anew."
            )

    def _emptied(self, states: list[Progress]) -> list[Progress]:
        """A table without what an earlier run has copied."""
        if not any(state.begun for state in states):
            return states
        anew = self._lead.empty(states)
        self.tell(TableProgress(anew.table, 0), "started again: asked for")
        return [anew]

    def _pairs(self) -> list[tuple[str, str]]:
        """The tables and their targets, by qualified names."""
        names = captured_tables(self._control, self.queue, self.tables)
        if not names:
            raise GdqError("no table to copy", hint="Name at least one.")
        into = dict(zip(captured_tables(self._control, self.queue, list(self.into)), self.into.values(), strict=True))
        if self.create:
            self._create([name for name in names if name not in into])
        target = self._lead.target
        pairs = [(name, target.find(into.get(name, name))) for name in names]
        same = target.is_in(self._control)
        for name, found in pairs:
            if same and name == found:
                raise GdqError(f"table {name} would be copied into itself", hint="Name another target.")
        return pairs

    def _create(self, names: Sequence[str]) -> None:
        """Make the tables that the target lacks."""
        reader, control = self._lead.reader, self._lead.target.connection
        for name in names:
            with reader.transaction(), control.transaction():
                for session in (reader, control):
                    session.execute(raw(COPY_SETTINGS))
                if scalar(control, "select to_regclass(%s) is null", name):
                    create_table(reader, control, describe_source_table(reader, CopyChoice(name)))

    def _arrive(self, tables: Sequence[Sequence[Progress]]) -> list[Progress]:
        """Copy all tables to their end, and then move them to one tick together, from which the consumer goes on."""
        for _ in range(_ARRIVALS_MAX):
            states = [ranges[0] for ranges in tables]
            if not all(state.arrived for state in states):
                states = self._copied_to_tick(tables)
            try:
                self._hand_over(states)
            except TruncatedPosition:  # the consumer has read past the tick
                if self._goal is not None:
                    raise
                tables = [[state] for state in self._reopen(states)]
                continue
            except ResyncRequired as gap:
                raise GdqError(f"capture had a gap during the copy: {gap}", hint="Run the copy again.") from gap
            return states
        raise GdqError(
            f'consumer "{self.consumer}" has passed the tick of the copy {_ARRIVALS_MAX} times',
            hint="Stop what reads it, and run the copy again: it goes on.",
        )

    def _copied_to_tick(self, tables: Sequence[Sequence[Progress]]) -> list[Progress]:
        work = ChunkWork(tables, self._steps, self.tell, hold=self._hold)
        while True:
            work.copy()
            # what has gathered since the first tables were whole, so that the step of all tables is short
            if not work.settle():
                continue
            if self.consumer is not None:  # not earlier: it would keep the log of the whole copy
                names = [ranges[0].table for ranges in tables]
                register_consumer(self._control, self.queue, self.consumer, at_tick=self.tick, tables=names)
            try:
                return self._lead.arrive([state for [state] in work.states], self._goal)
            except StartAgain as again:
                work.restart(again)

    def _reopen(self, states: Sequence[Progress]) -> list[Progress]:
        opened = [replace(state, arrived=False) for state in states]
        with self._lead.target.writing():
            for before, after in zip(states, opened, strict=True):
                store(self._lead.target.connection, self.copy, [before], [after])
        return opened

    def _tick(self, snapshot: str) -> str:
        return record_tick(self._control, self.queue, snapshot)

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
