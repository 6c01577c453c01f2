"""Dead letters of a replica listed, tried again or deleted, while the replica may run: it waits for the transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import rows, scalar
from gdq.consumers.replica.changes import IN_STAGE, Staged, make_stage, release_stage
from gdq.consumers.replica.column_changes import SourceColumns
from gdq.consumers.replica.dead_letters import DeadLetters, ReplicaDeadLetter
from gdq.consumers.replica.joint_apply import JointApplier
from gdq.consumers.replica.joint_sql import StagedTable
from gdq.consumers.replica.origin import bear_origin
from gdq.consumers.replica.policy import Policies
from gdq.consumers.replica.refusal import Refused, RowsLackingError, apply_in_parts, refuses_rows
from gdq.consumers.replica.sessions import apply_settings
from gdq.consumers.replica.state import check_replica
from gdq.consumers.replica.table import (
    OnTriggers,
    ReplicaTable,
    SourceColumn,
    has_unique_key,
    match_target,
    suppress_triggers,
)
from gdq.consumers.replica.table_apply import apply_staged
from gdq.qualified_sql import qualified
from gdq.source import Position

_HOLD = qualified("select position, source from gdq_target.replica where name = %s for update")

# The chosen dead letters of each table. Those of one table may have been written under different keys.
_CHOSEN = qualified("""
select d.table_name, t.columns, k.names, array_agg(d.dead_letter_id)
  from gdq_target.replica_dead_letter d
  left join gdq_target.replica_table t on t.replica = d.replica and t.table_name = d.table_name,
       lateral (select array(select n from jsonb_object_keys(d.key) n order by 1) as names) k
 where d.replica = %(replica)s and (%(ids)s::bigint[] is null or d.dead_letter_id = any (%(ids)s::bigint[]))
   and (%(age)s::interval is null or d.died_at < (now() - %(age)s::interval))
 group by 1, 2, 3 order by 1, 3""")


@dataclass(frozen=True, slots=True)
class Replayed:
    """How many dead letters the target has taken, and how many it refuses as before."""

    settled: int = 0
    refused: int = 0


def replica_dead_letters(target: Connection[Any], replica: str | None = None) -> list[ReplicaDeadLetter]:
    """The dead letters of a replica, or of all replicas of the target, oldest first.

    GdqError if the target holds no replica of this name.
    """
    check_replica(target, replica)
    query = qualified("""
        select dead_letter_id, replica as replica_name, table_name, operation, key, local, remote, sqlstate, reason,
               tick, died_at
          from gdq_target.replica_dead_letter where replica = coalesce(%s, replica) order by dead_letter_id""")
    try:
        return rows(target, ReplicaDeadLetter, query, replica)
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return []


def replay_replica_dead_letters(
    target: Connection[Any],
    replica: str,
    ids: Sequence[int] | None = None,
    *,
    older_than: str | None = None,
    triggers: OnTriggers = "refuse",
) -> Replayed:
    """Bring the rows of a replica's dead letters to their tables in a transaction; those that are refused again stay.

    `ids`: only these, by dead_letter_id; `older_than`: only those dead for longer, an interval. `triggers`: what is
    done about triggers that this role cannot keep from firing. GdqError if there is no such replica, or a table cannot
    be written by this role.
    """
    check_replica(target, replica)
    apply_settings(target)
    fires = suppress_triggers(target, triggers)
    refused = total = 0
    with target.transaction():
        row = target.execute(_HOLD, [replica]).fetchone()
        tick = Position.parse(row[0]).tick if row else 0
        if row:
            bear_origin(target, row[1], local=True)
        values = {"replica": replica, "ids": None if ids is None else list(ids), "age": older_than}
        kept = DeadLetters(target, replica)
        joint = None if fires == "nothing" else _joint_replay(target, replica, kept)
        for name, columns, key, letters in target.execute(_CHOSEN, values).fetchall():
            keyed = has_unique_key(target, name, key)
            listed = [
                SourceColumn(name=column, stage="text", is_key=keyed and column in key)
                for column, _ in SourceColumns.stored(columns).columns.values()
            ]
            table = match_target(target, name, listed, fires=fires)
            total += len(letters)
            if joint is None:
                refused += len(_replay(kept, table, letters, tick))
            else:
                refused += joint.apply(table, partial(_stage, kept, table, letters), tick).dead_letters
        if joint is not None:
            refused += joint.finish().dead_letters
    return Replayed(total - refused, refused)


def purge_replica_dead_letters(
    target: Connection[Any], replica: str, ids: Sequence[int] | None = None, *, older_than: str | None = None
) -> int:
    """Delete dead letters of a replica, chosen as for replay_replica_dead_letters(); returns their number.

    The rows of the target stay as they are.
    """
    check_replica(target, replica)
    query = qualified("""
        delete from gdq_target.replica_dead_letter d
         where d.replica = %(replica)s and (%(ids)s::bigint[] is null or d.dead_letter_id = any (%(ids)s::bigint[]))
           and (%(age)s::interval is null or d.died_at < (now() - %(age)s::interval))""")
    values = {"replica": replica, "ids": None if ids is None else list(ids), "age": older_than}
    with target.transaction():
        target.execute(_HOLD, [replica])
        return target.execute(query, values).rowcount


class _JointReplay(JointApplier):
    """Brings dead letters to their tables, all at once: those of a child and of its parent. Conflicts stay refused."""

    def settle(self, staged: StagedTable, refused: str | None) -> int:  # noqa: ARG002
        """No conflict is settled."""
        return 0


def _joint_replay(target: Connection[Any], replica: str, kept: DeadLetters) -> _JointReplay:
    query = qualified("select array(select table_name from gdq_target.replica_table where replica = %s)")
    tables: list[str] = scalar(target, query, replica)
    return _JointReplay(replica, target, Policies(on_error="dead-letter"), kept, lambda: tables)


def _stage(kept: DeadLetters, table: ReplicaTable, letters: Sequence[int]) -> Sequence[Staged]:
    """Stage the rows of some dead letters; it is not told which are pairs."""
    make_stage(kept.target, table)
    kept.stage(table, letters)
    return IN_STAGE


def _replay(kept: DeadLetters, table: ReplicaTable, letters: Sequence[int], tick: int) -> list[Refused]:
    """Apply the rows of a table's dead letters; those that are refused again."""
    target = kept.target
    _stage(kept, table, letters)
    met = kept.meet_stage(table)
    refused = list[Refused]()
    try:
        apply_staged(target, table)
    except (psycopg.Error, RowsLackingError) as error:
        if not refuses_rows(error):
            raise
        _, refused = apply_in_parts(target, table, apply_staged)
    kept.settle(table, met, refused, tick)
    release_stage(target, table)
    return refused
