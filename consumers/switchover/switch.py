"""The switch itself, step by step: each can be repeated, and one commit in the source is the point of no return.

Until that commit nothing but locks of a transaction keeps the application from writing to the source: whatever fails or
is killed, they are gone. The commit raises the fence, stores that the source is the target now, and where the replica
of the other direction begins. What follows is repeated until it is done.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import try_while_locked
from gdq.conninfo import connect, conninfo_of
from gdq.consumer import register_consumer, unregister_consumer
from gdq.consumers.replica.column_changes import source_columns
from gdq.consumers.replica.origin import origin_of
from gdq.consumers.replica.replica import Replica
from gdq.consumers.replica.source_tables import source_tables
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.writing_side import SwitchoverState, read_state, store_state
from gdq.consumers.switchover.check import MAX_LAG, find_obstacles, not_made, running_replica
from gdq.consumers.switchover.fence import lower_fence, place_fence, raise_fence
from gdq.consumers.switchover.obstacle import ObstaclesFound
from gdq.consumers.switchover.pair import Pair, open_pair, place
from gdq.consumers.switchover.sequences import set_sequences_ahead
from gdq.consumers.table_compare.compare import compare_each
from gdq.consumers.table_compare.sides import Link
from gdq.era import position
from gdq.errors import GdqError
from gdq.queue import table_info
from gdq.shown import Shown
from gdq.source import Position
from gdq.sql_text import pin_session, raw
from gdq.ticker import take_tick

# Passes of catching up that change fewer rows than this leave little to do while writers wait.
_FEW_ROWS = 10_000
_PASSES_MAX = 50

# A writer who waits for a lock looks for a deadlock after a second: by then the locks are had or given back.
_LOCK_SECONDS = 0.4

_HOLDERS = """
select string_agg(distinct case when l.pid is null then 'a prepared transaction'
                                else format('pid %%s (%%s)', l.pid, coalesce(nullif(a.application_name, ''),
                                                                             a.backend_type)) end, ', ')
  from pg_locks l left join pg_stat_activity a on a.pid = l.pid
 where l.relation = any (%s::text[]::regclass[]) and l.granted and l.pid is distinct from pg_backend_pid()
   and l.database = (select d.oid from pg_database d where d.datname = current_database())
   and l.mode = any ('{RowExclusiveLock,ShareUpdateExclusiveLock,ShareLock,ShareRowExclusiveLock,ExclusiveLock,
                       AccessExclusiveLock}')"""


@dataclass(frozen=True, slots=True, repr=False)
class Switched(Shown):
    """A switch that is done. `writes_at`: where the application writes now. `tick`: the source's last one.

    `pause_seconds`: how long no database took writes; None if an earlier run has begun the switch. `tick`, `tables` and
    `sequences` (set ahead) are None then, too.
    """

    queue_name: str
    replica_name: str
    writes_at: str
    tick: int | None
    tables: int | None
    sequences: int | None
    pause_seconds: float | None


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    """How to switch. `accepted`: obstacles, as CODE or CODE:OBJECT. `compare`: all rows, while writers wait.

    `fence`: the source refuses the application's writes afterwards. `max_pause_seconds`: how long writers may wait
    before they go on in the source. `wait_seconds`: how long writers of the source are given to end their transactions.
    """

    accepted: Sequence[str] = ()
    max_lag: timedelta = MAX_LAG
    compare: bool = False
    fence: bool = True
    max_pause_seconds: float = 60.0
    wait_seconds: float = 30.0


def switch_steps(
    source: str | None, target: str, queue: str, replica: str, options: SwitchOptions
) -> Generator[str, None, Switched]:
    """Switch the application's writes from a replica's source to its target; yields each step once it is done.

    A generator that is not run to its end leaves nothing behind before the step `switched`; after it, the next run goes
    on. A switch that was made before is the step `already switched`. ObstaclesFound or another GdqError if the switch
    cannot be made: nothing was changed then.
    """
    with open_pair(source, target, queue, replica) as pair:
        here, there = _states(pair)
        if here.side == "source":
            return (yield from _switch(pair, here, options))
        if there.side == "target":
            yield from _finish(pair, here)
        elif here.turns == 0:
            raise not_made(pair)
        else:
            yield "already switched"
        unregister_consumer(pair.source, queue, replica)
        return Switched(queue, replica, place(pair.target), None, None, None, None)


