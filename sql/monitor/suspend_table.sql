-- gdq doctor --fix mends a table in two transactions: first suspend_table(), which needs no lock on the table; then
-- rearm(), or DROP TRIGGER by the session itself, which give up after 100 ms without a lock.

-- suspend_table(tbl): switches capture of a table off in every queue where it has an error that gdq doctor --fix mends.
-- A resync is recorded, so that consumers learn of missing changes, and rearm() can switch capture on again. Capture
-- functions that are gone are made again. Never needs a lock on the table.
-- Result: the ids of its captured tables that are off now. Writes: resync, the event log, the capture functions.
-- Errors: GDQ04, GDQ07.
create or replace function gdq.suspend_table(tbl regclass) returns setof integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  t gdq.captured_table;
  reason text;
  op text;
begin
  perform gdq.require_read_committed('suspend_table');
  perform gdq.require_era(null);
  for t in select ct.* from gdq.captured_table ct where ct.relid = tbl order by ct.table_id loop
    reason := (select f.cause from gdq.table_findings(t.table_id) f where f.severity = 'error' and f.fixable limit 1);
    continue when reason is null;
    perform pg_advisory_xact_lock(gdq.lock_key('capture', 0)), pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
    if gdq.capture_state(t.queue_id, t.relid) = 'armed' then
      perform gdq.note_resync(t.queue_id, t.relid, 'disarmed', reason);
    end if;
    foreach op in array array['i', 'u', 'd', 't'] loop
      if gdq.capture_function(t.queue_id, t.relid, op) is null then
        perform gdq.replace_capture(t.queue_id, t.relid, op, E'begin\n  return null;\nend');
      end if;
    end loop;
    perform gdq.own_functions(t.queue_id, t.relid);
    perform gdq.disarm(t.queue_id, t.relid);
    perform gdq.replace_capture(t.queue_id, t.relid, 't', gdq.truncate_body(t.queue_id, t.relid, t.origin));
    return query select t.table_id;
  end loop;
end
$$;
comment on function gdq.suspend_table(regclass) is
  'Switches capture of a table off where doctor() finds an error, so that rearm() can mend it.';
