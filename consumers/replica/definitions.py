"""What a table has beside its columns, as the catalogs of a database say: indexes, constraints, defaults, NOT NULL.

It is read by the server's own functions, and compared as their text: nothing here reads a command of DDL.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from psycopg import Connection
from psycopg.rows import class_row

from gdq.call import scalar
from gdq.consumers.copy.pieces import HOLDS_NO_NULL
from gdq.sql_text import quote

Kind = Literal["default", "not null", "index", "unique", "exclusion", "check", "foreign key"]

# Without its name and its table an index is the same in another database. One that is being made is none yet. Indexes
# of constraints come with these. A primary key is the table's, as its columns are.
_DEFINITIONS = f"""
with taken as (select n as relid from unnest(%s::oid[]) n), found as (
select i.indrelid as relid, 'index' as kind, i.indexrelid as id, c.relname::text as name,
       case when i.indisunique then 'unique ' else '' end
         || substr(pg_get_indexdef(c.oid), 1 + length(format('CREATE %%sINDEX %%I ON %%s%%I.%%I ',
              case when i.indisunique then 'UNIQUE ' end, c.relname, case when c.relkind = 'I' then 'ONLY ' end,
              n.nspname, r.relname))) as definition,
       case when i.indisunique and i.indpred is null and i.indexprs is null and not i.indnullsnotdistinct then array(
         select a.attname::text from unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) n
           join pg_attribute a on a.attrelid = i.indrelid and a.attnum = n order by 1) end as unique_columns
  from pg_index i
  join taken t on t.relid = i.indrelid
  join pg_class c on c.oid = i.indexrelid
  join pg_class r on r.oid = i.indrelid
  join pg_namespace n on n.oid = r.relnamespace
 where i.indisvalid
   and not exists (select from pg_constraint k where k.conindid = c.oid and k.contype in ('p', 'u', 'x'))
union all
select k.conrelid,
       case k.contype when 'u' then 'unique' when 'x' then 'exclusion' when 'c' then 'check' else 'foreign key' end,
       k.oid, k.conname::text, pg_get_constraintdef(k.oid),
       case when k.contype = 'u' and not k.condeferrable
                 and pg_get_constraintdef(k.oid) !~ '^UNIQUE NULLS|WITHOUT OVERLAPS' then array(
         select a.attname::text from pg_attribute a
          where a.attrelid = k.conrelid and a.attnum = any (k.conkey) order by 1) end
  from pg_constraint k
  join taken t on t.relid = k.conrelid
 where k.contype in ('u', 'x', 'c', 'f') and k.conparentid = 0
union all
select d.adrelid, 'default', d.adnum::oid, a.attname::text, pg_get_expr(d.adbin, d.adrelid), null
  from pg_attrdef d
  join taken t on t.relid = d.adrelid
  join pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum
 where a.attgenerated = ''
union all
select a.attrelid, 'not null', a.attnum::oid, a.attname::text, 'not null', null
  from pg_attribute a
  join taken t on t.relid = a.attrelid
 where a.attnum > 0 and {HOLDS_NO_NULL} and not a.attisdropped)
select relid::bigint, kind, id::bigint, name, definition, unique_columns
  from found where definition is not null order by 1, 2, 3"""

# Changes with every definition, and with some other DDL. A renamed column is in the definitions of its indexes.
_MARK = """
with taken as (select n as relid from unnest(%s::oid[]) n)
select md5(string_agg(row, ',' order by row))
  from (select format('i%%s %%s %%s', i.indexrelid, i.xmin, c.xmin) as row
          from pg_index i join taken t on t.relid = i.indrelid join pg_class c on c.oid = i.indexrelid
         where i.indisvalid
        union all select format('k%%s %%s', k.oid, k.xmin) from pg_constraint k join taken t on t.relid = k.conrelid
        union all select format('d%%s %%s', d.oid, d.xmin) from pg_attrdef d join taken t on t.relid = d.adrelid
        union all select format('a%%s %%s %%s', a.attrelid, a.attnum, a.xmin)
                    from pg_attribute a join taken t on t.relid = a.attrelid where a.attnum > 0) as rows"""


@dataclass(frozen=True, slots=True)
class Definition:
    """An index, a constraint, a default or NOT NULL of a table.

    `id`: by which a database knows it under any name; of a column its number. `name`: of a default and NOT NULL that
    of the column. `unique_columns`: of a unique index or constraint.
    """

    relid: int
    kind: Kind
    id: int
    name: str
    definition: str
    unique_columns: list[str] | None = None

    @property
    def key(self) -> tuple[int, str, int]:
        """What tells it from all others of its database."""
        return self.relid, self.kind, self.id

    @property
    def of_column(self) -> bool:
        """True for a default and NOT NULL."""
        return self.kind in ("default", "not null")

    def shown(self, table: str) -> str:
        """The definition, named as in a line that is told."""
        of = f"column {table}.{quote(self.name)}" if self.of_column else f"{quote(self.name)} of {table}"
        return f"{self.kind} of {of}" if self.of_column else f"{self.kind} {of}"

    def create_sql(self, table: str) -> str:
        """The statement that makes it in a table of another database."""
        name = quote(self.name)
        if self.kind == "index":
            how = self.definition.removeprefix("unique ")
            unique = "" if how == self.definition else "unique "
            return f"create {unique}index {name} on {table} {how}"
        if self.kind == "default":
            return f"alter table {table} alter column {name} set default {self.definition}"
        if self.kind == "not null":
            return f"alter table {table} alter column {name} set not null"
        return f"alter table {table} add constraint {name} {self.definition}"

    def drop_sql(self, table: str, schema: str) -> str:
        """The statement that drops it from a table of another database, which is in a schema."""
        name = quote(self.name)
        if self.kind == "index":
            return f"drop index {schema}.{name}"
        if self.of_column:
            return f"alter table {table} alter column {name} drop {self.kind}"
        return f"alter table {table} drop constraint {name}"

    def rename_sql(self, table: str, schema: str, name: str) -> str:
        """The statement that gives an index or a constraint another name."""
        if self.kind == "index":
            return f"alter index {schema}.{quote(self.name)} rename to {quote(name)}"
        return f"alter table {table} rename constraint {quote(self.name)} to {quote(name)}"


def definitions(connection: Connection[Any], relids: Collection[int]) -> dict[tuple[int, str, int], Definition]:
    """The definitions of some tables of a database."""
    with connection.cursor(row_factory=class_row(Definition)) as cursor:
        return {found.key: found for found in cursor.execute(_DEFINITIONS, [list(relids)])}


def definitions_mark(connection: Connection[Any], relids: Collection[int]) -> str:
    """A text that is another one whenever definitions of some tables have changed."""
    return str(scalar(connection, _MARK, list(relids)))