def _states(pair: Pair) -> tuple[SwitchoverState, SwitchoverState]:
    """What both databases know; GdqError if they do not know each other, or if the other direction is half done."""
    here, there = read_state(pair.source), read_state(pair.target)
    own = (pair.queue, pair.replica)
    if here is None or there is None or own != (here.queue, here.replica) or own != (there.queue, there.replica):
        raise GdqError(
            f'the databases are not prepared for the switchover of replica "{pair.replica}"',
            hint=f"gdq switchover {pair.queue} {pair.replica} --to ... --prepare",
        )
    if here.side == there.side == "source":
        raise GdqError(
            "both databases say that the application writes there",
            hint="Was one restored? End it: --end, then prepare.",
        )
    if here.side == there.side and there.turns > here.turns:
        raise GdqError(
            "a switch in the other direction is half done: no database takes writes",
            hint="Finish it first: run its command again.",
        )
    return here, there


def _switch(pair: Pair, here: SwitchoverState, options: SwitchOptions) -> Generator[str, None, Switched]:
    if pids := running_replica(pair):
        raise GdqError(
            f"a program applies changes for the replica: pid {', '.join(map(str, pids))} in the source",
            hint=f"Stop gdq replicate {pair.queue} {pair.replica} first: the switch brings the last changes itself.",
        )
    tables = pair.tables()
    source, target = conninfo_of(pair.source), conninfo_of(pair.target)
    with (
        Replica(source, target, pair.queue, pair.replica) as forward,
        connect(source, application_name="gdq:switchover", autocommit=True) as holder,
        pair.loss_named(holder, forward.source, forward.state.connection),
    ):
        pin_session(holder)
        _catch_up(forward)
        yield "caught up"
        accepted = [*options.accepted, "replica_running"]
        obstacles = find_obstacles(pair, accepted=accepted, max_lag=options.max_lag)
        if any(one.severity == "error" for one in obstacles):
            raise ObstaclesFound(obstacles)
        with _holders_named(pair, tables):
            if options.fence:
                place_fence(pair.source, tables, patience=options.wait_seconds)
        yield "checked"
        with _holders_named(pair, tables):
            started = _hold_writers(holder, tables, options)
        yield "writers wait"
        tick = take_tick(pair.source, pair.queue)
        for _ in forward.run():
            pass
        if forward.state.tick < tick:
            raise GdqError(f"the replica stands at tick {forward.state.tick}, before tick {tick}: nothing was changed")
        _require_same(pair, tables)
        yield "drained"
        if options.compare:
            _compare(pair)
            yield "compared"
        sequences = set_sequences_ahead(pair)
        begin = _register_reverse(pair, tables)
        yield "reverse registered"
        _require_same(pair, tables)  # a rule may have captured a table that was made meanwhile
        here = _commit(pair, holder, here, tables, begin, fence=options.fence)
        yield "switched"
        yield from _finish(pair, here)
        pause = round(time.monotonic() - started, 3)
        unregister_consumer(pair.source, pair.queue, pair.replica)
        return Switched(pair.queue, pair.replica, place(pair.target), tick, len(tables), sequences, pause)


def _require_same(pair: Pair, tables: Sequence[str]) -> None:
    """GdqError if the replica does not take these tables any more, or takes others too."""
    if pair.tables() != tables:
        raise GdqError("the replica takes other tables than before: nothing was changed", hint="Start again.")


def _catch_up(forward: Replica) -> None:
    """Apply what there is until little is left; GdqError if writers are faster."""
    for _ in range(_PASSES_MAX):
        started = time.monotonic()
        rows = sum(batch.inserted + batch.updated + batch.deleted for batch in forward.run())
        if rows < _FEW_ROWS or time.monotonic() - started < 1:
            return
    raise GdqError("the replica does not catch up with the writers", hint="Switch when they write less.")


def _hold_writers(holder: Connection[Any], tables: Sequence[str], options: SwitchOptions) -> float:
    """Lock the tables against writers in a transaction that stays open; when writers began to wait.

    The server ends the session, and so the locks, if nothing comes from it for longer than writers may wait.
    """
    # the server's timeouts end at 24 days
    limit = min(round(options.max_pause_seconds * 1000), 2**31 - 1)

    def locked() -> float:
        started = time.monotonic()
        holder.execute("begin")
        try:
            holder.execute(raw(f"set local statement_timeout = {round(_LOCK_SECONDS * 1000)}"))
            holder.execute(raw(f"lock table {', '.join(tables)} in share row exclusive mode"))
            holder.execute("set local statement_timeout = 0")
            holder.execute(raw(f"set local idle_in_transaction_session_timeout = {limit}"))
        except psycopg.Error as error:
            holder.execute("rollback")
            if isinstance(error, psycopg.errors.QueryCanceled):
                raise psycopg.errors.LockNotAvailable("the tables are in use") from error
            raise
        return started

    return try_while_locked(locked, options.wait_seconds, pause_max=1.0)


