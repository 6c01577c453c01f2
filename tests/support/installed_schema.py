"""The installed schema as text for review: tests/install/schema.txt.

Each object with its columns, constraints, settings, rights and comment, read from the catalogs, so that the text is the
same on every PostgreSQL. The bodies of functions are left out: sql/ has them.
"""

from __future__ import annotations

from typing import Any

from psycopg import Connection

_HEADER = """\
The schema as installed, for review: `make schema` writes this file, tests/install/test_schema.py compares it.
The installer owns what names no other owner. The bodies of functions are in sql/."""

# Rights beside the owner's own, as "grant execute to a, b"; then the owner, where it is another than the schema's.
_RIGHTS = """coalesce((
    select string_agg(format(E'  grant %s to %s\\n', privilege, grantees), '' order by privilege collate "C")
      from (select lower(a.privilege_type) as privilege,
                   string_agg(case a.grantee when 0 then 'public' else a.grantee::regrole::text end, ', '
                              order by a.grantee::regrole::text collate "C") as grantees
              from aclexplode({acl}) a where a.grantee <> {owner} group by 1) g), '')
  || coalesce('  owner ' || nullif({owner}, n.nspowner)::regrole || E'\\n', '')"""

# What pin_settings() sets, shown as one line.
_PINNED = """(array['jit=off', 'array_nulls=on', 'bytea_output=hex', 'DateStyle=ISO, YMD', 'extra_float_digits=1',
                  'IntervalStyle=postgres', 'quote_all_identifiers=off', 'standard_conforming_strings=on',
                  'transform_null_equals=off'])"""

_SCHEMAS = f"""
select format(E'schema %s\\n', n.nspname) || {_RIGHTS.format(acl="n.nspacl", owner="n.nspowner")}
  from pg_namespace n where n.nspname in ('gdq', 'gdq_log') order by n.nspname collate "C"
"""

_RELATIONS = f"""
select case c.relkind when 'S' then 'sequence ' when 'v' then 'view ' else 'table ' end
    || n.nspname || '.' || c.relname || coalesce(
         ' partition of ' || (select inhparent::regclass from pg_inherits where inhrelid = c.oid)
                          || ' ' || pg_get_expr(c.relpartbound, c.oid),
         ' partition by ' || pg_get_partkeydef(c.oid), '')
    || case c.relpersistence when 'u' then ' unlogged' else '' end
    || coalesce(' with (' || array_to_string(c.reloptions, ', ') || ')', '') || E'\\n'
    || coalesce('  ' || obj_description(c.oid, 'pg_class') || E'\\n', '')
    || coalesce((select format(E'  %s increment by %s start %s%s\\n', s.seqtypid::regtype, s.seqincrement, s.seqstart,
                          case when s.seqcycle then ' cycle' else '' end)
                   from pg_sequence s where s.seqrelid = c.oid), '')
    || coalesce((select string_agg(format(E'  column %s %s%s%s%s%s\\n', a.attname, format_type(a.atttypid, a.atttypmod),
                          case when a.attnotnull then ' not null' else '' end,
                          case when a.attidentity <> '' then ' generated as identity' else '' end,
                          ' default ' || pg_get_expr(d.adbin, d.adrelid),
                          ' -- ' || col_description(c.oid, a.attnum)), '' order by a.attnum)
                   from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
                  where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and c.relkind <> 'S'
                    and not c.relispartition), '')
    || coalesce((select string_agg(format(E'  constraint %s %s\\n', k.conname, pg_get_constraintdef(k.oid)), ''
                          order by k.conname collate "C")
                   from pg_constraint k where k.conrelid = c.oid and k.contype <> 'n' and not c.relispartition), '')
    || coalesce((select string_agg('  ' || pg_get_indexdef(i.indexrelid) || E'\\n', ''
                          order by i.indexrelid::regclass::text collate "C")
                   from pg_index i
                  where i.indrelid = c.oid and not c.relispartition
                    and not exists (select from pg_constraint k where k.conindid = i.indexrelid)), '')
    || coalesce((select string_agg('  ' || pg_get_triggerdef(t.oid) || E'\\n', '' order by t.tgname collate "C")
                   from pg_trigger t where t.tgrelid = c.oid and not t.tgisinternal), '')
    || {_RIGHTS.format(acl="c.relacl", owner="c.relowner")}
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where n.nspname in ('gdq', 'gdq_log') and c.relkind in ('r', 'p', 'v', 'S')
 order by n.nspname collate "C", c.relkind = 'S', c.relname collate "C"
"""

# Arguments and columns stand on lines of their own.
_FUNCTIONS = f"""
select case p.prokind when 'p' then 'procedure ' else 'function ' end || n.nspname || '.' || p.proname
    || regexp_replace(format(E'(%s)%s\\n', pg_get_function_arguments(p.oid),
         ' returns ' || pg_get_function_result(p.oid)), ', (?=[^ '']+ )|(?<=\\()(?=[^)])', E'\\n    ', 'g')
    || coalesce('  ' || obj_description(p.oid, 'pg_proc') || E'\\n', '')
    || format(E'  %s%s%s%s%s%s%s%s\\n', l.lanname,
         case p.provolatile when 'i' then ' immutable' when 's' then ' stable' else '' end,
         case when p.proisstrict then ' strict' else '' end, case when p.prosecdef then ' security definer' else '' end,
         case p.proparallel when 's' then ' parallel safe' when 'r' then ' parallel restricted' else '' end,
         case when p.proleakproof then ' leakproof' else '' end,
         case when p.procost not in (1, 100) then ' cost ' || p.procost else '' end
           || case when p.prorows not in (0, 1000) then ' rows ' || p.prorows else '' end,
         concat(
           (select string_agg(E'\\n  set ' || setting, '') from unnest(p.proconfig) setting
             where not p.proconfig @> {_PINNED} or setting <> all ({_PINNED})),
           case when p.proconfig @> {_PINNED} then E'\\n  set what pin_settings() sets' end))
    || {_RIGHTS.format(acl="p.proacl", owner="p.proowner")}
  from pg_proc p join pg_namespace n on n.oid = p.pronamespace join pg_language l on l.oid = p.prolang
 where n.nspname in ('gdq', 'gdq_log')
 order by n.nspname collate "C", p.proname collate "C", pg_get_function_arguments(p.oid) collate "C"
"""

_EVENT_TRIGGERS = """
select format(E'event trigger %s on %s%s execute function %s\\n', evtname, evtevent,
         ' when tag in (' || (select string_agg(quote_literal(tag), ', ' order by tag) from unnest(evttags) tag) || ')',
         evtfoid::regprocedure)
  from pg_event_trigger where evtname like 'gdq%' order by evtname collate "C"
"""


def installed_schema(connection: Connection[Any]) -> str:
    """The text of tests/install/schema.txt for the database of `connection`."""
    connection.execute("set search_path = pg_catalog")  # so that names show their schema
    queries = (_SCHEMAS, _RELATIONS, _FUNCTIONS, _EVENT_TRIGGERS)
    return "\n".join([_HEADER + "\n", *(row[0] for query in queries for row in connection.execute(query.encode()))])
