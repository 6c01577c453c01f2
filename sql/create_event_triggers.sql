-- create_event_triggers(): makes the event triggers that keep capture in step with DDL. Runs with the caller's rights:
-- most servers let only a superuser make them. ENABLE ALWAYS, since DDL of a replication role must be seen too.
-- Result: true; false when they were on already. Writes: the event triggers gdq_ddl and gdq_rewrite.
-- Errors: 42501 when the caller may not make event triggers.
create or replace function gdq.create_event_triggers() returns boolean
language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
begin
  if gdq.event_triggers_on() then
    return false;
  end if;
  drop event trigger if exists gdq_ddl;
  drop event trigger if exists gdq_rewrite;
  create event trigger gdq_ddl on ddl_command_end execute function gdq.ddl_guard();
  create event trigger gdq_rewrite on table_rewrite execute function gdq.rewrite_guard();
  alter event trigger gdq_ddl enable always;
  alter event trigger gdq_rewrite enable always;
  return true;
end
$$;
comment on function gdq.create_event_triggers() is 'Makes the event triggers that keep capture in step with DDL; needs a superuser on most servers.';

-- event_triggers_on(): whether the event triggers exist, fire always, and the server fires event triggers at all.
-- Writes: nothing.
create or replace function gdq.event_triggers_on() returns boolean
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce(current_setting('event_triggers', true), 'on') = 'on'
     and 2 = (select count(*) from pg_event_trigger e
               where e.evtenabled = 'A'
                 and (e.evtname, e.evtfoid) in (('gdq_ddl', 'gdq.ddl_guard'::regproc), ('gdq_rewrite', 'gdq.rewrite_guard'::regproc)))
$$;
comment on function gdq.event_triggers_on() is 'Whether the event triggers of gdq exist and fire.';
