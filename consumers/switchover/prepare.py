"""`gdq switchover --prepare`: what the way back needs in the target, and the fence before the target's tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import try_while_locked
from gdq.conninfo import conninfo_of
from gdq.consumer import consumer_info
from gdq.consumers.replica.held_replicas import replica_tables
from gdq.consumers.replica.origin import origin_of
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.writing_side import (
    Side,
    SwitchoverState,
    forget_state,
    make_state,
    read_state,
    refuse_source,
    store_state,
)
from gdq.consumers.switchover.check import half_done, has_event_triggers
from gdq.consumers.switchover.fence import lower_fence, place_fence, raise_fence, remove_fence
from gdq.consumers.switchover.pair import Pair, named_rows, place
from gdq.errors import GdqError
from gdq.installer.install import create_event_triggers, install
from gdq.installer.version import installed_mark, version_mark
from gdq.queue import (
    TableInfo,
    add_new_tables,
    add_table,
    alter_table_options,
    create_queue,
    new_table_info,
    queue_info,
    table_info,
)
from gdq.sequence import add_sequence, sequence_info

# What to do where the other database is gone.
END_ALONE = (
    "If that database is gone for good, end the switchover in the other one alone: "
    "drop function gdq_target.fence() cascade; drop table gdq_target.switchover"
)

_QUEUE_SETTINGS = (
    *("ticker_max_count", "ticker_max_lag", "ticker_idle_period", "rotation_period", "rotation_bytes", "retention"),
    *("unlogged", "max_bytes"),
)

_PRIMARY_KEY = """
select a.attname::text as name
  from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any (i.indkey)
 where i.indrelid = to_regclass(%s) and i.indisprimary"""


def prepare(pair: Pair, *, fence: bool = True, tell: Callable[[str], None] = lambda _: None) -> None:
    """Make in the target what the reverse replica will read: gdq, the queue, capture, sequences; and raise the fence.

    It may be repeated, also after new tables. `fence`: the target takes no writes of the application until the switch.
    `tell` gets a line for each step. GdqError if a database belongs to another switchover, if the switch was made, or
    if the target could not be captured without an echo.
    """
    for connection in (pair.source, pair.target):
        _refuse_other(pair, read_state(connection))
    refuse_source(pair.target, pair.queue, pair.replica)
    here = read_state(pair.source)
    if here is not None and here.side == "target":
        raise half_done()
    tables = pair.tables()
    copied = replica_tables(pair.target, pair.queue, pair.replica)
    if waiting := sorted(set(tables) - set(copied)):
        command = f"gdq replicate {pair.queue} {pair.replica} ..."
        raise GdqError(f"the replica has not copied {', '.join(waiting)} yet", hint=f"Run first: {command}")
    captured = {info.table_name: info for info in table_info(pair.source, pair.queue) if info.table_name in tables}
    if echo := sorted(name for name, info in captured.items() if info.always):
        raise GdqError(
            f"table {', '.join(echo)} is captured with --always: what the replica writes would come back",
            hint=f"gdq alter-table {pair.queue} TABLE --no-always",
        )
    if installed_mark(pair.target) != version_mark():  # else it may be another role's
        install(conninfo_of(pair.target))
    tell("gdq is installed in the target")
    if has_event_triggers(pair.source) and not has_event_triggers(pair.target):
        try:
            create_event_triggers(pair.target)
        except psycopg.errors.InsufficientPrivilege as refused:
            tell(f"no event triggers in the target: {refused.diag.message_primary}")
    _make_queue(pair)
    for info in captured.values():
        _capture(pair, info)
    tell(f"queue {pair.queue} of the target captures {len(captured)} tables")
    _store(pair, fence=fence)
    if fence:
        place_fence(pair.target, tables)
        tell(f"the target takes no writes until the switch: {place(pair.target)}")


def end_switchover(pair: Pair) -> bool:
    """Drop the fence and the state of the switchover in both databases; False if there was none.

    Then both take writes. Queues, capture and consumers stay. GdqError while a switch is half done.
    """
    states = [read_state(connection) for connection in (pair.target, pair.source)]
    for state in states:
        _refuse_other(pair, state)
    if all(state is not None and state.side == "target" for state in states):
        raise half_done()
    known = False
    ended = list[str]()
    for connection, state in zip((pair.target, pair.source), states, strict=True):
        try:
            remove_fence(connection)
            known |= state is not None and forget_state(connection)
        except psycopg.Error as error:
            done = f"ended in {ended[0]}" if ended else "ended nowhere"
            raise GdqError(
                f"the switchover has {done}, and not in {place(connection)}: {str(error).strip().splitlines()[0]}",
                hint=f"Run it again. {END_ALONE}",
            ) from error
        ended.append(place(connection))
    return known


def _refuse_other(pair: Pair, state: SwitchoverState | None) -> None:
    if state is not None and (state.queue, state.replica) != (pair.queue, pair.replica):
        raise GdqError(
            f'the database takes part in the switchover of replica "{state.replica}" of queue {state.queue}',
            hint=f"End that first: gdq switchover {state.queue} {state.replica} ... --end",
        )


def _make_queue(pair: Pair) -> None:
    """The queue with the source's settings, its rules for new tables, and its sequences."""
    [queue] = queue_info(pair.source, pair.queue)
    settings = {name: getattr(queue, name) for name in _QUEUE_SETTINGS if getattr(queue, name) is not None}
    made = create_queue(pair.target, pair.queue, **settings)
    known = read_state(pair.target) is not None
    if not made and not known:
        names = {info.consumer_name for info in consumer_info(pair.target, pair.queue)}
        if pair.replica in names:
            raise GdqError(
                f'queue {pair.queue} of the target has a consumer "{pair.replica}" already',
                hint="Unregister it, or give the replica another name: the reverse replica needs this one.",
            )
    for rule in new_table_info(pair.source, pair.queue):
        add_new_tables(pair.target, pair.queue, [rule.pattern], excepted=rule.excepted, **rule.options)
    for sequence in sequence_info(pair.source, pair.queue):
        add_sequence(pair.target, pair.queue, sequence.sequence_name)


