-- begin_ddl(queue, ddl): what apply_ddl() does before its commands, with the rights of gdq. ddl: the commands, for the
-- ddl events. Result: the files of all captured tables, by oid, for end_ddl().
-- Writes: as check_tables(). Errors: 42704, GDQ04; any of capture.
create or replace function gdq.begin_ddl(queue text, ddl text) returns jsonb
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform gdq.require_read_committed('apply_ddl');
  perform gdq.find_queue(queue);
  if not gdq.event_triggers_on() then
    perform gdq.check_tables();
  end if;
  perform set_config('gdq.applied', left(ddl, 10000), true);
  return (select coalesce(jsonb_object_agg(t.relid, gdq.table_files(t.relid)), '{}')
            from (select distinct ct.relid::oid from gdq.captured_table ct) t);
end
$$;
comment on function gdq.begin_ddl(text, text) is 'What apply_ddl() does before its commands.';
