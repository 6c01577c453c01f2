"""Members of cooperative consumers: workers that share one stream, each with batches of its own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from psycopg import Connection

from gdq.call import call, rows

DEAD_AFTER = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One member of a consumer, its open batch and how long the member has held that."""

    queue_name: str
    consumer_name: str
    member_name: str
    batch_id: int | None
    held_for: timedelta | None


def register_member(connection: Connection[Any], queue: str, consumer: str, member: str) -> bool:
    """Add a member to a consumer, which makes it cooperative; False when it was registered already."""
    return bool(call(connection, "register_member", queue, consumer, member))


def unregister_member(connection: Connection[Any], queue: str, consumer: str, member: str) -> bool:
    """Forget a member; its open batch goes to the next member that asks. False when there was none."""
    return bool(call(connection, "unregister_member", queue, consumer, member))


def member_info(connection: Connection[Any], queue: str | None = None, consumer: str | None = None) -> list[MemberInfo]:
    """The members of all consumers, of those of one queue, or of one."""
    return rows(connection, MemberInfo, "select * from gdq.member_info(%s, %s)", queue, consumer)
