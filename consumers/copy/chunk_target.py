"""The target tables of a chunked copy, in another PostgreSQL or another schema: checked, filled, and changed.

Rows are changed by key, or, where there is none, by their whole texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.copy.chunk_table import ChunkTable, image_sql
from gdq.consumers.copy.target_columns import rows_of, same_form
from gdq.consumers.views.netting import UNKNOWN_ROWS
from gdq.consumers.views.row_copy import copy_rows
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.sql_text import quote, raw
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings

_NAME = qualified("""
select format('%%I.%%I', n.nspname, c.relname), c.relkind
  from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where c.oid = to_regclass(%s)""")

_COLUMNS = qualified("""
select a.attname::text from pg_catalog.pg_attribute a
 where a.attrelid = %s::pg_catalog.regclass and a.attnum > 0 and not a.attisdropped""")

# Whether one index finds a row by its key: rows are deleted by key, and a copy must not bring one twice.
_KEYED = qualified("""
select exists (
  select from pg_catalog.pg_index i
   where i.indrelid = %s::pg_catalog.regclass and i.indisunique and i.indisvalid and i.indpred is null
     and %s::text[] @> array(select a.attname::text from pg_catalog.pg_attribute a
                              where a.attrelid = i.indrelid and a.attnum = any (i.indkey[0:i.indnkeyatts - 1]))
     and 0::smallint <> all (i.indkey))""")

# The server and database that a session is in: a copy of a table into itself would delete its rows.
_PLACE = qualified("""
select current_database() || ' ' || pg_postmaster_start_time()::text || ' ' || current_setting('port')""")


@dataclass(frozen=True, slots=True)
class Staged:
    """What has changed of a table that goes to `target`: `name` is a temporary table of the target's session.

    Its columns: k1, k2 and so on with the key, net, c1, c2 and so on with the row.
    """

    table: ChunkTable
    target: str
    name: str


@dataclass(frozen=True, slots=True)
class ChunkTarget:
    """The session that writes a chunked copy. Each step writes in one transaction of writing()."""

    connection: Connection[Any]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction, in which values are read as they were written, and triggers of the tables stand still."""
        with self.connection.transaction():
            apply_view_settings(self.connection, READ_SETTINGS)
            try:
                with self.connection.transaction():
                    self.connection.execute("set local session_replication_role = replica")
            except psycopg.errors.InsufficientPrivilege:
                pass  # triggers and foreign keys of the target's tables work as for any writer
            yield

    def find(self, name: str) -> str:
        """The qualified name of a target table; GdqError if there is none."""
        row = self.connection.execute(_NAME, [name]).fetchone()
        if row is None or row[1] not in ("r", "p"):
            raise GdqError(
                f"the target has no table {name}", hint="Create it first, with the source's columns and primary key."
            )
        return str(row[0])

    def is_in(self, source: Connection[Any]) -> bool:
        """True if the target is in the source's own database."""
        return bool(scalar(self.connection, _PLACE) == scalar(source, _PLACE))

    def check(self, table: ChunkTable, target: str) -> None:
        """GdqError unless the target has all columns, finds rows by the key if there is one, and is empty."""
        own = {name for (name,) in self.connection.execute(_COLUMNS, [target])}
        missing = {name: kind for name, kind in table.columns if name not in own}
        if missing:
            added = ", ".join(f"add column {quote(name)} {kind}" for name, kind in missing.items())
            raise GdqError(
                f"target table {target} lacks column{'s' if len(missing) > 1 else ''} {', '.join(missing)} "
                f"of table {table.name}",
                hint=f"Say there: alter table {target} {added}; then run the copy again: it goes on.",
            )
        if table.key and not scalar(self.connection, _KEYED, target, list(table.key)):
            raise GdqError(
                f"target table {target} has no primary key or unique index on {', '.join(table.key)}",
                hint="Create one, and run the copy again: it goes on.",
            )
        if scalar(self.connection, raw(f"select exists (select from {rows_of(self.connection, target)})")):
            raise GdqError(f"target table {target} has rows already", hint="Empty it, and run the copy again.")

    def empty(self, target: str) -> None:
        """Delete all rows of a target table whose copy starts again."""
        self.connection.execute(raw(f"delete from {rows_of(self.connection, target)}"))

    def insert(self, holder: SnapshotHolder, table: ChunkTable, query: str, target: str) -> int:
        """Copy the rows of a SELECT of all columns into the target; returns their number."""
        into = f"{target} ({table.listed})"
        names = [name for name, _ in table.columns]
        form = same_form(holder.connection, table.name, self.connection, target, names)
        return copy_rows(holder.connection, f"({query})", self.connection, into, form=form).rows

    def stage(
        self, holder: SnapshotHolder, table: ChunkTable, changed: Sequence[str], target: str, number: int = 1
    ) -> Staged | None:
        """Bring what SELECTs of ChunkTable.changed_rows() give into a temporary table of that number; None if nothing.

        Then the source is not needed to apply() it.
        """
        if not changed:
            return None
        staged = Staged(table, target, f"pg_temp.gdq_changed_{number}")
        keys = [f"t.{quote(name)} as k{number}" for number, name in enumerate(table.key, 1)]
        rows = [f"t.{quote(name)} as c{number}" for number, (name, _) in enumerate(table.columns, 1)]
        listed = ", ".join([*keys, "0::bigint as net", *rows])
        made = (
            f"create temp table gdq_changed_{number} on commit drop as select {listed} from {target} as t with no data"
        )
        self.connection.execute(raw(made))
        holder.connection.execute("set local enable_seqscan = off")  # of a long log only the new part should be read
        query = " union all ".join(f"({one})" for one in changed)
        rows_staged = copy_rows(holder.connection, f"({query})", self.connection, staged.name).rows
        holder.connection.execute("set local enable_seqscan to default")
        if rows_staged > UNKNOWN_ROWS:
            self.connection.execute(raw(f"analyze {staged.name}"))
        return staged

    def apply(self, staged: Staged | None) -> None:
        """Bring the target's rows to the state that is staged."""
        if staged is None:
            return
        table, target, execute = staged.table, staged.target, self.connection.execute
        values = ", ".join(f"c{number}" for number in range(1, len(table.columns) + 1))
        if table.key:
            same = " and ".join(f"t.{quote(name)} = c.k{number}" for number, name in enumerate(table.key, 1))
            own = rows_of(self.connection, target)
            execute(raw(f"delete from {own} as t using {staged.name} as c where {same}"))
        else:
            self._delete_rows(staged)
        came = "where net > 0" if table.key else ", generate_series(1, net)"
        execute(
            raw(
                f"insert into {target} ({table.listed}) overriding system value "
                f"select {values} from {staged.name} {came}"
            )
        )
        execute(raw(f"drop table {staged.name}"))

    def _delete_rows(self, staged: Staged) -> None:
        """Delete as many rows as have gone, each one of those with its text; GdqError if the target lacks one."""
        table, target = staged.table, staged.target
        numbers = range(1, len(table.columns) + 1)
        # the table is read for them
        wanted = scalar(self.connection, raw(f"select sum(-net) from {staged.name} where net < 0")) or 0
        if not wanted:
            return
        own, rows = image_sql(f"t.{quote(name)}" for name, _ in table.columns), rows_of(self.connection, target)
        went = f"select {image_sql(f'c{number}' for number in numbers)} as image, -net as net from {staged.name}"
        deleted = self.connection.execute(
            raw(
                f"with d as materialized (select t.tableoid as rel, t.ctid as place, c.net, "
                f"row_number() over (partition by c.image) as n "
                f"from {rows} as t join ({went} where net < 0) as c on {own} = c.image) "
                f"delete from {rows} as t using d where d.n <= d.net and t.ctid = d.place and t.tableoid = d.rel"
            )
        ).rowcount
        if deleted != wanted:
            raise GdqError(
                f"target table {target} lacks {wanted - deleted} of the rows that it was given",
                hint="Keep other writers from it, and copy it anew.",
            )
