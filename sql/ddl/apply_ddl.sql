-- apply_ddl(queue, ddl, tables): runs DDL and keeps capture in step with it, in one transaction, so that an error
-- leaves nothing half done. Use it to alter captured tables on servers that refuse event triggers. Where the event
-- triggers are on, it only runs the DDL, and they follow. (Slony has EXECUTE SCRIPT, Londiste execute.)
--   ddl: one or more commands, run with the rights and the search_path of the caller; no BEGIN or COMMIT. Capture
--   follows at their end: rows that they write into a table which they have altered are not captured, which is a
--   resync.
--   tables: are locked first, in this order; NULL: the commands lock tables as they come.
-- Result: how many captured tables have new columns. Writes: what the DDL does; as guard_table() for what it changed.
-- Errors: 42704; GDQ04; 55P03 when a table is not free within 500 ms: nothing is changed, try again; any of the DDL's
-- or of capture, such as 54000 for columns that a log cannot hold.
create or replace function gdq.apply_ddl(queue text, ddl text, tables regclass[] default null) returns integer
language plpgsql volatile security invoker set lock_timeout = '500ms'
as $$
declare
  tbl pg_catalog.regclass;
begin
  perform gdq.begin_ddl(queue, ddl);
  foreach tbl in array coalesce(tables, '{}') loop
    execute pg_catalog.format('lock table %s in access exclusive mode', tbl);
  end loop;
  execute ddl;
  return gdq.end_ddl(queue, ddl);
end
$$;
comment on function gdq.apply_ddl(text, text, regclass[]) is
  'Runs DDL and keeps capture in step with it, in one transaction.';
