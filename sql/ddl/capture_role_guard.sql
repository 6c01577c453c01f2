-- capture_role_guard(): the event trigger on ddl_command_start that refuses DDL of a capture role. gdq never issues any
-- as such a role. But code of a table's owner can run inside a capture function, such as an assignment cast while
-- ALTER ... USING converts the column; as the capture role it could drop or spoil capture functions, or put those of
-- another table on a table of its own. Runs with the rights of the role that issues the DDL, to see which it is.
-- Writes: nothing. Errors: 42501.
create or replace function gdq.capture_role_guard() returns event_trigger
language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp
as $$
begin
  if starts_with(current_user, 'gdq_capture') then
    raise exception 'DDL inside a capture function' using errcode = 'insufficient_privilege',
      hint = 'A cast or function of the captured table issued it.';
  end if;
end
$$;
comment on function gdq.capture_role_guard() is 'Event trigger: refuses DDL of a capture role.';
