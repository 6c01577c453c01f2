-- Drops both schemas in one command, so that the DDL guard is gone before it would look at what is dropped. Dropping
-- the capture functions takes their triggers off the user's tables, which waits for writers: for a second, then
-- uninstall gives up.
-- Roles stay that other databases of the cluster use, that somebody else made, or that somebody is a member of: the
-- next install finds these roles with their members.

set local lock_timeout = '1s';
set local client_min_messages = warning;
drop schema if exists gdq, gdq_log cascade;
do $roles$
declare
  r record;
begin
  for r in select a.rolname from pg_catalog.pg_roles a
            where a.rolname ~ '^gdq_capture(_[0-9]+)?$'
               or a.rolname in ('gdq_admin', 'gdq_consumer', 'gdq_reader')
                  and not exists (select from pg_catalog.pg_auth_members m
                                   where m.roleid = a.oid and m.member <> current_user::pg_catalog.regrole) loop
    begin
      execute pg_catalog.format('drop role %I', r.rolname);
    exception when dependent_objects_still_exist or insufficient_privilege then
      null;
    end;
  end loop;
end
$roles$
