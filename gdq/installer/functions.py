"""How an upgrade replaces the functions of schema gdq: SQL that runs in install's transaction, around the files.

CREATE OR REPLACE alone keeps functions that are gone, leaves an old overload beside a new argument list, and fails when
a result type changes. So functions are dropped first, and GRANTs that users made on them are carried over. One that is
to be there again as it was is only replaced: sessions about to call it, in the middle of a write, find it.
"""

from __future__ import annotations

# The roles whose rights sql/base/grant_roles.sql decides: not carried over, so that a right taken away there is gone.
ROLES = ("gdq_admin", "gdq_consumer", "gdq_reader")

# What uses function p, in d: a view is named, not its rule.
_USERS = """pg_catalog.string_agg(distinct pg_catalog.regexp_replace(
                  pg_catalog.pg_describe_object(d.classid, d.objid, d.objsubid), '^rule _RETURN on ', ''), ', ')"""

_SIGNATURE = """pg_catalog.to_json(pg_catalog.concat_ws(' ', p.prokind, p.oid::pg_catalog.regprocedure,
               pg_catalog.pg_get_function_arguments(p.oid), '->', pg_catalog.pg_get_function_result(p.oid)))::text"""

# What a trial of the same install made. Functions that use row types of gdq's tables are not among them.
SIGNATURES = f"""select coalesce(pg_catalog.string_agg({_SIGNATURE}, ','), '')
  from pg_catalog.pg_proc p
 where p.pronamespace = 'gdq'::pg_catalog.regnamespace
   and not exists (select from pg_catalog.pg_depend d join pg_catalog.pg_type t on t.oid = d.refobjid
                    where d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass and d.objid = p.oid
                      and d.refclassid = 'pg_catalog.pg_type'::pg_catalog.regclass
                      and t.typnamespace = p.pronamespace)"""
SET_SIGNATURES = "select pg_catalog.set_config('gdq.signatures', %s, true)"
ANY = "select from pg_catalog.pg_proc where pronamespace = 'gdq'::pg_catalog.regnamespace limit 1"

# What something depends on stays and is replaced: event triggers, triggers and column defaults of gdq, and what users
# made of its functions. The event triggers fire for what follows here too; until the files bring the new ones, what
# they call is half gone, so they do nothing in this transaction. Others see the old functions until it commits.
# A setting carries the grants to the end: a temporary table takes a right that an installer may not have.
DROP = f"""do $drop$
declare
  f record;
  dropped boolean;
begin
  perform pg_catalog.set_config('gdq.grants', coalesce((
    select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
             'function', p.oid::pg_catalog.regprocedure::text, 'name', p.oid::pg_catalog.regproc::text,
             'grantee', case a.grantee when 0 then 'public' else pg_catalog.quote_ident(r.rolname) end,
             'option', a.is_grantable) order by p.proname, p.oid, r.rolname)
      from pg_catalog.pg_proc p, pg_catalog.aclexplode(p.proacl) a left join pg_catalog.pg_roles r on r.oid = a.grantee
     where p.pronamespace = 'gdq'::pg_catalog.regnamespace and a.grantee <> p.proowner
       and (a.grantee = 0 or r.rolname <> all (array['{"', '".join(ROLES)}']))), '[]')::text, true);
  for f in select p.oid::pg_catalog.regprocedure as name from pg_catalog.pg_proc p
            where p.pronamespace = 'gdq'::pg_catalog.regnamespace
              and p.prorettype = 'pg_catalog.event_trigger'::pg_catalog.regtype loop
    execute pg_catalog.format('create or replace function %s returns event_trigger language plpgsql as %L',
      f.name, 'begin end');
  end loop;
  loop
    dropped := false;
    for f in select p.oid::pg_catalog.regprocedure as name from pg_catalog.pg_proc p
              where p.pronamespace = 'gdq'::pg_catalog.regnamespace
                and not exists (select from pg_catalog.pg_depend d
                                 where d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass
                                   and d.refobjid = p.oid)
                and pg_catalog.strpos(coalesce(pg_catalog.current_setting('gdq.signatures', true), ''),
               {_SIGNATURE}) = 0 loop
      execute pg_catalog.format('drop routine %s', f.name);
      dropped := true;
    end loop;
    exit when not dropped;
  end loop;
end
$drop$"""

# What is left, and what depends on it: asked after DROP, for an error that names what stands in the way.
KEPT = f"""select p.oid::pg_catalog.regprocedure::text, {_USERS}
  from pg_catalog.pg_proc p
  join pg_catalog.pg_depend d on d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass and d.refobjid = p.oid
 where p.pronamespace = 'gdq'::pg_catalog.regnamespace
 group by p.oid"""

# The files have run: a function that they did not write is one that gdq has no more. PUBLIC loses what a new function
# gives it before what users granted comes back.
RESTORE = f"""do $restore$
declare
  f record;
  g record;
begin
  for f in select p.oid::pg_catalog.regprocedure as name, {_USERS} as users
             from pg_catalog.pg_proc p
             join pg_catalog.pg_depend d
               on d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass and d.refobjid = p.oid
            where p.pronamespace = 'gdq'::pg_catalog.regnamespace
              and (p.xmin <> pg_catalog.pg_current_xact_id()::pg_catalog.xid or p.prosrc = 'begin end')
            group by p.oid loop
    raise warning 'function % is no longer part of gdq, but is used by %', f.name, f.users
      using hint = pg_catalog.format('Drop what uses it, then: drop function %s', f.name);
  end loop;
  revoke execute on all functions in schema gdq from public;
  for g in select * from pg_catalog.jsonb_to_recordset(pg_catalog.current_setting('gdq.grants')::pg_catalog.jsonb)
                      g(function text, name text, grantee text, option boolean) loop
    if pg_catalog.to_regprocedure(g.function) is not null then
      execute pg_catalog.format('grant execute on function %s to %s%s', g.function, g.grantee,
        case when g.option then ' with grant option' else '' end);
    else
      raise warning 'function % has other arguments now or is gone: % may not execute it any more',
        g.function, g.grantee
        using hint = pg_catalog.format('Grant execute on function %s to %s where it is wanted.', g.name, g.grantee);
    end if;
  end loop;
end
$restore$"""

GRANT_ROLES = """do $roles$
begin
  perform gdq.grant_roles();
end
$roles$"""

# A role that was granted to somebody stays: the next install finds it with its members.
DROP_ROLES = f"""do $roles$
declare
  r record;
begin
  for r in select a.oid, a.rolname from pg_catalog.pg_roles a
            where a.rolname = any (array['{"', '".join(ROLES)}'])
              and not exists (select from pg_catalog.pg_auth_members m
                               where m.roleid = a.oid and m.member <> current_user::pg_catalog.regrole) loop
    begin
      execute pg_catalog.format('drop role %I', r.rolname);
    exception when dependent_objects_still_exist or insufficient_privilege then
      null;
    end;
  end loop;
end
$roles$"""
