"""Deferrable unique and exclusion constraints of a target, looked at after rows were changed.

PostgreSQL checks them by triggers, which do not fire in a replica's session. So a row that somebody else has put into
the target would get a double instead of an error.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import Connection
from psycopg.rows import namedtuple_row

from gdq.consumers.replica.changes import STAGE, found_sql
from gdq.consumers.replica.table import INDEX_EQUALITY, ReplicaTable, same_part
from gdq.sql_text import raw

# The operators of a plain unique constraint are not stored with it, but those of its index are.
_CONSTRAINTS = f"""
select k.conname as name, pg_get_expr(i.indpred, i.indrelid) as predicate, i.indnullsnotdistinct as nulls_equal,
       {INDEX_EQUALITY} as equals,
       array(select pg_get_indexdef(i.indexrelid, n, false) from generate_series(1, i.indnkeyatts) n) as parts,
       array(select format('operator(%%I.%%s)', n.nspname, o.oprname)
               from unnest(k.conexclop) with ordinality x(oid, place)
               join pg_operator o on o.oid = x.oid
               join pg_namespace n on n.oid = o.oprnamespace order by x.place) as operators
  from pg_constraint k
  join pg_index i on i.indexrelid = k.conindid
 where k.conrelid = to_regclass(%s) and k.contype in ('p', 'u', 'x') and k.condeferrable order by 1"""


def check_deferrable_keys(target: Connection[Any], table: ReplicaTable, stage: str = STAGE) -> None:
    """UniqueViolation of psycopg.errors if a new row that is staged, and now in the target, has the key of another."""
    if not table.deferrable:
        return
    with target.cursor(row_factory=namedtuple_row) as cursor:
        constraints: list[Any] = cursor.execute(_CONSTRAINTS, [table.name]).fetchall()
    for constraint in constraints:
        if target.execute(raw(_doubles_sql(table, constraint, stage))).fetchone() is not None:
            raise psycopg.errors.UniqueViolation(
                f"a row of table {table.name} would violate the deferrable constraint {constraint.name}"
            )


def _doubles_sql(table: ReplicaTable, constraint: Any, stage: str) -> str:
    """SELECT of a row, if there is one, whose key by a constraint a staged row has, too."""
    same = " and ".join(
        same_part(f't."!k{n}"', f'o."!k{n}"', operator, nulls_equal=constraint.nulls_equal)
        for n, operator in enumerate(constraint.operators or constraint.equals)
    )
    parts = ", ".join(f'({part}) as "!k{n}"' for n, part in enumerate(constraint.parts))
    where = f"where {constraint.predicate}" if constraint.predicate else ""
    rows = f'(select *, tableoid as "!table", ctid as "!row", {parts} from {table.target} {where})'
    return f"""
        select from {stage} s, {rows} t, {rows} o
         where s.is_new and {found_sql(table)} and {same}
           and (t."!table", t."!row") <> (o."!table", o."!row") limit 1"""
