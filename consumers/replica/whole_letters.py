"""Dead letters of tables without a key: rows that the target lacks, or has though they went.

A dead letter says that the target has `local` in place of `remote`, one of which may be nothing. It is met by the
opposite change: a row that went from the source and that the target never took, or a row that came back and that the
target still has. Both are done with then. A change of the same kind as a dead letter is another row, and has nothing to
do with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdq.consumers.replica.changes import STAGE, same_key
from gdq.consumers.replica.refusal import WHOLE
from gdq.consumers.replica.table import ReplicaTable
from gdq.sql_text import literal, quote


def meeting_sql(table: ReplicaTable, letters: str) -> str:
    """Statement that takes from the stage what meets dead letters, and gives their numbers.

    A row that went, in place of which the target has another one, becomes that one.
    """
    places = _places(table)
    return f"""
        with aside as ({letters}),
             pair as materialized (
               select s.place, p.letter
                 from (select ctid as place, is_new, {places},
                              row_number() over (partition by is_new, {places}) as time from {STAGE}) s
                 join (select letter, owed, {places},
                              row_number() over (partition by owed, {places} order by letter) as time from aside) p
                   on p.owed <> s.is_new and p.time = s.time and {same_key(table, "p", "s")}),
             gone as (delete from {STAGE} s using pair where s.ctid = pair.place),
             kept as (insert into {STAGE} (is_new, {places})
                      select false, {_stored(table, "d.local")}
                        from pair join gdq_target.replica_dead_letter d on d.dead_letter_id = pair.letter
                       where d.remote is not null and d.local is not null)
        select letter from pair"""


def staging_sql(table: ReplicaTable, letters: str) -> str:
    """Statement that puts what dead letters say into the stage: rows that the target lacks, and those it has still."""
    found = f"gdq_target.replica_dead_letter d join ({letters}) l on l.letter = d.dead_letter_id"
    return f"""
        insert into {STAGE} (is_new, {_places(table)})
        select true, {_stored(table, "d.remote")} from {found} where d.remote is not null
        union all select false, {_stored(table, "d.local")} from {found} where d.local is not null"""


def whole_letters_sql(table: ReplicaTable, replica: str, letters: Sequence[int] | None = None) -> str:
    """SELECT of a table's dead letters, or some: letter, whether the source has the row (owed), and its values."""
    image = _stored(table, "coalesce(d.remote, d.local)", named=True)
    found = of_table_sql(table, replica, letters)
    return f"select d.dead_letter_id as letter, d.remote is not null as owed, {image} {found}"


def held_rows_sql(table: ReplicaTable, replica: str) -> str:
    """SELECT of the rows that the target has though they went."""
    return (
        f"select {_stored(table, 'd.local', named=True)} {of_table_sql(table, replica, None)} and d.local is not null"
    )


def refused_rows_sql(table: ReplicaTable, refused: str, letters: str) -> str:
    """SELECT of the refused rows, as dead letters have them: each with that one of some dead letters that it is."""
    places = _places(table)
    texts = ", ".join(f"w.c{place}::text as {quote(column.name)}" for place, column in enumerate(table.columns, 1))
    image = f"(select to_jsonb(x) from (select {texts}) x)"
    return f"""
        select p.letter, case when w.is_new then 'insert' else 'delete' end as operation, {image} as key,
               case when not w.is_new then {image} end as local, case when w.is_new then {image} end as remote,
               w.sqlstate, w.reason
          from (select w.*, r.sqlstate, r.reason, row_number() over (partition by is_new, {places}) as time
                  from {WHOLE} w join unnest({refused}) r(number, sqlstate, reason) on r.number = w.number) w
          left join (select letter, owed, {places},
                            row_number() over (partition by owed, {places} order by letter) as time
                       from ({letters}) l) p
            on p.owed = w.is_new and p.time = w.time and {same_key(table, "p", "w")}"""


def _places(table: ReplicaTable) -> str:
    return ", ".join(f"c{place}" for place in range(1, len(table.columns) + 1))


def of_table_sql(table: ReplicaTable, replica: str, letters: Sequence[int] | None) -> str:
    """FROM of a table's dead letters d, or of some of them."""
    some = "" if letters is None else f" and d.dead_letter_id = any ({literal(list(letters))}::bigint[])"
    return (
        f"from gdq_target.replica_dead_letter d where d.replica = {literal(replica)} "
        f"and d.table_name = {literal(table.name)}{some}"
    )


def _stored(table: ReplicaTable, image: str, *, named: bool = False) -> str:
    """The values of a stored row, in the types that they have in the staging table."""
    return ", ".join(
        column.stored(image) + (f" as c{place}" if named else "") for place, column in enumerate(table.columns, 1)
    )
