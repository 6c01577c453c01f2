"""One portion of a repair: the rows of some keys made equal to the source's, in one transaction of the target.

The rows of these keys are read again on both sides, under locks that keep the target's as they are. So what the
comparison has found decides only which keys are looked at, and rows that agree by now are not touched. Rows of a table
without a key are found by their hashes, and added or taken away as often as they are missing or extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psycopg

from gdq.consumers.replica.changes import (
    PLACE_TAKEN,
    STAGE_NAME,
    Applied,
    release_stage,
    replace_rows,
    stage_changes,
    update_rows,
)
from gdq.consumers.replica.deferrable_keys import check_deferrable_keys
from gdq.consumers.replica.foreign_keys import foreign_keys
from gdq.consumers.replica.joint_sql import StagedTable
from gdq.consumers.replica.joint_statement import JointStatement
from gdq.consumers.replica.origin import bear_origin, origin_of
from gdq.consumers.replica.state import stored_position
from gdq.consumers.replica.table import (
    Fires,
    OnTriggers,
    ReplicaTable,
    SourceColumn,
    match_target,
    suppress_triggers,
)
from gdq.consumers.replica.whole_rows import replace_whole_rows
from gdq.consumers.table_compare.rows import Differing, found_rows, keys_sql, merge
from gdq.consumers.table_compare.sides import Link, TwoSides
from gdq.consumers.table_compare.whole_rows import missing_sql, stage_extra_sql, travelling_values
from gdq.errors import GdqError
from gdq.sql_text import raw

# The name of a row: the texts of its key, or that of its hash.
Key = tuple[str, ...]

# Writers of the target that come after a waiting lock wait too, so it waits for a moment only, and is tried again. The
# lock is against all but readers: behind a row that somebody has locked the portion would wait with all its own locks.
_LOCK_TIMEOUT = "500ms"


class BlockedError(GdqError):
    """Rows of other keys in the target have values of another unique key that rows of the portion need."""


class _UnequalError(GdqError):
    """The target took the rows, and has other values now."""


@dataclass(frozen=True, slots=True)
class RepairedTable:
    """How rows are brought to the target's table, and what fires there until its transaction ends."""

    table: ReplicaTable
    fires: Fires


def repaired_table(sides: TwoSides, triggers: OnTriggers = "refuse") -> RepairedTable:
    """The target's table, whose triggers are kept from firing until its transaction ends, if the role may.

    `triggers`: what is done about triggers of users if not. GdqError if its rows cannot be made equal: without
    columns of the source, by a part of rows that have no key.
    """
    shape = sides.shape
    if not shape.key and shape.others:
        raise GdqError(
            f"table {shape.name} has no key, and its rows are compared in part",
            hint="Leave --columns out, so that whole rows are compared.",
        )
    theirs = {column.name: column.type for column in sides.target.table.columns}
    compared = {*shape.values, *shape.others, *shape.lacking}
    # a type that is another in the target travels as text: its values may be beyond the source's type
    columns = [
        SourceColumn(
            name=column.name,
            stage=column.type if theirs.get(column.name) == column.type else "text",
            is_key=column.name in shape.key,
            padded=column.padded,
        )
        for column in sides.source.table.columns
        if column.name in compared
    ]
    there = sides.target.connection
    fires = suppress_triggers(there, triggers, local=True)
    table = match_target(there, shape.name, columns, fires=fires, once=True)
    table = replace(
        table,
        columns=tuple(
            replace(column, settable=column.settable and column.name in shape.values) for column in table.columns
        ),
        own=(*table.own, *shape.others),
    )
    return RepairedTable(table, fires)


def differing_keys(sides: TwoSides, keys: Sequence[Key]) -> list[Differing]:
    """The rows of some keys that differ now, whatever else is asked of the table's rows."""
    return list(merge(*(found_rows(side, sides.shape, keys) for side in (sides.source, sides.target))))


def counted(differing: Sequence[Differing]) -> Applied:
    """How many rows have to be inserted, updated and deleted."""
    return Applied(
        inserted=sum(row.missing for row in differing),
        updated=sum(row.different for row in differing),
        deleted=sum(row.extra for row in differing),
    )


