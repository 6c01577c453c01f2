"""Dead letters: changed rows that the target refused, kept beside it until it takes them.

A dead letter says of one key what the source has, while the target still has an older row of it, or none. So it is
renewed by each later change of its key: if the target takes the row then, the dead letter is settled, and if not, it
holds the newer row. Rows are kept as the texts of their values, from which they are made again. Without a key it says
this of one row, however many are equal (whole_letters).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection
from psycopg.types.json import Jsonb

from gdq.consumers.replica.changes import STAGE, found_sql, same_key
from gdq.consumers.replica.column_changes import SourceColumns
from gdq.consumers.replica.refusal import WHOLE, Refused
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.replica.whole_letters import (
    held_rows_sql,
    meeting_sql,
    of_table_sql,
    refused_rows_sql,
    staging_sql,
    whole_letters_sql,
)
from gdq.qualified_sql import qualified
from gdq.shown import Shown
from gdq.sql_text import literal, quote, raw

_RENAME = """
update gdq_target.replica_dead_letter l
   set (key, local, remote) = (select {key}, {local}, {remote})
 where l.replica = %(replica)s and l.table_name = %(table)s"""
_RENAMED = """
(select jsonb_object_agg(m.value, e.value) from jsonb_each(l.{image}) e
   join jsonb_each_text(%(names)s) m on m.key = e.key)"""

_KEEP = """
merge into gdq_target.replica_dead_letter l using pg_temp.gdq_replica_refused r on l.dead_letter_id = r.letter
 when matched then
      update set operation = r.operation, local = r.local, remote = r.remote, sqlstate = r.sqlstate, reason = r.reason,
                 tick = %(tick)s, died_at = now()
 when not matched then
      insert (replica, table_name, operation, key, local, remote, sqlstate, reason, tick)
      values (%(replica)s, %(table)s, r.operation, r.key, r.local, r.remote, r.sqlstate, r.reason, %(tick)s)"""


@dataclass(frozen=True, slots=True, repr=False)
class ReplicaDeadLetter(Shown):
    """A changed row that the target refused: its key, what the target has (`local`) and the source (`remote`).

    The rows are objects of texts; without a key the whole row stands for it. `operation`: what the target lacks,
    insert, update or delete; `local` is None for an insert and `remote` for a delete. `tick`: the batch that brought
    the row, or the replica's tick when it was tried again. `sqlstate`: None if a trigger of the target kept the row as
    it was, without an error.
    """

    dead_letter_id: int
    replica_name: str
    table_name: str
    operation: str
    key: dict[str, str | None]
    local: dict[str, str | None] | None
    remote: dict[str, str | None] | None
    sqlstate: str | None
    reason: str
    tick: int
    died_at: datetime


class DeadLetters:
    """The dead letters of one replica, in the target's open transaction."""

    def __init__(self, target: Connection[Any], replica: str) -> None:
        self.target = target
        self._replica = replica
        self._tables: set[str] | None = None
        self._tried_again: list[int] = []

    def stage(self, table: ReplicaTable, letters: Sequence[int]) -> None:
        """Put the source's rows of some dead letters into the staging table; of a row that went, its key."""
        if not table.keyed:
            self.target.execute(raw(staging_sql(table, whole_letters_sql(table, self._replica, letters))))
            self._tried_again = list(letters)
            return
        columns = ", ".join(column.stored("coalesce(d.remote, d.key)") for column in table.columns)
        ids = literal(list(letters))
        self.target.execute(
            raw(
                f"insert into {STAGE} select d.remote is not null, {columns} "
                f"from gdq_target.replica_dead_letter d where d.dead_letter_id = any ({ids}::bigint[])"
            )
        )

    def meet_stage(self, table: ReplicaTable) -> list[int]:
        """The dead letters of keys that are staged; for them the stage gets the target's old rows in place of its own.

        What the target has of these keys is not what the source had before. Without a key staged rows and dead letters
        that are each other's opposite are both done with, and so are those that are staged themselves.
        """
        if table.name not in self._known_tables():
            return []
        if not table.keyed and self._tried_again:
            met, self._tried_again = self._tried_again, []
            return met
        if not table.keyed:
            meeting = meeting_sql(table, whole_letters_sql(table, self._replica))
            return [letter for (letter,) in self.target.execute(raw(meeting))]
        staged = f"exists (select from {STAGE} s where {same_key(table, 's', 'p')})"
        query = f"select p.letter from ({letters_sql(table, self._replica)}) p where {staged}"
        met = [letter for (letter,) in self.target.execute(raw(query))]
        if met:
            self.target.execute(raw(_old_rows_sql(table, letters_sql(table, self._replica, met))))
        return met

    def has_any(self, table: str) -> bool:
        """True if a table may have dead letters."""
        return table in self._known_tables()

    def keys_sql(self, table: ReplicaTable) -> str | None:
        """SELECT of the keys of which the target has older rows, as letters_sql(); None if there are none."""
        if table.name not in self._known_tables():
            return None
        return letters_sql(table, self._replica) if table.keyed else held_rows_sql(table, self._replica)

    def settle(self, table: ReplicaTable, met: Sequence[int], refused: Sequence[Refused], tick: int) -> None:
        """Forget the dead letters of keys that were applied, and keep the rows that were refused."""
        kept = self._keep(table, met, refused, tick) if refused else []
        if gone := sorted(set(met).difference(kept)):
            self.target.execute("delete from gdq_target.replica_dead_letter where dead_letter_id = any (%s)", [gone])

    def forget(self, table: str) -> None:
        """Forget the dead letters of a table that is equal to the source's again: it was emptied, or copied."""
        if table in self._known_tables():
            forget_dead_letters(self.target, self._replica, table)

    def look_anew(self) -> None:
        """Look which tables have dead letters when that is needed next: names have changed."""
        self._tables = None

    def rename_columns(self, table: str, old: SourceColumns, new: SourceColumns) -> None:
        """Have a table's dead letters follow ALTER TABLE; a column that was added is NULL in its older rows."""
        if table not in self._known_tables():
            return
        names = {name: new.columns[number][0] for number, (name, _) in old.columns.items() if number in new.columns}
        images = {image: _RENAMED.format(image=image) for image in ("key", "local", "remote")}
        values = {"replica": self._replica, "table": table, "names": Jsonb(names)}
        self.target.execute(raw(_RENAME.format(**images)), values)

    def _known_tables(self) -> set[str]:
        if self._tables is None:
            query = "select distinct table_name from gdq_target.replica_dead_letter where replica = %s"
            self._tables = {table for (table,) in self.target.execute(query, [self._replica])}
        return self._tables

    def _keep(self, table: ReplicaTable, met: Sequence[int], refused: Sequence[Refused], tick: int) -> list[int]:
        """Store refused rows; the numbers of dead letters that were there and hold the newer row now."""
        self._known_tables().add(table.name)
        values = [[one.number for one in refused], [one.sqlstate for one in refused], [one.reason for one in refused]]
        listed = ", ".join(
            f"{literal(value)}::{kind}[]" for value, kind in zip(values, ("int", "text", "text"), strict=True)
        )
        select = (
            _refused_sql(table, listed, letters_sql(table, self._replica))
            if table.keyed
            else refused_rows_sql(table, listed, whole_letters_sql(table, self._replica, met))
        )
        self.target.execute(raw(f"create temp table gdq_replica_refused on commit drop as {select}"))
        self.target.execute(_KEEP, {"replica": self._replica, "table": table.name, "tick": tick})
        query = "select letter from pg_temp.gdq_replica_refused where letter is not null"
        kept = [letter for (letter,) in self.target.execute(query)]
        self.target.execute("drop table pg_temp.gdq_replica_refused")
        return kept