@contextmanager
def _holders_named(pair: Pair, tables: Sequence[str]) -> Iterator[None]:
    """GdqError that names the sessions for whose locks the block has waited in vain."""
    try:
        yield
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
        row = pair.source.execute(_HOLDERS, [list(tables)]).fetchone()
        raise GdqError(
            f"writers hold the tables: {(row and row[0]) or 'one after the other'}; nothing was changed",
            hint="Let their transactions end, or end them, and try again.",
        ) from error


def _compare(pair: Pair) -> None:
    link = Link(pair.queue, pair.replica)
    compared = compare_each(conninfo_of(pair.source), conninfo_of(pair.target), None, link=link, examples=0)
    if differing := [table.table_name for table in compared if not table.equal]:
        raise GdqError(
            f"tables differ: {', '.join(differing)}; nothing was changed",
            hint=f"gdq compare-tables {pair.queue} {pair.replica} names the rows, gdq repair-tables makes them equal.",
        )


def _register_reverse(pair: Pair, tables: Sequence[str]) -> str:
    """Register the consumer of the reverse replica in the target at a tick that is taken now; its position.

    One of an earlier run began before, when the target's tables were not equal yet.
    """
    unregister_consumer(pair.target, pair.queue, pair.replica)
    captured = {info.table_name for info in table_info(pair.target, pair.queue)}
    takes_all = pair.consumer().tables is None and captured == set(tables)
    register_consumer(pair.target, pair.queue, pair.replica, tables=None if takes_all else tables)
    return position(pair.target, pair.queue, pair.replica)


def _commit(
    pair: Pair, holder: Connection[Any], here: SwitchoverState, tables: Sequence[str], begin: str, *, fence: bool
) -> SwitchoverState:
    """Make the source the target, in the transaction that keeps its writers waiting: the point of no return."""
    other = place(pair.target)
    try:
        state = ReplicaState(holder, pair.queue, pair.replica, origin_of(pair.target))
        state.load()
        state.drop()
        state.begin(begin)
        snapshot = Position.parse(begin).snapshot
        captured = {one.table_name: one for one in source_tables(pair.target, pair.queue, pair.replica).values()}
        for table in tables:
            relid, version = captured[table].relid, captured[table].version
            state.copied(table, relid, snapshot, source_columns(pair.target, pair.queue, relid, version))
            state.handed_over(table)
        if fence:
            raise_fence(holder, other)
        store_state(holder, pair.queue, pair.replica, side="target", turns=here.turns + 1, other=other)
        holder.execute("commit")
    except psycopg.Error as error:
        if not holder.broken:
            raise
        raise GdqError(
            f"the session that kept writers waiting is gone: {_why(pair, error)}",
            hint="Run the same command again: it says whether the switch was made.",
        ) from error
    found = read_state(pair.source)
    if found is None or found.side != "target":
        raise GdqError("the source did not store the switch: nothing was changed", hint="Try again.")
    return found


def _finish(pair: Pair, here: SwitchoverState) -> Generator[str, None, None]:
    """Open the target for the application's writes."""
    try:
        set_sequences_ahead(pair)
        with pair.target.transaction():
            state = ReplicaState(pair.target, pair.queue, pair.replica, origin_of(pair.source))
            state.load()
            state.drop()
            turns, other = here.turns, place(pair.source)
            store_state(pair.target, pair.queue, pair.replica, side="source", turns=turns, other=other)
            lower_fence(pair.target)
    except psycopg.Error as error:
        raise GdqError(
            f"the source takes no writes any more, and the target none yet: {_why(pair, error)}",
            hint="Run the same command again: it goes on where this one ended.",
        ) from error
    yield "opened"


def _why(pair: Pair, error: psycopg.Error) -> str:
    """What an error says, in one line, and which side was lost, if one was."""
    line, lost = str(error).strip().splitlines()[0], pair.lost()
    return line if lost is None else f"{line}; {lost} was lost"