def repair_portion(
    sides: TwoSides, link: Link | None, keys: Sequence[Key], triggers: OnTriggers = "refuse"
) -> Applied | None:
    """Make the rows of some keys equal to the source's in the target's open transaction; the rows that were changed.

    None if the replica has copied the table anew meanwhile: then nothing was changed. BlockedError if rows of other
    keys are in the way, GdqError if the target does not take the rows. LockNotAvailable of psycopg.errors if somebody
    holds the table.
    """
    repaired = repaired_table(sides, triggers)
    table = repaired.table
    ours = found_rows(sides.source, sides.shape, keys)
    bear_origin(sides.target.connection, origin_of(sides.source.connection), local=True)
    there = sides.target.connection
    there.execute(
        raw(
            f"set local lock_timeout = '{_LOCK_TIMEOUT}'; lock table {table.target} in exclusive mode; "
            "set local lock_timeout to default"
        )
    )
    # a copy does not wait for the lock of the position
    if link is not None and stored_position(there, link.queue, link.replica, table.name) != sides.stored:
        return None
    differing = list(merge(ours, found_rows(sides.target, sides.shape, keys)))
    if differing:
        staged = _staged_sql(sides, table, differing) if table.keyed else missing_sql(sides, table, differing)
        stage_changes(sides.source.connection, there, table, staged)
        if not table.keyed:
            there.execute(raw(stage_extra_sql(sides, table, differing)))
        _apply(sides, repaired, [row.named for row in differing])
        release_stage(there, table)
    return counted(differing)


def _apply(sides: TwoSides, repaired: RepairedTable, keys: Sequence[Key]) -> None:
    """Bring the staged rows to the target's table, and see that they are equal then."""
    there, table = sides.target.connection, repaired.table
    jointly = repaired.fires != "nothing"
    try:
        if jointly:
            # foreign keys fire, and look at the table when the statement ends
            there.execute("set constraints all immediate")
            JointStatement(there, [StagedTable(table, STAGE_NAME)], foreign_keys(there, [table.name])).attempt()
            _check_rows(sides, table, keys)
        else:
            _change_rows(sides, table, keys)
    except psycopg.errors.ForeignKeyViolation as error:
        raise BlockedError(
            f"rows of table {table.name} of the target need others, or others need them: "
            f"{error.diag.message_primary or error}",
            detail=error.diag.message_detail,
            hint="Repair the tables that the foreign keys join together.",
        ) from error
    except PLACE_TAKEN as error:
        raise BlockedError(
            f"rows of table {table.name} of the target are in the way: {error.diag.message_primary or error}",
            detail=error.diag.message_detail,
            hint="Rows swap the values of another unique key, or others than those to be repaired have them.",
        ) from error
    except (psycopg.errors.DataError, psycopg.errors.IntegrityError) as error:
        raise GdqError(
            f"table {table.name} of the target does not take the source's rows: {error.diag.message_primary}",
            detail=error.diag.message_detail,
        ) from error


def _change_rows(sides: TwoSides, table: ReplicaTable, keys: Sequence[Key]) -> None:
    """Change the staged rows while no triggers fire."""
    there = sides.target.connection
    try:
        with there.transaction():
            (update_rows if table.keyed else replace_whole_rows)(there, table)
            _check_rows(sides, table, keys)
    except (*PLACE_TAKEN, _UnequalError):
        # two rows may have swapped the values of another unique key; a column may not be settable
        if not table.keyed:
            raise
        with there.transaction():
            replace_rows(there, table)
            _check_rows(sides, table, keys)


def _check_rows(sides: TwoSides, table: ReplicaTable, keys: Sequence[Key]) -> None:
    """The errors that the server does not raise by itself while triggers stand still, and rows that were not kept."""
    check_deferrable_keys(sides.target.connection, table)
    for row in differing_keys(sides, keys):
        which = f"row of key {', '.join(row.named)}" if sides.shape.key else "rows without a key"
        raise _UnequalError(
            f"table {sides.shape.name} of the target does not keep the source's {which}",
            hint="Has it triggers that are ENABLE ALWAYS or ENABLE REPLICA, or columns that cannot hold the values?",
        )


def _staged_sql(sides: TwoSides, table: ReplicaTable, differing: Sequence[Differing]) -> str:
    """SELECT for the staging table: the keys that the target has, the rows that the source has."""
    shape, here = sides.shape, sides.source
    places = range(1, len(table.columns) + 1)
    values = travelling_values(table)
    key_places = {name: place for place, name in enumerate(shape.key, 1)}
    old = ", ".join(
        f"gdq_key[{key_places[column.name]}]::{column.stage}" if column.is_key else f"null::{column.stage}"
        for column in table.columns
    )
    listed = ", ".join(f"c{place}" for place in places)
    wanted, gone = (
        keys_sql(here.connection, shape, [row.named for row in rows])
        for rows in (
            [row for row in differing if row.different or row.missing],
            [row for row in differing if row.different or row.extra],
        )
    )
    return f"""with wanted as ({wanted})
        select true, {listed} from ({here.found_sql(shape, values)}) as r
         group by gdq_key, {listed} having sum(w) > 0
         union all select false, {old} from ({gone}) as gone"""
