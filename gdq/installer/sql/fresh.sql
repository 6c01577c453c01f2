-- Refuses a database that has gdq: the printed script knows no state, and can only make what is missing.

do $fresh$
declare
  revision text;
begin
  if pg_catalog.to_regclass('gdq.schema_version') is not null then
    execute 'select version_num from gdq.schema_version' into revision;
    raise exception 'gdq is installed here already, at revision %', revision
      using errcode = 'duplicate_object', hint = 'gdq install upgrades it.';
  end if;
end
$fresh$
