"""Members of cooperative consumers: workers that share one stream, each with batches of its own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from psycopg import Connection
from psycopg.rows import class_row, scalar_row

from gdq.errors import mapped

DEAD_AFTER = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One member of a consumer, with the open batch that it holds and for how long it has."""

    queue_name: str
    consumer_name: str
    member_name: str
    batch_id: int | None
    held_for: timedelta | None


def register_member(connection: Connection[Any], queue: str, consumer: str, member: str) -> bool:
    """Add a member to a consumer, which makes it cooperative; False when it was registered already."""
    return _call(connection, "register_member", queue, consumer, member)


def unregister_member(connection: Connection[Any], queue: str, consumer: str, member: str) -> bool:
    """Forget a member; the batch that it holds goes to the next who asks. False when there was none."""
    return _call(connection, "unregister_member", queue, consumer, member)


def member_info(connection: Connection[Any], queue: str | None = None, consumer: str | None = None) -> list[MemberInfo]:
    """The members of all consumers, of those of one queue, or of one."""
    with mapped(), connection.cursor(row_factory=class_row(MemberInfo)) as cursor:
        return cursor.execute("select * from gdq.member_info(%s, %s)", [queue, consumer]).fetchall()


def _call(connection: Connection[Any], function: str, queue: str, consumer: str, member: str) -> bool:
    with mapped(), connection.cursor(row_factory=scalar_row) as cursor:
        query = f"select gdq.{function}(%s, %s, %s)"
        return bool(cursor.execute(query.encode(), [queue, consumer, member]).fetchone())
