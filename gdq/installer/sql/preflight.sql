-- Refuses a server that gdq cannot live on, and makes schema gdq.

do $preflight$
begin
  if pg_catalog.current_setting('server_version_num')::integer < 150000 then
    raise exception 'gdq needs PostgreSQL 15 or later, this server is %', pg_catalog.current_setting('server_version')
      using errcode = 'feature_not_supported';
  elsif pg_catalog.pg_is_in_recovery() then
    raise exception 'this server is a standby' using errcode = 'read_only_sql_transaction',
      hint = 'Install gdq on the primary; the standby follows.';
  end if;
  if pg_catalog.to_regnamespace('gdq') is null then
    create schema gdq;
  end if;
end
$preflight$
