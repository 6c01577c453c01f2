-- lock_view(view, until_commit): locks a view for a refresh, so that two refreshes never work on it at once. The lock
-- ends with the session, so a killed refresh blocks nobody; the two seconds that lock_view() waits are enough for the
-- server to notice the kill. begin_refresh() fences off a refresh that has lost its lock.
--   until_commit: the lock ends with the transaction; for a pooler, which shares sessions.
-- Result: the key, for pg_advisory_unlock(). Writes: nothing. Errors: 42704; 55P03 while another refresh has the lock.
create or replace function gdq.lock_view(view text, until_commit boolean default false) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '2s'
as $$
declare
  id integer := (select v.view_id from gdq.view v where v.view_name = view);
  key bigint := gdq.lock_key('view', id::oid);
  holder integer;
begin
  if id is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  begin
    if until_commit then
      perform pg_advisory_xact_lock(key);
    else
      perform pg_advisory_lock(key);
    end if;
  exception when lock_not_available then
    select l.pid into holder
      from pg_locks l
     where l.locktype = 'advisory' and l.granted
       and l.database = (select d.oid from pg_database d where d.datname = current_database())
       and l.classid::bigint = (key >> 32) and l.objid::bigint = (key & 4294967295) and l.objsubid = 1 limit 1;
    raise exception 'view "%" is being refreshed by pid %', view, coalesce(holder::text, 'unknown')
      using errcode = 'lock_not_available', hint = 'Wait for it; its lock ends with its session.';
  end;
  return key;
end
$$;
comment on function gdq.lock_view(text, boolean) is
  'Locks a view for a refresh; error 55P03 while another refresh has the lock.';
