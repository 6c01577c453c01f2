"""Change sources: they give a refresh the changes of its tables; and the SQL of the queue's log rows.

A log row is one change in a captured table's log, with an old image, a new image or both. Other sources give relations
with the same columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumers.views.signals import NeedsFull
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.errors import TruncatedPosition, mapped_errors
from gdq.plan.table import WEIGHT_COLUMN
from gdq.qualified_sql import qualified
from gdq.sql_text import quote
from gdq.view.view import ViewInfo

# The operations of log rows that have an old image, and those that have a new one.
OLD_OPS, NEW_OPS = "('D', 'U', 'o')", "('I', 'U', 'n')"

# Types whose equal values are identical to the bit, unless a collation says otherwise.
_EXACT = re.compile(
    r"smallint|integer|bigint|oid|boolean|uuid|date|text|character varying(\(\d+\))?|numeric\(\d+,\d+\)"
    r"|timestamp(\(\d\))? with(out)? time zone"
)

# Types whose values take a few bytes.
_SHORT = re.compile(
    r"smallint|integer|bigint|oid|real|double precision|boolean|uuid|date|interval|numeric\(\d\d?,\d\d?\)"
    r"|time(stamp)?(\(\d\))? with(out)? time zone"
)

# Types of which arrays can be made, which have the same values again when they are read from text.
_FLAT = re.compile(
    r'smallint|integer|bigint|oid|real|double precision|boolean|uuid|date|text|name|"char"|bytea|json|jsonb|inet|cidr'
    r"|character varying(\(\d+\))?|character\(\d+\)|numeric(\(\d+,-?\d+\))?|interval"
    r"|time(stamp)?(\(\d\))? with(out)? time zone"
)

# The first event that log rows do not show, or for each table the SELECT of its log rows. Plans take columns that
# updates may leave out for columns that the log does not have.
_CHANGED = qualified("""
with event as materialized (
  select kind, tbl from gdq.delta_events(%(queue)s, %(s0)s::pg_snapshot, %(s1)s::pg_snapshot,
                                        %(tables)s::text[]::pg_catalog.regclass[])
   where kind <> 'message' limit 1)
select t.name, e.kind, e.tbl, case when e.kind is null then
         gdq.delta_sql(%(queue)s, t.name::pg_catalog.regclass, %(s0)s::pg_snapshot, %(s1)s::pg_snapshot,
                       array(select l.name from gdq.table_columns(%(queue)s, t.name::pg_catalog.regclass) l
                              where l.omitted)) end
  from pg_catalog.unnest(%(tables)s::text[]) with ordinality as t(name, i)
  left join event e on true order by i""")


class ChangeSource:
    """Gives the changes of one view's tables between two snapshots; the methods stand in a refresh's order of calls.

    `holder` holds the second snapshot; `s0` is the first one, None in a full load. A method that a source does not
    define does nothing.
    """

    def begin(self) -> None:
        """Prepare before the new snapshot is taken; GdqError for a view that cannot use this source."""

    def why_full(self, holder: SnapshotHolder) -> str | None:
        """Why the source lacks changes since the stored position; None if it has all."""

    def changed(self, holder: SnapshotHolder, s0: str | None) -> dict[str, str]:
        """The changed tables, each with the SELECT of its log rows; NeedsFull if log rows do not show every change."""
        raise NotImplementedError

    def write(self, connection: Connection[Any]) -> None:
        """Create the relations that the SELECTs read, in the transaction of `connection` that will read them."""

    def move(self, connection: Connection[Any]) -> None:
        """Store the source's own position: with the target's, or after the commit of a target elsewhere."""

    def applied(self) -> None:
        """Release the applied changes: the target's position is committed."""

    def close(self) -> None:
        """End the attempt, also a failed one; begin() may follow."""


class QueueChangeSource(ChangeSource):
    """Change source of a queue: a refresh reads the log's rows in place and calls check_position() itself."""

    def __init__(self, view: ViewInfo) -> None:
        self._view = view

    def changed(self, holder: SnapshotHolder, s0: str | None) -> dict[str, str]:
        """The tables with log rows in (s0, held snapshot]; NeedsFull after an event that log rows do not show."""
        if s0 is None:
            return {}
        view, found = self._view, {}
        values = {"queue": view.queue_name, "tables": list(view.tables), "s0": s0, "s1": holder.snapshot}
        try:
            with mapped_errors():
                rows = holder.connection.execute(_CHANGED, values, prepare=True).fetchall()
        except TruncatedPosition as error:
            raise NeedsFull("the changes since the target's position are gone") from error
        for table, kind, of_table, select in rows:
            if kind is not None:
                raise NeedsFull(f"{kind} of {of_table}")
            if not select.endswith(" where false"):  # as delta_sql() writes it for no rows
                found[table] = select
        return found


