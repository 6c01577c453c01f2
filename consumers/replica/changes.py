"""The changes of a batch, one table at a time: netted in the source, copied to the target, and applied there by key.

Images are added up with their signs, old ones -1 and new ones +1. What remains is at most one old and one new image of
a key, whatever the order in which the log has them: a trigger of the application may turn it round within a statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection

from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.views.change_source import NEW_OPS, OLD_OPS
from gdq.consumers.views.row_copy import copy_rows
from gdq.sql_text import quote, raw

STAGE = "pg_temp.gdq_replica_stage"

# Rows from which on the planner is told what the staging table holds; below that its guess does.
_ANALYZE_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class Applied:
    """Rows of the target that were changed, by one table's changes or those of a whole batch, and those that were not.

    `conflicts` were settled, `dead_letters` were refused and put aside.
    """

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    conflicts: int = 0
    dead_letters: int = 0

    def __add__(self, other: Applied) -> Applied:
        return Applied(
            self.inserted + other.inserted,
            self.updated + other.updated,
            self.deleted + other.deleted,
            self.conflicts + other.conflicts,
            self.dead_letters + other.dead_letters,
        )


def netted_sql(table: ReplicaTable, log_rows: str, after: int | None, *, whole: bool = False) -> str:
    """SELECT of a table's net change from its log rows: is_new, then the columns; of a row that went only its key.

    `after`: the number of the last TRUNCATE among them; earlier changes are part of what it emptied. `whole`: of a row
    that went, too, all columns.
    """
    places = range(1, len(table.columns) + 1)
    images = ", ".join(
        f"(case when s.w < 0 then d.{quote(column.old)} else d.{quote(column.new)} end)"
        f"{'::text' if column.stage == 'text' else ''} as c{place}"
        for place, column in zip(places, table.columns, strict=True)
    )
    values = ", ".join(
        f"c{place}" if column.is_key or whole else f"case when net > 0 then c{place} end"
        for place, column in zip(places, table.columns, strict=True)
    )
    later = "" if after is None else f" and d.ev_id > {after}"
    listed = ", ".join(f"c{place}" for place in places)
    return f"""select net > 0, {values}
      from (select {listed}, sum(w) as net
              from (select s.w, {images} from ({log_rows}) as d, (values (-1), (1)) as s(w)
                     where case when s.w < 0 then d.ev_op in {OLD_OPS} else d.ev_op in {NEW_OPS} end{later}) as image
             group by {listed} having sum(w) <> 0) as netted"""


def stage_changes(source: Connection[Any], target: Connection[Any], table: ReplicaTable, query: str) -> None:
    """Copy a table's net change into the staging table, which is made for it."""
    make_stage(target, table)
    staged = copy_rows(source, f"({query})", target, STAGE, form="binary")
    if staged.rows >= _ANALYZE_ROWS:
        target.execute(f"analyze {STAGE}")


def make_stage(target: Connection[Any], table: ReplicaTable) -> None:
    """Make the staging table of a table, in the open transaction."""
    columns = ", ".join(f"c{place} {column.stage}" for place, column in enumerate(table.columns, 1))
    target.execute(raw(f"create temp table gdq_replica_stage (is_new boolean, {columns}) on commit drop"))


def drop_stage(target: Connection[Any]) -> None:
    """Drop the staging table, so that the next table can have it."""
    target.execute(f"drop table {STAGE}")


def empty_table(target: Connection[Any], name: str) -> None:
    """Delete all rows of a target table, by DELETE where the server refuses TRUNCATE for a foreign key."""
    found = target.execute("select relkind = 'p' from pg_class where oid = to_regclass(%s)", [name]).fetchone()
    # rows of inheritance children are not its own
    rows_of = name if found is not None and found[0] else f"only {name}"
    try:
        with target.transaction():
            target.execute(raw(f"truncate {rows_of}"))
    except psycopg.errors.FeatureNotSupported:
        target.execute(raw(f"delete from {rows_of}"))


def update_rows(target: Connection[Any], table: ReplicaTable) -> Applied:
    """Delete the rows that went, update those that stay, insert those that came."""
    partner = f"select from {STAGE} p where {{}} p.is_new and {same_key(table, 'p', 's')}"
    went = f"{found_sql(table)} and not s.is_new and not exists ({partner.format('')})"
    deleted = target.execute(raw(f"delete from {table.target} t using {STAGE} s where {went}")).rowcount
    changed = [(place, column) for place, column in enumerate(table.columns, 1) if column.settable]
    assigned = ", ".join(f"{quote(column.name)} = {column.staged('s', place)}" for place, column in changed)
    stays = f"{found_sql(table)} and s.is_new and exists ({partner.format('not')})"
    updated = 0
    if assigned:
        query = f"update {table.target} t set {assigned} from {STAGE} s where {stays}"
        updated = target.execute(raw(query)).rowcount
    came = f"s.is_new and not exists ({partner.format('not')})"
    return Applied(_insert(target, table, came), updated, deleted)


def replace_rows(target: Connection[Any], table: ReplicaTable) -> Applied:
    """Delete all rows that went or changed, and insert what they are now."""
    query = f"delete from {table.target} t using {STAGE} s where {found_sql(table)} and not s.is_new"
    deleted = target.execute(raw(query)).rowcount
    return Applied(_insert(target, table, "s.is_new"), 0, deleted)


def _insert(target: Connection[Any], table: ReplicaTable, condition: str) -> int:
    values = ", ".join(column.staged("s", place) for place, column in enumerate(table.columns, 1))
    return target.execute(
        raw(
            f"insert into {table.name} ({table.column_list}) overriding system value "
            f"select {values} from {STAGE} s where {condition}"
        )
    ).rowcount


def found_sql(table: ReplicaTable, alias: str = "s") -> str:
    """Condition that row t of the target has the key of a staged row."""
    return " and ".join(
        f"t.{quote(column.name)} = {column.staged(alias, place)}"
        for place, column in enumerate(table.columns, 1)
        if column.is_key
    )


def same_key(table: ReplicaTable, one: str, other: str) -> str:
    """Condition that two staged rows have one key."""
    return " and ".join(
        f"{column.staged(one, place)} = {column.staged(other, place)}"
        for place, column in enumerate(table.columns, 1)
        if column.is_key
    )
