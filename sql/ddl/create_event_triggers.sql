-- create_event_triggers(): makes the event triggers that keep capture in step with DDL. Runs with the caller's rights:
-- most servers let only a superuser make them. They are ENABLE ALWAYS, since DDL of a replication role must be seen
-- too. By their names they fire before the application's own, which may write to the table that was just altered.
-- Result: true; false when they were on already. Writes: the event triggers !gdq_ddl, !gdq_drop, !gdq_rewrite and
-- !gdq_capture_role. Errors: 42501 when the caller may not make event triggers.
create or replace function gdq.create_event_triggers() returns boolean
language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
begin
  if gdq.event_triggers_on() then
    return false;
  end if;
  drop event trigger if exists "!gdq_ddl";
  drop event trigger if exists "!gdq_drop";
  drop event trigger if exists "!gdq_rewrite";
  drop event trigger if exists "!gdq_capture_role";
  create event trigger "!gdq_ddl" on ddl_command_end execute function gdq.ddl_guard();
  create event trigger "!gdq_drop" on sql_drop execute function gdq.ddl_guard();
  create event trigger "!gdq_rewrite" on table_rewrite execute function gdq.rewrite_guard();
  create event trigger "!gdq_capture_role" on ddl_command_start execute function gdq.capture_role_guard();
  alter event trigger "!gdq_ddl" enable always;
  alter event trigger "!gdq_drop" enable always;
  alter event trigger "!gdq_rewrite" enable always;
  alter event trigger "!gdq_capture_role" enable always;
  return true;
end
$$;
comment on function gdq.create_event_triggers() is
  'Makes the event triggers that keep capture in step with DDL; needs a superuser on most servers.';
