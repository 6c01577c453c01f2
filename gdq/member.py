"""Members of cooperative consumers: workers that share one stream, each with its own batches."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
from psycopg import Connection

from gdq.call import call, rows
from gdq.conninfo import connect, conninfo_of
from gdq.errors import StaleBatch
from gdq.shown import Shown
from gdq.steps import AnyConnection

log = logging.getLogger(__name__)

DEAD_AFTER = timedelta(minutes=5)

# A member shows this often within `dead_after` that it is alive.
_SIGNS = 3

# At the end of a batch a sign that is on its way is waited for this long.
_LAST_SIGN_SECONDS = 1.0


@dataclass(frozen=True, slots=True, repr=False)
class MemberInfo(Shown):
    """One member of a consumer, its open batch, and the time since the member got that batch."""

    queue_name: str
    consumer_name: str
    member_name: str
    batch_id: int | None
    held_for: timedelta | None


def named(queue: str, consumer: str, member: str | None = None) -> str:
    """A consumer as reprs name it."""
    name = f"{consumer!r} of queue {queue!r}"
    return name if member is None else f"{name}, member {member!r}"


def register_member(connection: Connection[Any], queue: str, consumer: str, member: str) -> bool:
    """Add a member to a consumer, which becomes cooperative; False if the member was registered already."""
    return bool(call(connection, "register_member", queue, consumer, member))


def unregister_member(connection: Connection[Any], queue: str, consumer: str, member: str) -> bool:
    """Delete a member; the next member that asks gets its open batch. False if there was no such member."""
    return bool(call(connection, "unregister_member", queue, consumer, member))


def member_info(connection: Connection[Any], queue: str | None = None, consumer: str | None = None) -> list[MemberInfo]:
    """The members of all consumers, of those of one queue, or of one."""
    return rows(connection, MemberInfo, "select * from gdq.member_info(%s, %s)", queue, consumer)


@contextlib.contextmanager
def stay_alive(connection: Connection[Any], batch: int, token: UUID, dead_after: timedelta) -> Iterator[None]:
    """Show within the block that the member which holds a batch is alive, see show_alive()."""
    end = show_alive(connection, batch, token, dead_after)
    try:
        yield
    finally:
        end()


def show_alive(connection: AnyConnection, batch: int, token: UUID, dead_after: timedelta) -> Callable[[], None]:
    """Show that the member which holds a batch is alive, so that no other member takes the batch over.

    A thread calls gdq.touch_batch() on a second connection, which is made only once the batch was held for a third of
    `dead_after`. A process that stands still shows nothing. Returns the function that ends it.
    """
    every = dead_after.total_seconds() / _SIGNS
    if every <= 0:
        return lambda: None
    done = threading.Event()
    arguments = (conninfo_of(connection), batch, token, every, done)
    signs = threading.Thread(target=_show_signs, args=arguments, name=f"gdq batch {batch}", daemon=True)
    signs.start()

    def end() -> None:
        done.set()
        signs.join(_LAST_SIGN_SECONDS)

    return end


def _show_signs(conninfo: str, batch: int, token: UUID, every: float, done: threading.Event) -> None:
    """Touch a batch until `done`, or until it is stale, which its member will learn by itself."""
    while not done.wait(every):
        try:
            with connect(conninfo, autocommit=True) as beside:
                call(beside, "touch_batch", batch, token)
                while not done.wait(every):
                    call(beside, "touch_batch", batch, token)
        except StaleBatch:
            return
        except psycopg.Error as error:
            log.warning("a member could not show that it is alive: %s", str(error).partition("\n")[0])
