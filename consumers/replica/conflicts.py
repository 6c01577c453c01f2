"""Conflicts: rows of the target that are not as the source's changes suppose, found set-based and settled in the stage.

But for their list, nothing here runs until applying a batch has failed, or rows are to be compared. A settled conflict
is an edit of the staging table: a row that is skipped leaves it, and a row that is in the way becomes one that is
updated or deleted. So the same statements apply what is left, and conflicts that follow from others are found in the
next round.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import Connection
from psycopg.rows import namedtuple_row

from gdq.call import rows
from gdq.consumers.replica.changes import STAGE, found_sql, same_key
from gdq.consumers.replica.policy import DIFFERING, Answer, Kind
from gdq.consumers.replica.state import check_replica
from gdq.consumers.replica.table import INDEX_EQUALITY, ReplicaTable, same_part
from gdq.consumers.replica.whole_rows import lacking_sql
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.shown import Shown
from gdq.sql_text import quote, raw

# The target's rows that are in the way of staged ones, and the conflicts that are made of them.
_CLASH = "pg_temp.gdq_replica_clash"
_FOUND = "pg_temp.gdq_replica_found"
_COLUMNS = "staged, kind, key, local, remote"
_NO_CLASH = "create temp table gdq_replica_clash (staged tid, relid oid, local tid) on commit drop"

_UNIQUE_KEYS = f"""
select pg_get_expr(i.indpred, i.indrelid) as predicate, i.indnullsnotdistinct as nulls_equal,
       {INDEX_EQUALITY} as equals,
       array(select pg_get_indexdef(i.indexrelid, n, false) from generate_series(1, i.indnkeyatts) n) as parts,
       array(select a.attname::text from pg_attribute a
              where a.attrelid = i.indrelid
                and (a.attnum = any (i.indkey)
                     or exists (select from pg_depend d
                                 where d.classid = 'pg_class'::regclass and d.objid = i.indexrelid
                                   and d.refclassid = d.classid and d.refobjid = i.indrelid
                                   and d.refobjsubid = a.attnum))) as columns
  from pg_index i where i.indrelid = to_regclass(%s) and i.indisunique and i.indisvalid"""


@dataclass(frozen=True, slots=True, repr=False)
class ConflictInfo(Shown):
    """A conflict that a replica has settled: the rows as they were in the target and in the source.

    `local`: None where the target had no row, a list where several were in the way. `remote`: None for a deleted row.
    """

    conflict_id: int
    replica_name: str
    table_name: str
    kind: str
    key: dict[str, Any]
    local: Any
    remote: Any
    tick: int
    noted_at: datetime
    resolution: str


def settle_conflicts(
    target: Connection[Any],
    table: ReplicaTable,
    answers: dict[Kind, Answer],
    replica: str,
    tick: int,
    *,
    refused: str | None,
) -> int:
    """Find the staged rows that rows of the target are in the way of, or that it lacks, and settle them.

    `refused`: SELECT of the keys whose newer rows were refused, by letters_sql(): what the target has of them is old,
    and in nobody's way. Returns the conflicts' number, 0 if the target is as the changes suppose; GdqError if the
    answer to one is an error.
    """
    clashes = _clashes_sql(target, table, refused)
    target.execute(raw(f"create temp table gdq_replica_clash on commit drop as {clashes}" if clashes else _NO_CLASH))
    number = _settle(target, table, _conflicts_sql(table, answers), replica, tick)
    target.execute(f"drop table {_CLASH}")
    return number


def settle_differing(
    target: Connection[Any], table: ReplicaTable, answers: dict[Kind, Answer], replica: str, tick: int
) -> int:
    """Settle the rows that the source updated or deleted and that were not the same in the target before.

    Without a key such a row is one that the target lacks.
    """
    if not table.keyed:
        return 0
    wanted = {kind: answer for kind, answer in answers.items() if kind in DIFFERING}
    if not wanted:
        return 0
    target.execute(raw(_NO_CLASH))
    number = _settle(target, table, _differing_sql(table, wanted), replica, tick)
    target.execute(f"drop table {_CLASH}")
    return number


def conflict_info(target: Connection[Any], replica: str | None = None) -> list[ConflictInfo]:
    """The conflicts that a replica has settled, or all replicas of the target, oldest first.

    GdqError if the target holds no replica of this name.
    """
    check_replica(target, replica)
    query = qualified("""
        select conflict_id, replica as replica_name, table_name, kind, key, local, remote, tick, noted_at, resolution
          from gdq_target.replica_conflict where replica = coalesce(%s, replica) order by conflict_id""")
    try:
        return rows(target, ConflictInfo, query, replica)
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return []


def _settle(target: Connection[Any], table: ReplicaTable, query: str, replica: str, tick: int) -> int:
    """Note the conflicts that a query finds, and edit the stage; GdqError for those that stop the replica."""
    target.execute(raw(f"create temp table gdq_replica_found on commit drop as {query}"))
    number = _stop_at_errors(target, table)
    if number:
        target.execute(
            """insert into gdq_target.replica_conflict (replica, table_name, kind, key, local, remote, tick, resolution)
               select %s, %s, kind, key, local, remote, %s, resolution from pg_temp.gdq_replica_found""",
            [replica, table.name, tick],
        )
        for statement in _edits(table):
            target.execute(raw(statement))
    target.execute(f"drop table {_FOUND}")
    return number


def _stop_at_errors(target: Connection[Any], table: ReplicaTable) -> int:
    """The number of conflicts found; GdqError that names the first one whose answer is an error."""
    row = target.execute(
        f"""select count(*), count(*) filter (where resolution = 'error'),
                   (array_agg(kind || ', key ' || key::text order by key) filter (where resolution = 'error'))[1]
              from {_FOUND}"""
    ).fetchone()
    assert row is not None
    number, errors, first = row
    if errors:
        more = f" and {errors - 1} more" if errors > 1 else ""
        raise GdqError(
            f"conflict in table {table.name} of the target: {first}{more}",
            hint="Somebody else has changed the target. Say what to do about it by --on-conflict, or copy the table "
            f"again: gdq replicate ... --copy-again '{table.name}'",
        )
    return int(number)


def _edits(table: ReplicaTable) -> list[str]:
    """Statements that turn settled conflicts into changes that the target takes."""
    if not table.keyed:
        return [
            f"""delete from {table.target} t using {_FOUND} f, {_CLASH} c
                 where f.resolution = 'apply' and c.staged = f.staged and t.tableoid = c.relid and t.ctid = c.local""",
            f"""delete from {STAGE} s using {_FOUND} f
                 where s.ctid = f.staged and (f.resolution = 'skip' or f.kind = 'delete_missing')""",
        ]
    listed = ", ".join(f"c{place}" for place, column in enumerate(table.columns, 1) if column.is_key)
    return [
        # a row in the way under another key goes; that of the same key is updated
        f"""delete from {table.target} t using {_FOUND} f, {_CLASH} c, {STAGE} s
             where f.resolution = 'apply' and c.staged = f.staged and s.ctid = f.staged
               and t.tableoid = c.relid and t.ctid = c.local and not ({found_sql(table)})""",
        f"""insert into {STAGE} (is_new, {listed})
            select false, {listed} from {_FOUND} f join {STAGE} s on s.ctid = f.staged
             where f.resolution = 'apply' and f.kind in ('insert_exists', 'multiple_unique')
               and exists (select from {table.target} t where {found_sql(table)})
               and not exists (select from {STAGE} o where not o.is_new and {same_key(table, "o", "s")})""",
        f"""delete from {STAGE} s using {_FOUND} f, {STAGE} r
             where r.ctid = f.staged and {same_key(table, "r", "s")}
               and (f.resolution = 'skip' or f.kind = 'delete_missing' or (f.kind = 'update_missing' and not s.is_new))
            """,
    ]


def _clashes_sql(target: Connection[Any], table: ReplicaTable, refused: str | None) -> str:
    """SELECT of new rows and the target's rows that have one of their unique keys, and are not changed themselves.

    Empty if the target has no such keys.
    """
    with target.cursor(row_factory=namedtuple_row) as cursor:
        found: list[Any] = cursor.execute(_UNIQUE_KEYS, [table.name]).fetchall()
    travelling = {column.name for column in table.columns}
    old = "" if refused is None else f" and not exists (select from ({refused}) p where {found_sql(table, 'p')})"
    selects = []
    for key in found:
        # a key over columns that the target computes itself cannot be foreseen: applying the row shows it
        if not travelling.issuperset(key.columns):
            continue
        parts = ", ".join(f'({part}) as "!k{n}"' for n, part in enumerate(key.parts))
        where = f"where {key.predicate}" if key.predicate else ""
        same = " and ".join(
            same_part(f's."!k{n}"', f't."!k{n}"', equal, nulls_equal=key.nulls_equal)
            for n, equal in enumerate(key.equals)
        )
        selects.append(f"""
            select s.staged, t."!table" as relid, t."!row" as local
              from (select "!staged" as staged, {parts} from ({_named_sql(table)}) r {where}) s,
                   (select *, tableoid as "!table", ctid as "!row", {parts} from {table.target} {where}) t
             where {same} and not exists (select from {STAGE} o where not o.is_new and {found_sql(table, "o")})
                   {old}""")
    return " union ".join(selects)


def _named_sql(table: ReplicaTable) -> str:
    """SELECT of the staged new rows under the names of the target's columns; "!staged" is the place in the stage."""
    values = ", ".join(
        f"{column.staged('s', place)} as {quote(column.name)}" for place, column in enumerate(table.columns, 1)
    )
    return f'select s.ctid as "!staged", {values} from {STAGE} s where s.is_new'


