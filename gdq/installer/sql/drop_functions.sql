-- Drops the functions of schema gdq that change, before the files make them again, and keeps the grants that users
-- made.
--
-- CREATE OR REPLACE alone keeps functions that are gone, leaves an old overload beside a new argument list, and fails
-- when a result type changes. A function whose signature stays (setting gdq.signatures, from signatures.sql) is only
-- replaced: sessions about to call it, in the middle of a write, find it.
--
-- What something depends on stays too: event triggers, triggers and column defaults of gdq, and what users made of its
-- functions. The event triggers fire for the statements that follow; until the files bring the new event triggers, half
-- of the functions that they call are gone, so they do nothing in this transaction. Others see the old functions until
-- it commits.
--
-- The grants go into setting gdq.grants, and restore_grants.sql brings them back: a temporary table takes a right that
-- an installer may not have. Grants to the three roles whose rights gdq.grant_roles() decides are not kept, so a right
-- taken away there is gone.

do $drop$
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
       and (a.grantee = 0 or r.rolname not in ('gdq_admin', 'gdq_consumer', 'gdq_reader'))), '[]')::text, true);
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
                -- the expression is that of signatures.sql
                and pg_catalog.strpos(coalesce(pg_catalog.current_setting('gdq.signatures', true), ''),
                      pg_catalog.to_json(pg_catalog.concat_ws(' ', p.prokind, p.oid::pg_catalog.regprocedure,
                        pg_catalog.pg_get_function_arguments(p.oid), '->',
                        pg_catalog.pg_get_function_result(p.oid)))::text) = 0 loop
      execute pg_catalog.format('drop routine %s', f.name);
      dropped := true;
    end loop;
    exit when not dropped;
  end loop;
end
$drop$
