-- The signatures of the functions of schema gdq, separated by commas: what a trial of the same install made.
-- Functions that use row types of gdq's tables are left out.

select coalesce(pg_catalog.string_agg(
         pg_catalog.to_json(pg_catalog.concat_ws(' ', p.prokind, p.oid::pg_catalog.regprocedure,
           pg_catalog.pg_get_function_arguments(p.oid), '->',
           pg_catalog.pg_get_function_result(p.oid)))::text, ','), '')
  from pg_catalog.pg_proc p
 where p.pronamespace = 'gdq'::pg_catalog.regnamespace
   and not exists (select from pg_catalog.pg_depend d join pg_catalog.pg_type t on t.oid = d.refobjid
                    where d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass and d.objid = p.oid
                      and d.refclassid = 'pg_catalog.pg_type'::pg_catalog.regclass
                      and t.typnamespace = p.pronamespace)
