"""What a batch has of each table of a replica: rows, TRUNCATE, other columns and names, and what no row tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from psycopg import Connection
from psycopg.rows import namedtuple_row

from gdq.batch import Batch
from gdq.consumers.replica.origin import PassedOrigins
from gdq.consumers.replica.source_tables import source_tables
from gdq.consumers.replica.state import ReplicaState
from gdq.errors import mapped_errors
from gdq.sequence import SequenceValue

# All that is asked about a batch, in one round trip: the position after it; whether it has events that rows do not
# show; the SELECTs of its rows of each version of the tables; the values of sequences. An event without a number says
# that capture is off: the gap comes later.
_BATCH = """
select gdq.tick_position(%(queue)s, %(tick)s),
       exists (select from gdq.delta_events(%(queue)s, %(since)s::pg_snapshot, %(till)s::pg_snapshot) e
                where e.kind <> 'message' and e.ev_id is not null),
       (select jsonb_agg(jsonb_build_array(t.tbl::oid::bigint, v.version, v.log_rows))
          from gdq.batch_tables(%(id)s, %(token)s) t
          left join lateral (select b.version, gdq.batch_sql(%(id)s, %(token)s, t.tbl, b.version) as log_rows
                               from gdq.batch_versions(%(id)s, %(token)s, t.tbl) b
                              where t.tbl::oid::bigint = any (%(known)s::bigint[])) v on true),
       (select jsonb_agg(jsonb_build_array(s.sequence_name, s.last_value, s.is_called))
          from gdq.batch_sequences(%(id)s, %(token)s, %(changed)s) s)"""

_TABLE_EVENTS = """
select t.name, t.relid::bigint, g.ev_id, g.kind, g.data
  from unnest(%s::text[], %s::oid[]) t(name, relid), gdq.batch_gaps(%s, %s, t.relid::regclass) g order by g.ev_id"""


class CopyAgain(Exception):  # noqa: N818 (a signal)
    """These tables have to be copied before the batch can be applied."""

    def __init__(self, *tables: str) -> None:
        super().__init__(*tables)
        self.tables = set(tables)


@dataclass(frozen=True, slots=True)
class Move:
    """A table that has got another name, or gone: it was dropped, or removed from capture."""

    relid: int
    what: Literal["renamed", "dropped", "removed"]


@dataclass(slots=True)
class TableChanges:
    """What a batch has of a table: the last TRUNCATE's number, the versions that DDL made, and those with rows.

    `log_rows`: the SELECT of each version's rows, oldest first.
    """

    truncated: int | None = None
    log_rows: dict[int, str] = field(default_factory=dict)
    made: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BatchChanges:
    """What a batch has of each table, which tables get other names or go, values of sequences, its end."""

    position: str
    tables: dict[str, TableChanges]
    moves: list[Move]
    sequences: list[SequenceValue]

    @property
    def plain(self) -> bool:
        """True if the batch has rows of one version of each table, and nothing else."""
        return not self.moves and all(
            found.truncated is None and not found.made and len(found.log_rows) == 1 for found in self.tables.values()
        )


def changes_of(
    source: Connection[Any], state: ReplicaState, passed: PassedOrigins, batch: Batch, *, all_sequences: bool = False
) -> BatchChanges:
    """What a batch has; CopyAgain for tables that were not copied, or whose rows do not tell all.

    `all_sequences`: the values of those that the batch has not changed, too.
    """
    values = {
        "queue": state.queue,
        "tick": batch.tick_to,
        "since": batch.snapshot_from,
        "till": batch.snapshot_to,
        "id": batch.id,
        "token": batch.token,
        "known": list(state.names),
        "changed": not all_sequences,
    }
    with mapped_errors():
        row = source.execute(_BATCH, values, prepare=True).fetchone()
    assert row is not None
    position, has_events, with_rows, sequences = row
    changes, moves, stale = _events(source, state, passed, batch) if has_events else ({}, [], set())
    unknown = set()
    for relid, version, log_rows in with_rows or []:
        known = state.names.get(relid)
        if known is None:
            unknown.add(relid)
        elif version is not None:
            changes.setdefault(known, TableChanges()).log_rows[version] = log_rows
    # what capture was made to log otherwise, without DDL, is in no line with the rows that are there
    stale |= {
        name
        for name, found in changes.items()
        if not {state.tables[name].columns.version, *found.made}.issuperset(found.log_rows)
    }
    copy_first(source, state, unknown, stale)
    # a batch names some tables that have nothing in it; one that cannot be copied any more stays as it is
    tables = {name: found for name, found in changes.items() if name not in stale}
    return BatchChanges(position, tables, moves, [SequenceValue(*value) for value in sequences or []])


def copy_first(source: Connection[Any], state: ReplicaState, unknown: set[int], stale: set[str]) -> None:
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
            moves.append(Move(event.relid, "removed" if data["tag"] == "remove_table" else "dropped"))
        elif event.kind != "ddl" or "options" in data:
            stale.add(event.name)
        else:
            # a new name or an empty new partition does not concern the rows
            if "new_version" in data:
                found.setdefault(event.name, TableChanges()).made.append(data["new_version"])
            if "old_table" in data:
                moves.append(Move(event.relid, "renamed"))
    return found, moves, stale


def _read_events(source: Connection[Any], state: ReplicaState, batch: Batch) -> list[Any]:
    """The events of a batch's tables that are no rows and no messages."""
    with mapped_errors(), source.cursor(row_factory=namedtuple_row) as cursor:
        # an event may have an older name of its table, or a newer one than the target
        taken = source_tables(source, state.queue, state.name)
        looked_at = {relid: name for relid, name in state.names.items() if relid in taken}
        names = [*looked_at.values()], [*looked_at.keys()]
        return cursor.execute(_TABLE_EVENTS, [*names, batch.id, batch.token]).fetchall()
