-- begin_ddl(queue, ddl): does the part of apply_ddl() before its commands, with the rights of gdq. ddl: the commands,
-- which the ddl events quote. queue NULL: no queue is looked up, as all are followed.
-- Writes: as check_tables(). Errors: 42704, GDQ04; any of capture.
create or replace function gdq.begin_ddl(queue text, ddl text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform gdq.require_read_committed('apply_ddl');
  if queue is not null then
    perform gdq.find_queue(queue);
  end if;
  if not gdq.event_triggers_on() then
    perform gdq.check_tables();
  end if;
  perform set_config('gdq.applied', left(ddl, 10000), true);
end
$$;
comment on function gdq.begin_ddl(text, text) is 'Does the part of apply_ddl() before its commands.';
