-- Refuses schemas gdq and gdq_log that belong to another role.

do $owner$
declare
  other record;
begin
  select n.nspname, pg_catalog.pg_get_userbyid(n.nspowner) into other
    from pg_catalog.pg_namespace n
   where n.nspname in ('gdq', 'gdq_log') and pg_catalog.pg_get_userbyid(n.nspowner) <> current_user
   order by 1 limit 1;
  if found then
    raise exception 'schema % belongs to role %', other.nspname, other.pg_get_userbyid
      using errcode = 'insufficient_privilege', hint = pg_catalog.format('Do this as %I.', other.pg_get_userbyid);
  end if;
end
$owner$
