"""The definition of a copied table: what makes it at the target, from the server's own catalog functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.copy.pieces import HOLDS_NO_NULL, SourceTable
from gdq.sql_text import raw

_TABLE = """
select quote_ident(n.nspname), c.relpersistence = 'u' from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.oid = %s::regclass"""

# The options of a sequence q, as CREATE SEQUENCE and identity columns have them.
SEQUENCE_OPTIONS = """format('increment by %%s minvalue %%s maxvalue %%s start with %%s cache %%s%%s', q.seqincrement,
         q.seqmin, q.seqmax, q.seqstart, q.seqcache, case when q.seqcycle then ' cycle' end)"""

_COLUMNS = f"""
select a.attname::text,
       concat_ws(' ', quote_ident(a.attname), format_type(a.atttypid, a.atttypmod),
         case when a.attcollation <> t.typcollation
              then (select format('collate %%I.%%I', n.nspname, l.collname)
                      from pg_collation l join pg_namespace n on n.oid = l.collnamespace
                     where l.oid = a.attcollation) end,
         case when a.attidentity <> ''
              then format('generated %%s as identity (%%s)',
                          case a.attidentity when 'a' then 'always' else 'by default' end,
                          (select {SEQUENCE_OPTIONS}
                             from pg_depend o join pg_sequence q on q.seqrelid = o.objid
                            where o.classid = 'pg_class'::regclass and o.refclassid = 'pg_class'::regclass
                              and o.refobjid = a.attrelid and o.refobjsubid = a.attnum and o.deptype = 'i')) end,
         case when a.attgenerated <> ''
              then format('generated always as (%%s) %%s', pg_get_expr(d.adbin, d.adrelid),
                          case a.attgenerated when 's' then 'stored' else 'virtual' end) end,
         case when {HOLDS_NO_NULL} then 'not null' end),
       a.attgenerated <> ''
  from pg_attribute a
  join pg_type t on t.oid = a.atttypid
  left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
 where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped
 order by a.attnum"""

_PRIMARY_KEY = """
select pg_get_constraintdef(c.oid),
       array(select a.attname::text from unnest(c.conkey) k
               join pg_attribute a on a.attrelid = c.conrelid and a.attnum = k)
  from pg_constraint c where c.conrelid = %s::regclass and c.contype = 'p'"""

# The sequences that columns own, by the names of the columns.
_SEQUENCES = """
select a.attname::text, format('%%I.%%I', n.nspname, s.relname)
  from pg_depend d
  join pg_class s on s.oid = d.objid and s.relkind = 'S'
  join pg_namespace n on n.oid = s.relnamespace
  join pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
 where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass
   and d.refobjid = %s::regclass and d.refobjsubid > 0 and d.deptype in ('a', 'i')"""


def create_table(leader: Connection[Any], control: Connection[Any], table: SourceTable) -> None:
    """Make a copied table in the target, and its schema if need be, with its columns, NOT NULL and primary key.

    Both sessions write names and types as COPY_SETTINGS of the leader do. Defaults, other constraints and indexes,
    triggers, rights and partitions are not among them. Of chosen columns the table has these alone.
    """
    row = leader.execute(_TABLE, [table.name]).fetchone()
    assert row is not None
    schema, unlogged = row
    copied = {column.name for column in table.columns}
    lines = [
        text
        for name, text, generated in leader.execute(_COLUMNS, [table.name]).fetchall()
        if name in copied or (generated and table.whole)
    ]
    key = leader.execute(_PRIMARY_KEY, [table.name]).fetchone()
    if key is not None and set(key[1]) <= copied:
        lines.append(key[0])
    kind = "unlogged table" if unlogged else "table"
    if scalar(control, "select to_regnamespace(%s) is null", schema):
        control.execute(raw(f"create schema {schema}"))
    control.execute(raw(f"create {kind} {table.name} ({', '.join(lines)})"))


def sequence_values(
    leader: Connection[Any], control: Connection[Any], table: SourceTable
) -> Iterator[tuple[str, list[Any]]]:
    """Statements, with their values, that move the target's sequences of copied columns to where the source's are."""
    own = dict(control.execute(_SEQUENCES, [table.name]).fetchall())
    for column, sequence in leader.execute(_SEQUENCES, [table.name]).fetchall():
        if column in own and any(one.name == column for one in table.columns):
            row = leader.execute(raw(f"select last_value, is_called from {sequence}")).fetchone()
            assert row is not None
            yield "select setval(%s::regclass, %s, %s)", [own[column], *row]