def letters_sql(table: ReplicaTable, replica: str, letters: Sequence[int] | None = None) -> str:
    """SELECT of a table's dead letters, or some of them: letter, and the key's values as a staged row has them."""
    key = "".join(
        f", {column.stored('d.key')} as c{place}" for place, column in enumerate(table.columns, 1) if column.is_key
    )
    return f"select d.dead_letter_id as letter{key} {of_table_sql(table, replica, letters)}"


def forget_dead_letters(target: Connection[Any], replica: str, table: str | None = None) -> None:
    """Forget the dead letters of a replica's table, or of all its tables, in the open transaction."""
    target.execute(
        qualified(
            "delete from gdq_target.replica_dead_letter where replica = %s and table_name = coalesce(%s, table_name)"
        ),
        [replica, table],
    )


def rename_dead_letters(target: Connection[Any], replica: str, table: str, name: str) -> None:
    """Have the dead letters of a replica's table follow it to another name, in the open transaction."""
    query = "update gdq_target.replica_dead_letter set table_name = %s where (replica, table_name) = (%s, %s)"
    target.execute(qualified(query), [name, replica, table])


def _old_rows_sql(table: ReplicaTable, letters: str) -> str:
    """Statement that replaces the staged old rows of some dead letters' keys by those that the target has."""
    places = ", ".join(f"c{place}" for place in range(1, len(table.columns) + 1))
    theirs = ", ".join(column.travelling(f"t.{quote(column.name)}") for column in table.columns)
    return f"""
        with met as materialized ({letters}),
             gone as (delete from {STAGE} s using met p where not s.is_new and {same_key(table, "s", "p")})
        insert into {STAGE} (is_new, {places})
        select false, {theirs} from met p join {table.target} t on {found_sql(table, "p")}"""


def _refused_sql(table: ReplicaTable, refused: str, letters: str) -> str:
    """SELECT of the refused rows, as dead letters have them: each with that one that its key has already."""
    old = f"exists (select from {WHOLE} o where o.number = s.number and not o.is_new)"
    # as they travelled: the target may have no such value of its own type
    values = [(column, f"s.c{place}") for place, column in enumerate(table.columns, 1)]
    key = _texts((column.name, value) for column, value in values if column.is_key)
    remote = _texts((column.name, value) for column, value in values)
    local = _texts((column.name, column.travelling(f"t.{quote(column.name)}")) for column in table.columns)
    return f"""
        select (select min(p.letter) from ({letters}) p where {same_key(table, "p", "s")}) as letter,
               case when not s.is_new then 'delete' when {old} then 'update' else 'insert' end as operation,
               {key} as key, case when t.tableoid is not null then {local} end as local,
               case when s.is_new then {remote} end as remote, s.sqlstate, s.reason
          from (select distinct on (w.number) w.*, r.sqlstate, r.reason
                  from {WHOLE} w join unnest({refused}) r(number, sqlstate, reason) on r.number = w.number
                 order by w.number, w.is_new desc) s
          left join {table.target} t on {found_sql(table)}"""


def _texts(values: Iterable[tuple[str, str]]) -> str:
    """Expression of an object of texts, from names and values."""
    listed = ", ".join(f"{value}::text as {quote(name)}" for name, value in values)
    return f"(select to_jsonb(x) from (select {listed}) x)"
