"""What a batch has of each table of a replica: rows, TRUNCATE, other columns and names, and what no row tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from psycopg import Connection
from psycopg.rows import namedtuple_row

from gdq.batch import Batch
from gdq.consumers.replica.origin import PassedOrigins
from gdq.consumers.replica.source_tables import source_tables
from gdq.consumers.replica.state import ReplicaState
from gdq.errors import mapped_errors

# Events of the queue that rows do not show. An event without a number says that capture is off: the gap comes later.
_EVENTS = """
select distinct e.tbl from gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot) e
 where e.kind <> 'message' and e.ev_id is not null"""

_TABLE_EVENTS = """
select t.name, t.relid::bigint, g.ev_id, g.kind, g.data
  from unnest(%s::text[], %s::oid[]) t(name, relid), gdq.batch_gaps(%s, %s, t.relid::regclass) g order by g.ev_id"""

_TABLES = "select tbl::oid::bigint from gdq.batch_tables(%s, %s)"


class CopyAgain(Exception):  # noqa: N818 (a signal)
    """These tables have to be copied before the batch can be applied."""

    def __init__(self, *tables: str) -> None:
        super().__init__(*tables)
        self.tables = set(tables)


@dataclass(frozen=True, slots=True)
class Move:
    """A table that gets another name at the end of a batch; `name` None: that the source has no longer."""

    relid: int
    name: str | None
    dropped: bool = False


@dataclass(slots=True)
class TableChanges:
    """What a batch has of a table: the last TRUNCATE's number, the versions with rows, and those that DDL made."""

    truncated: int | None = None
    with_rows: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)


def is_plain(changes: dict[str, TableChanges], moves: list[Move]) -> bool:
    """True if a batch has rows of one version of each table, and nothing else."""
    return not moves and all(
        found.truncated is None and not found.made and len(found.with_rows) == 1 for found in changes.values()
    )


def changes_of(
    source: Connection[Any], state: ReplicaState, passed: PassedOrigins, batch: Batch
) -> tuple[dict[str, TableChanges], list[Move]]:
    """What a batch has of each table, and which get other names or go.

    CopyAgain for those that were not copied, or whose rows do not tell all.
    """
    changes, moves, stale = _events(source, state, passed, batch)
    unknown = set()
    for (relid,) in source.execute(_TABLES, [batch.id, batch.token], prepare=True).fetchall():
        known = state.names.get(relid)
        if known is None:
            unknown.add(relid)
            continue
        with_rows = [version.id for version in batch.versions(str(relid))]
        found = changes.setdefault(known, TableChanges())
        found.with_rows = with_rows
        # what capture was made to log otherwise, without DDL, is in no line with the rows that are there
        if not {state.tables[known].columns.version, *found.made}.issuperset(with_rows):
            stale.add(known)
    _copy_first(source, state, unknown, stale)
    # a batch names some tables that have nothing in it; one that cannot be copied any more stays as it is
    return {name: found for name, found in changes.items() if found != TableChanges() and name not in stale}, moves


def _copy_first(source: Connection[Any], state: ReplicaState, unknown: set[int], stale: set[str]) -> None:
    """CopyAgain for those of these tables that the source still has."""
    if not unknown and not stale:
        return
    now = source_tables(source, state.queue, state.name)
    relids = unknown | {relid for relid, name in state.names.items() if name in stale}
    if names := {now[relid].table_name for relid in relids if relid in now and now[relid].is_there}:
        raise CopyAgain(*names)


def _events(
    source: Connection[Any], state: ReplicaState, passed: PassedOrigins, batch: Batch
) -> tuple[dict[str, TableChanges], list[Move], set[str]]:
    """The tables that were truncated in a batch, or whose columns changed; those with other names, or that went.

    And those with changes that no row shows: gaps of capture, other options of it, TRUNCATE of a partition.
    """
    found: dict[str, TableChanges] = {}
    moves, stale = [], set()
    for event in _read_events(source, state, batch):
        data = event.data or {}
        if event.kind == "truncate" and passed.has(data.get("origin")):
            continue
        if event.kind == "truncate" and "partition" not in data:
            found.setdefault(event.name, TableChanges()).truncated = event.ev_id
        elif event.kind == "ddl" and "dropped" in data:
            moves.append(Move(event.relid, None, dropped=data["tag"] != "remove_table"))
        elif event.kind != "ddl" or "options" in data:
            stale.add(event.name)
        else:
            # a new name or an empty new partition does not concern the rows
            if "new_version" in data:
                found.setdefault(event.name, TableChanges()).made.append(data["new_version"])
            if "old_table" in data:
                moves.append(Move(event.relid, data["table"]))
    return found, moves, stale


def _read_events(source: Connection[Any], state: ReplicaState, batch: Batch) -> list[Any]:
    """The events of a batch's tables that are no rows and no messages."""
    values = [state.queue, batch.snapshot_from, batch.snapshot_to]
    with mapped_errors(), source.cursor(row_factory=namedtuple_row) as cursor:
        if not cursor.execute(_EVENTS, values, prepare=True).fetchall():
            return []
        # an event may have an older name of its table, or a newer one than the target
        taken = source_tables(source, state.queue, state.name)
        looked_at = {relid: name for relid, name in state.names.items() if relid in taken}
        names = [*looked_at.values()], [*looked_at.keys()]
        return cursor.execute(_TABLE_EVENTS, [*names, batch.id, batch.token]).fetchall()