def _conflicts_sql(table: ReplicaTable, answers: dict[Kind, Answer]) -> str:
    """SELECT of the conflicts: the staged row, kind, key, local and remote row, and what is done about it."""
    # joins, since conditions with EXISTS within CASE would be looked up for each row
    partner, lacking = "p.is_new is not null", "t.tableoid is null"
    joined = f"""left join {STAGE} p on p.is_new <> s.is_new and {same_key(table, "p", "s")}
            left join {table.target} t on {found_sql(table)}"""
    if not table.keyed:
        # no row is both old and new, and the target may have the same row several times
        partner, lacking = "false", "l.staged is not null"
        joined = f"left join ({lacking_sql(table)}) l on l.staged = s.ctid"
    newer = "".join(f", bool_and({_newer_sql(table, name, 's')}) as newer_{n}" for n, name in _deciding(answers))
    decided = "".join(f", c.newer_{n}" for n, _ in _deciding(answers))
    return f"""
        with clash as (
          select c.staged, count(*) as rows, jsonb_agg(to_jsonb(t.*)) as local{newer}
            from {_CLASH} c
            join {STAGE} s on s.ctid = c.staged
            join {table.target} t on t.tableoid = c.relid and t.ctid = c.local
           group by c.staged
        ), found as (
          select s.ctid as staged,
                 case when not s.is_new then 'delete_missing'
                      when {partner} and {lacking} then 'update_missing'
                      when c.rows > 1 then 'multiple_unique'
                      when {partner} then 'update_exists'
                      else 'insert_exists' end as kind,
                 {_staged_object(table, "s", key=True)} as key,
                 case when c.rows > 1 then c.local else c.local->0 end as local,
                 case when s.is_new then {_staged_object(table, "s")} end as remote{decided}
            from {STAGE} s
            left join clash c on c.staged = s.ctid
            {joined}
           where case when s.is_new then c.staged is not null or ({partner} and {lacking})
                      else not {partner} and {lacking} end
        )
        select {_COLUMNS}, {_resolution_sql(answers)} as resolution from found"""