def _capture(pair: Pair, info: TableInfo) -> None:
    """Capture a table of the target with the options that it has in the source."""
    name = info.table_name
    primary = {row.name for row in named_rows(pair.target, _PRIMARY_KEY, [name])}
    options: dict[str, Any] = {
        "key": None if set(info.key or ()) == primary else info.key,
        "granularity": info.granularity,
        "origin": info.origin,
        "pin_search_path": info.pin_search_path,
        "allow_rls": info.allow_rls,
        # a key may have been dropped since
        "unchanged": "once" if info.unchanged == "omit" and not info.key else info.unchanged,
    }
    there = {one.table_name for one in table_info(pair.target, pair.queue)}

    def captured() -> None:
        with pair.target.transaction():
            if name in there:
                alter_table_options(pair.target, pair.queue, name, always=False, **options)
            else:
                add_table(pair.target, pair.queue, name, **options)

    try_while_locked(captured)


def _store(pair: Pair, *, fence: bool) -> None:
    """Store the sides of both databases: the target's first, so that a source alone is nobody's."""
    # the way back keeps its state in the source
    ReplicaState(pair.source, pair.queue, pair.replica, origin_of(pair.target)).load()
    sides: tuple[tuple[Connection[Any], Connection[Any], Side], ...] = (
        (pair.target, pair.source, "target"),
        (pair.source, pair.target, "source"),
    )
    # as many on both, also where one side has lost its state
    known = [state for state in (read_state(pair.source), read_state(pair.target)) if state is not None]
    turns = max((state.turns for state in known), default=0)
    for connection, other, side in sides:
        with connection.transaction():
            make_state(connection)
            store_state(connection, pair.queue, pair.replica, side=side, turns=turns, other=place(other))
            if side == "target" and fence:
                raise_fence(connection, place(other))
            else:
                lower_fence(connection)