@dataclass(frozen=True, slots=True)
class LogColumn:
    """A column of a captured table and its columns in the log. `collation`: set if it is not the type's default.

    `omitted`: updates may leave out a large value of it, which both images then lack.
    """

    name: str
    type: str
    log_type: str
    as_text: bool
    is_key: bool
    log_key: str | None
    log_old: str | None
    log_new: str | None
    collation: str | None
    omitted: bool = False

    @property
    def is_exact(self) -> bool:
        """True if equal values of the column are identical to the bit."""
        return self.collation is None and _EXACT.fullmatch(self.type) is not None

    @property
    def is_short(self) -> bool:
        """True if no value of the column takes more than a few bytes."""
        return _SHORT.fullmatch(self.type) is not None

    @property
    def is_flat(self) -> bool:
        """True if values of the column can be elements of arrays: arrays cannot, whatever their type is called."""
        return _FLAT.fullmatch(self.type) is not None

    @property
    def element(self) -> str:
        """The type of the column's values in an array of them."""
        return self.type if self.is_flat else "text"

    def image(self, new: bool) -> str | None:
        """The log column with the old or new value (for a key column of mode pk the key); None if there is none."""
        return (self.log_new if new else self.log_old) or self.log_key


@dataclass(frozen=True, slots=True)
class LoggedRows:
    """The log rows of one table: their SELECT, and the columns of the table that are taken from them."""

    select: str
    columns: tuple[LogColumn, ...]

    @property
    def images(self) -> str:
        """The rows as signed images, as weighted_log_rows() gives them."""
        return weighted_log_rows(self.select, self.columns)

    def is_exact(self, names: Sequence[str]) -> bool:
        """True if equal values of all these columns are identical to the bit."""
        return {*names} <= {column.name for column in self.columns if column.is_exact}


def log_columns(connection: Connection[Any], queue: str, table: str) -> list[LogColumn]:
    """The logged columns of a captured table."""
    return log_columns_of(connection, queue, [table])[table]


def log_columns_of(connection: Connection[Any], queue: str, tables: Sequence[str]) -> dict[str, list[LogColumn]]:
    """The logged columns of captured tables, in one statement."""
    query = qualified("""
        select w.name as of_table, l.name, l.type, l.log_type, l.as_text, l.is_key, l.log_key, l.log_old, l.log_new,
               case when a.attcollation <> t.typcollation
                    then pg_catalog.format('%%I.%%I', n.nspname, c.collname) end as collation, l.omitted
          from (select n as name, n::pg_catalog.regclass as relid from pg_catalog.unnest(%(tables)s::text[]) n) w
          cross join lateral gdq.table_columns(%(queue)s, w.relid) l
          join pg_catalog.pg_attribute a on a.attrelid = w.relid and a.attnum = l.attnum
          join pg_catalog.pg_type t on t.oid = a.atttypid
          left join pg_catalog.pg_collation c on c.oid = a.attcollation
          left join pg_catalog.pg_namespace n on n.oid = c.collnamespace
         order by l.attnum""")
    found: dict[str, list[LogColumn]] = {table: [] for table in tables}
    with mapped_errors():
        for of_table, *column in connection.execute(query, {"queue": queue, "tables": list(tables)}, prepare=True):
            found[of_table].append(LogColumn(*column))
    return found


def weighted_log_rows(rows: str, columns: Sequence[LogColumn]) -> str:
    """Log rows as signed images for FROM: WEIGHT_COLUMN -1 or 1, then the table's columns with their types."""
    images = [
        f", case when s.w < 0 then {_typed(c, new=False)} else {_typed(c, new=True)} end as {quote(c.name)}"
        for c in columns
        if c.image(new=True)
    ]
    return (
        f"(select s.w as {quote(WEIGHT_COLUMN)}{''.join(images)} from ({rows}) as d, (values (-1), (1)) as s(w) "
        f"where case when s.w < 0 then d.ev_op in {OLD_OPS} else d.ev_op in {NEW_OPS} end)"
    )


def stored_images(rows: str, columns: Sequence[LogColumn]) -> str:
    """The same of the relation `rows`, if it is stored: to read it twice takes less than to decide at each row."""
    sides = []
    for weight, new, ops in ((-1, False, OLD_OPS), (1, True, NEW_OPS)):
        images = [f", {_typed(c, new)} as {quote(c.name)}" for c in columns if c.image(new=True)]
        sides.append(
            f"select {weight} as {quote(WEIGHT_COLUMN)}{''.join(images)} from {rows} as d where d.ev_op in {ops}"
        )
    return f"({' union all '.join(sides)})"


def _typed(column: LogColumn, new: bool) -> str:
    collate = f" collate {column.collation}" if column.collation else ""
    return f"(d.{quote(column.image(new) or '')})::{column.type}{collate}"
