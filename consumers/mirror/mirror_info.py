"""The mirrors of a database, as they are listed: where each stands, and how far it is behind; and dropping one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from psycopg import Connection

from gdq.consumer import ConsumerInfo, consumer_info, unregister_consumer
from gdq.consumers.mirror.state import History, MirrorState, has_mirrors, mirror_mark
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.shown import Shown

_MIRRORS = qualified("""
select m.name, m.queue, m.target, m.history, array(select jsonb_object_keys(m.positions) order by 1), m.tick,
       m.updated_at,
       exists (select from pg_catalog.pg_stat_activity a
                where a.datname = current_database()
                  and a.application_name = left('gdq:' || m.queue || '/' || m.name, 63))
  from gdq_target.mirror m order by 1""")


@dataclass(frozen=True, slots=True, repr=False)
class MirrorInfo(Shown):
    """One mirror: its target, its tables, and the tick that these stand at (None before the first batch).

    `history`: None for tables as they are. `lag` and `unread_events`: of its consumer, None if the queue has no such
    consumer. `state`: `running` while a program applies its changes, `stopped`, `paused` by gdq.pause(), or `no
    consumer`.
    """

    mirror_name: str
    queue_name: str
    target: str
    history: History | None
    tables: list[str]
    state: Literal["running", "stopped", "paused", "no consumer"]
    tick: int | None
    updated_at: datetime
    lag: timedelta | None
    unread_events: int | None
    unread_bytes: int | None


def mirror_info(connection: Connection[Any]) -> list[MirrorInfo]:
    """The mirrors of all queues."""
    consumers = {(info.queue_name, info.consumer_name): info for info in consumer_info(connection)}
    if not has_mirrors(connection):
        return []
    found = []
    for name, queue, target, history, tables, tick, updated_at, connected in connection.execute(_MIRRORS).fetchall():
        info = consumers.get((queue, name))
        found.append(
            MirrorInfo(
                mirror_name=name,
                queue_name=queue,
                target=target,
                history=history,
                tables=tables,
                state=_state(info, connected=connected),
                tick=tick,
                updated_at=updated_at,
                lag=info.lag if info else None,
                unread_events=info.unread_events if info else None,
                unread_bytes=info.unread_bytes if info else None,
            )
        )
    return found


def drop_mirror(connection: Connection[Any], queue: str, name: str, tell: Callable[[str], None]) -> bool:
    """Delete a mirror and its consumer, with what loads have left; its lake tables stay. False if there is none.

    A consumer of that name that is no mirror's stays. `tell` gets a line if the files of loads cannot be reached.
    """
    state = MirrorState(connection, queue, name)
    consumer_info(connection, queue)  # a queue that does not exist is an error, as is a missing right
    with connection.transaction():
        if not state.load():
            return False
        unregister_consumer(connection, queue, name)
        state.drop()
    assert state.target is not None
    try:
        from gdq.consumers.mirror.load_folder import LoadFolders  # noqa: PLC0415 (loads pyarrow, an extra)

        LoadFolders(state.target, mirror_mark(connection, queue, name)).remove_all()
    except (GdqError, ModuleNotFoundError) as error:
        tell(f"what loads of mirror {name} may have left in {state.target}, in _gdq_load, stays: {error}")
    return True


def _state(consumer: ConsumerInfo | None, *, connected: bool) -> Literal["running", "stopped", "paused", "no consumer"]:
    if consumer is None:
        return "no consumer"
    if consumer.paused:
        return "paused"
    return "running" if connected else "stopped"