def _differing_sql(table: ReplicaTable, answers: dict[Kind, Answer]) -> str:
    """SELECT like _conflicts_sql() of old rows that are in the target, but with other values than in the source."""
    other = " or ".join(
        f"{text(f't.{quote(column.name)}')} is distinct from {text(column.staged('s', place))}"
        for place, column in enumerate(table.columns, 1)
        for text in (column.travelling if column.stage == "text" else str,)
    )
    newer = "".join(
        f""", case when p.is_new then {_newer_sql(table, name, "p")}
                   else {_value(table, name, "s")} > t.{quote(name)} end as newer_{n}"""
        for n, name in _deciding(answers)
    )
    return f"""
        with found as (
          select s.ctid as staged, case when p.is_new then 'update_differs' else 'delete_differs' end as kind,
                 {_staged_object(table, "s", key=True)} as key, to_jsonb(t.*) as local,
                 case when p.is_new then {_staged_object(table, "p")} end as remote{newer}
            from {STAGE} s
            join {table.target} t on {found_sql(table)}
            left join {STAGE} p on p.is_new and {same_key(table, "p", "s")}
           where not s.is_new and ({other})
        )
        select {_COLUMNS}, {_resolution_sql(answers)} as resolution from found
         where kind in ({", ".join(f"'{kind}'" for kind in answers)})"""


def _deciding(answers: dict[Kind, Answer]) -> list[tuple[int, str]]:
    """The columns by which conflicts are decided, numbered."""
    return list(enumerate(sorted({answer.column for answer in answers.values() if answer.action == "newest"})))


def _resolution_sql(answers: dict[Kind, Answer]) -> str:
    """Expression of what is done about a conflict. A row that is missing has no age: the other one is kept."""
    numbers = {name: n for n, name in _deciding(answers)}
    done = {
        kind: f"case when newer_{numbers[answer.column]} then 'apply' else 'skip' end"
        if answer.action == "newest" and not kind.endswith("_missing")
        else "'apply'"
        if answer.action == "newest"
        else f"'{answer.action}'"
        for kind, answer in answers.items()
    }
    return "case kind " + " ".join(f"when '{kind}' then {answer}" for kind, answer in done.items()) + " end"


def _newer_sql(table: ReplicaTable, name: str, alias: str) -> str:
    """Condition that a staged row is newer than row t, by a column; NULL is oldest.

    Of two rows of one age both databases must take the same one: that with the greater text.
    """
    remote, local = _value(table, name, alias), f"t.{quote(name)}"
    ours = ", ".join(f"t.{quote(column.name)}" for column in table.columns)
    of_target = f"(select to_jsonb(x) from (select {ours}) x)"
    return f"""case when {remote} is distinct from {local} then coalesce({remote} > {local}, {local} is null)
        else {_staged_object(table, alias)}::text collate "C" > {of_target}::text collate "C" end"""


def _value(table: ReplicaTable, name: str, alias: str) -> str:
    """The staged value of a column."""
    return next(c.staged(alias, place) for place, c in enumerate(table.columns, 1) if c.name == name)


def _staged_object(table: ReplicaTable, alias: str, *, key: bool = False) -> str:
    """A staged row, or its key, as a JSON object; a row without a key is its own."""
    values = ", ".join(
        f"{column.staged(alias, place)} as {quote(column.name)}"
        for place, column in enumerate(table.columns, 1)
        if column.is_key or not key or not table.keyed
    )
    return f"(select to_jsonb(x) from (select {values}) x)"
