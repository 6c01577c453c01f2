"""The leader of a copy: locks all tables, then takes and exports the one snapshot that its workers read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection
from psycopg.errors import LockNotAvailable

from gdq.call import try_while_locked
from gdq.conninfo import connect
from gdq.consumers.copy.pieces import CopyChoice, SourceTable, describe_source_table
from gdq.consumers.views.signals import TableWanted
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.sql_text import PIN_TRANSACTION, PINNED_SETTINGS, raw
from gdq.typed.pgtypes import READ_SETTINGS

# Shorter than the server's deadlock_timeout: a transaction of the application that waits for a table while it holds
# another one is never the victim.
_LOCK_TIMEOUT = "500ms"

# Values of both sides have one text. SET takes no snapshot, which has to come after the locks.
COPY_SETTINGS = "; ".join(
    [PIN_TRANSACTION, *(f"set local {n} = '{value}'" for n, value in READ_SETTINGS.items() if n not in PINNED_SETTINGS)]
)


@dataclass(frozen=True, slots=True)
class CopyLead:
    """The leader's open transaction, the tables as it sees them, and the open connections of its workers."""

    holder: SnapshotHolder
    tables: tuple[SourceTable, ...]
    readers: tuple[Connection[Any], ...]
    block_size: int


@contextlib.contextmanager
def lead_copy(
    source: str | None, choices: Sequence[CopyChoice], workers: int, *, generated: bool = False
) -> Iterator[CopyLead]:
    """Open the leader's session and `workers` others, which all see one snapshot of locked tables until the block ends.

    Locks are ACCESS SHARE. `generated`: generated columns are copied like others. Raises LockNotAvailable of
    psycopg.errors if others hold a table for 20 seconds.
    """
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(contextlib.closing(connect(source, application_name="gdq:copy/leader")))
        readers = [
            stack.enter_context(contextlib.closing(connect(source, application_name=f"gdq:copy/{number}")))
            for number in range(1, workers + 1)
        ]
        yield try_while_locked(lambda: _take(leader, readers, choices, generated=generated))
        # the block's work is done whatever becomes of a transaction that has only read
        for connection in (*readers, leader):
            connection.rollback()


def _take(
    leader: Connection[Any], readers: Sequence[Connection[Any]], choices: Sequence[CopyChoice], *, generated: bool
) -> CopyLead:
    """Lock, take the snapshot, and have the readers join it; nothing stays open after an error."""
    try:
        locked = _locked(leader, choices)
        leader.execute(raw(f"set transaction isolation level repeatable read, read only; {COPY_SETTINGS}"))
        leader.execute(raw(f"set local lock_timeout = '{_LOCK_TIMEOUT}'; lock table {locked} in access share mode"))
        row = leader.execute(
            "select pg_current_snapshot()::text, pg_export_snapshot(), current_setting('block_size')::int"
        ).fetchone()
        assert row is not None
        tables = tuple(describe_source_table(leader, choice, generated=generated) for choice in choices)
        holder = SnapshotHolder(leader, row[0], row[1], locked)
        for reader in readers:
            try:
                holder.join(reader)
            except TableWanted as error:
                raise LockNotAvailable(str(error)) from error
            reader.execute(raw(f"set transaction read only; {COPY_SETTINGS}"))
        return CopyLead(holder, tables, tuple(readers), row[2])
    except BaseException:
        for connection in (leader, *readers):
            if not connection.closed:
                connection.rollback()
        raise


def _locked(leader: Connection[Any], choices: Sequence[CopyChoice]) -> str:
    """The tables as LOCK TABLE names them: children of inheritance are tables of their own, partitions are not."""
    names = [choice.table for choice in choices]
    query = """select c.relkind operator(pg_catalog.=) 'p'
                 from pg_catalog.unnest(%s::pg_catalog.text[]) with ordinality as n(name, place)
                 join pg_catalog.pg_class c on c.oid operator(pg_catalog.=) n.name::pg_catalog.regclass
                order by n.place"""
    whole = [partitioned for (partitioned,) in leader.execute(query, [names]).fetchall()]
    leader.rollback()
    return ", ".join(name if tree else f"only {name}" for name, tree in zip(names, whole, strict=True))
