-- Capture roles by owner: a new log is opened to the role that writes it, and to no other capture role.

do $$
begin
  if exists (select from pg_catalog.pg_roles where rolname = 'gdq_capture') then
    alter default privileges in schema gdq_log revoke insert on tables from gdq_capture;
    alter default privileges in schema gdq_log revoke usage on sequences from gdq_capture;
  end if;
end
$$;
