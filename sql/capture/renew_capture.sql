-- renew_capture(tables): replaces capture functions that an older gdq made by those of this version: a step of an
-- install. It does not wait for writers, as a rotation does not.
--   tables: only tables whose functions were as the older gdq makes them. Other functions may have missed changes,
--   which gdq.doctor() reports.
-- Result: the number of tables. Writes: capture functions, their owners, ACLs. Errors: 55P03 while DDL of one of them
-- is under way.
create or replace function gdq.renew_capture(tables integer[]) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  renewed integer := 0;
begin
  for t in select ct.* from gdq.captured_table ct where ct.table_id = any (tables) order by ct.relid, ct.table_id loop
    perform pg_advisory_xact_lock(gdq.lock_key('capture', 0));
    -- writers may run them as the role of before, which keeps its rights until check_owners() takes them
    perform gdq.own_functions(t.queue_id, t.relid);
    continue when not exists (select from gdq.function_faults(t.table_id));
    perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
    -- looked at again under the lock
    if gdq.capture_state(t.queue_id, t.relid) = 'armed' then
      perform gdq.replace_capture(t.queue_id, t.relid, 't', gdq.truncate_body(t.queue_id, t.relid, t.origin));
      perform gdq.arm(r.version_id, r.current_slot)
         from gdq.log_ring r where r.version_id = gdq.current_version(t.table_id);
      renewed := renewed + 1;
    end if;
  end loop;
  return renewed;
end
$$;
comment on function gdq.renew_capture(integer[]) is
  'Replaces capture functions that an older gdq made by those of this version.';
