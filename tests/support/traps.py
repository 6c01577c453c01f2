"""Functions and operators of a hostile role, named as those that gdq's SQL uses, which record who runs them."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg

from tests.support.server import Database

# Everything that gdq's SQL calls by name, as traps in a schema that comes before pg_catalog.
TRAPS = r"""
do $do$
declare
  f record;
  made int := 0;
begin
  for f in select p.proname, pg_get_function_identity_arguments(p.oid) as args, pg_get_function_result(p.oid) as result
             from pg_proc p
            where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f' and p.proname = any (%(names)s)
              and pg_get_function_result(p.oid) !~ 'internal|any|trigger|TABLE|SETOF|cstring'
              and pg_get_function_identity_arguments(p.oid) !~ 'internal|any|cstring|OUT' loop
    execute format('create function evil.%%I(%%s) returns %%s language plpgsql as '
      '$f$ begin perform evil.sprung(%%L); %%s end $f$', f.proname, f.args, f.result, f.proname,
      case when f.result <> 'void' then 'return null;' end);
    made := made + 1;
  end loop;
  if made < 50 then
    raise exception 'only %% traps', made;
  end if;
  for f in select distinct o.oprname, l.typname as l, r.typname as r
             from pg_operator o join pg_type l on l.oid = o.oprleft join pg_type r on r.oid = o.oprright
            where o.oprresult = 'bool'::regtype and o.oprname in ('=', '<>', '<', '>', '<=', '>=', '~', '!~')
              and l.typname in ('int2', 'int4', 'int8', 'oid', 'text', 'name', 'char', 'interval', 'timestamptz',
                                'uuid', 'jsonb', 'xid', 'xid8', 'bool', 'pg_snapshot', 'oidvector') loop
    execute format('create function evil.%%I(pg_catalog.%%I, pg_catalog.%%I) returns boolean language plpgsql as '
      '$f$ begin perform evil.sprung(%%L); return null; end $f$', 'op_' || md5(f.oprname), f.l, f.r, f.oprname);
    execute format('create operator evil.%%s '
      '(leftarg = pg_catalog.%%I, rightarg = pg_catalog.%%I, function = evil.%%I)',
      f.oprname, f.l, f.r, 'op_' || md5(f.oprname));
  end loop;
end
$do$
"""


def set_traps(db: Database) -> None:
    """Make the traps in the schema evil; each writes into evil.trace who has run it."""
    with db.connect("su") as su:
        su.execute("create schema evil authorization app; grant usage on schema evil to public")
        su.execute("set role app")
        su.execute(
            "create table evil.trace (who name, what text); grant insert on evil.trace to public;"
            " create function evil.sprung(what text) returns void language plpgsql set search_path = pg_catalog as"
            " $f$ begin insert into evil.trace values (current_user, what); end $f$"
        )
        files = [*Path("sql").rglob("*.sql"), *Path("consumers").rglob("*.py"), *Path("gdq/plan").rglob("*.py")]
        sources = "\n".join(path.read_text() for path in files)
        names = sorted(set(re.findall(r"(?<![.\w])([a-z_0-9]+)\(", sources)))
        query = psycopg.ClientCursor(su).mogrify(TRAPS, {"names": names})
        su.execute(query.encode())


# Operators for pairs of types that pg_catalog has none for: PostgreSQL takes them before any of pg_catalog with a cast,
# wherever their schema stands in the search_path.
BETTER = r"""
do $do$
declare
  f record;
begin
  for f in select n.name, l.oid::regtype as l, r.oid::regtype as r
             from unnest(array['=', '<>', '<', '>', '<=', '>=', '+', '-', '*', '||']) n(name),
                  pg_type l, pg_type r
            where l.typnamespace = 'pg_catalog'::regnamespace and r.typnamespace = 'pg_catalog'::regnamespace
              and l.typname in ('int2', 'int4', 'int8', 'numeric', 'text', 'name', 'oid', 'regclass', 'xid')
              and r.typname in ('int2', 'int4', 'int8', 'numeric', 'text', 'name', 'oid', 'regclass', 'xid')
              and not exists (select from pg_operator o
                               where o.oprname = n.name and o.oprleft = l.oid and o.oprright = r.oid) loop
    execute format('create function public.%I(a %s, b %s) returns boolean language plpgsql as '
      '$f$ begin perform evil.sprung(%L); return null; end $f$', 'op_' || md5(f.name), f.l, f.r,
      format('%s(%s,%s)', f.name, f.l, f.r));
    execute format('create operator public.%s (leftarg = %s, rightarg = %s, function = public.%I)',
      f.name, f.l, f.r, 'op_' || md5(f.name));
  end loop;
  for f in select * from (values ('int, numeric'), ('int, int'), ('int, bigint'), ('bigint, int')) t(args) loop
    execute format('create function public.generate_series(%s) returns setof bigint language plpgsql as '
      '$f$ begin perform evil.sprung(%L); return; end $f$', f.args, 'generate_series ' || f.args);
  end loop;
end
$do$
"""


# Types of the names of pg_catalog's, and one into which numbers and texts are cast by themselves, with functions and
# operators that take it.
TYPES = r"""
do $do$
declare
  name text;
begin
  create function evil.check_value(what text) returns boolean language plpgsql as
    $f$ begin perform evil.sprung(what); return true; end $f$;
  foreach name in array '{text,name,oid,regclass,numeric,int4,int8,bool,pg_snapshot,uuid,jsonb}'::text[] loop
    execute format('create domain evil.%I as pg_catalog.text check (evil.check_value(%L))', name, 'type ' || name);
  end loop;
  create type public.trap as (value pg_catalog.text);
  create function public.equal(public.trap, public.trap) returns boolean language plpgsql as
    $f$ begin perform evil.sprung('operator of trap'); return null; end $f$;
  foreach name in array '{=,<>,<,>,<=,>=,+,-,*}'::text[] loop
    execute format('create operator public.%s (leftarg = public.trap, rightarg = public.trap, function = public.equal)',
      name);
  end loop;
  foreach name in array '{int4,int8,numeric,text,name,oid,bool}'::text[] loop
    execute format('create function public.trap_of(pg_catalog.%s) returns public.trap language plpgsql as '
      '$f$ begin perform evil.sprung(''cast''); return null; end $f$', name);
    execute format('create cast (pg_catalog.%1$s as public.trap) with function public.trap_of(pg_catalog.%1$s) '
      'as implicit', name);
  end loop;
  foreach name in array '{abs,generate_series,num_nulls,pg_typeof,hash_record,coalesce,greatest,least}'::text[] loop
    execute format('create function public.%I(public.trap, public.trap default null) returns boolean language plpgsql '
      'as $f$ begin perform evil.sprung(%L); return null; end $f$', name, name || ' of trap');
  end loop;
end
$do$
"""


def set_better_traps(db: Database) -> None:
    """Traps in the schema public, which a type that fits better leads into; after set_traps()."""
    with db.connect("su") as su:
        su.execute("grant create on schema public to app; set role app")
        su.execute(BETTER.encode())
        su.execute(TYPES.encode())


def sprung(db: Database) -> list[tuple[str, str]]:
    """Who has run a trap, and which; not those that the role app ran itself."""
    with db.connect("su") as su:
        su.execute("set search_path = pg_catalog")  # else this query itself falls into the traps
        return su.execute("select distinct who::text, what from evil.trace where who <> 'app' order by 1, 2").fetchall()
