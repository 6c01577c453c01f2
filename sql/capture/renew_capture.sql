-- renew_capture(tables): replaces capture functions that an older gdq made by those of this one: a step of an
-- install. Writers are not waited for, as in a rotation.
--   tables: only tables whose functions were what the older gdq makes. Other functions may have missed changes, which
--   gdq.doctor() reports.
-- Result: the number of tables. Writes: capture functions. Errors: 55P03 while DDL of one of them is under way.
create or replace function gdq.renew_capture(tables integer[]) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  renewed integer := 0;
begin
  for t in select ct.* from gdq.captured_table ct where ct.table_id = any (tables) order by ct.relid, ct.table_id loop
    continue when not exists (select from gdq.function_faults(t.table_id));
    perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
    -- looked at again under the lock
    if gdq.capture_state(t.queue_id, t.relid) = 'armed' then
      perform gdq.arm(r.version_id, r.current_slot)
         from gdq.log_ring r where r.version_id = gdq.current_version(t.table_id);
      perform gdq.replace_capture(t.queue_id, t.relid, 't', gdq.truncate_body(t.queue_id, t.relid, t.origin));
      renewed := renewed + 1;
    end if;
  end loop;
  return renewed;
end
$$;
comment on function gdq.renew_capture(integer[]) is
  'Gives capture functions that an older gdq made the text that this one makes.';
