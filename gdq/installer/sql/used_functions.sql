-- The functions that drop_functions.sql left because something depends on them, and what that is: for an error that
-- names it. A view is named, not its rule.

select p.oid::pg_catalog.regprocedure::text, pg_catalog.string_agg(distinct pg_catalog.regexp_replace(
         pg_catalog.pg_describe_object(d.classid, d.objid, d.objsubid), '^rule _RETURN on ', ''), ', ')
  from pg_catalog.pg_proc p
  join pg_catalog.pg_depend d on d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass and d.refobjid = p.oid
 where p.pronamespace = 'gdq'::pg_catalog.regnamespace
 group by p.oid
