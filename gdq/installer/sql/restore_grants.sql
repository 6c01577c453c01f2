-- Warns of functions that gdq no longer has but that something uses, takes from PUBLIC the right that every new
-- function gives it, and brings back the grants that users made (setting gdq.grants, from drop_functions.sql).
-- Runs after the files: a function that they did not write is one that gdq no longer has.

do $restore$
declare
  f record;
  g record;
begin
  for f in select p.oid::pg_catalog.regprocedure as name, pg_catalog.string_agg(distinct pg_catalog.regexp_replace(
             pg_catalog.pg_describe_object(d.classid, d.objid, d.objsubid), '^rule _RETURN on ', ''), ', ') as users
             from pg_catalog.pg_proc p
             join pg_catalog.pg_depend d
               on d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass and d.refobjid = p.oid
            where p.pronamespace = 'gdq'::pg_catalog.regnamespace
              and (p.xmin <> pg_catalog.pg_current_xact_id()::pg_catalog.xid or p.prosrc = 'begin end')
            group by p.oid loop
    raise warning 'function % is no longer part of gdq, but is used by %', f.name, f.users
      using hint = pg_catalog.format('Drop what uses it, then: drop function %s', f.name);
  end loop;
  revoke execute on all routines in schema gdq from public;
  for g in select * from pg_catalog.jsonb_to_recordset(pg_catalog.current_setting('gdq.grants')::pg_catalog.jsonb)
                      g(function text, name text, grantee text, option boolean) loop
    if pg_catalog.to_regprocedure(g.function) is not null then
      execute pg_catalog.format('grant execute on routine %s to %s%s', g.function, g.grantee,
        case when g.option then ' with grant option' else '' end);
    else
      raise warning 'function % has other arguments now or is gone: % may not execute it any more',
        g.function, g.grantee
        using hint = pg_catalog.format('Grant execute on function %s to %s where it is wanted.', g.name, g.grantee);
    end if;
  end loop;
end
$restore$
