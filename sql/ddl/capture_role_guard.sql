-- capture_role_guard(): event trigger on ddl_command_start that refuses DDL of the capture role. gdq never issues any
-- as that role; but code of a table's owner can run inside a capture function (an assignment cast, while ALTER ...
-- USING converts the column), and would own the capture functions of all other tables: it could drop them or spoil
-- them. Runs with the rights of whoever issues the DDL, to see who that is. Writes: nothing. Errors: 42501.
create or replace function gdq.capture_role_guard() returns event_trigger
language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp
as $$
begin
  if current_user = 'gdq_capture' then
    raise exception 'DDL inside a capture function' using errcode = 'insufficient_privilege',
      hint = 'A cast or function of the captured table issued it.';
  end if;
end
$$;
comment on function gdq.capture_role_guard() is 'Event trigger: refuses DDL of the capture role.';
