-- leave_typed(): changes the format of one table from typed to json, if the event triggers are off: an ALTER that
-- capture does not see can then no longer make a write fail. The next call takes the next table. It waits for the
-- writers at work, so no change is missed. Capture of a table with columns, exclude or where, which format json does
-- not have, is switched off.
-- Result: whether there was such a table. Writes: captured_table, a version, capture functions, resync, the event log.
create or replace function gdq.leave_typed() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  t gdq.captured_table;
  old_version bigint;
  version bigint;
  altered boolean;
begin
  if gdq.event_triggers_on() then
    return false;
  end if;
  for t in select ct.* from gdq.captured_table ct
            where ct.format = 'typed' and gdq.capture_state(ct.queue_id, ct.relid) = 'armed' order by ct.table_id loop
    if gdq.typed_only(t) is not null then
      perform gdq.switch_off(t.queue_id, t.relid, gdq.typed_only(t));
      return true;
    end if;
    begin
      altered := exists (select from gdq.unwitnessed(array[t.table_id]) u where u.what is not null);
      -- takes the lock that waits for writers: a writer in the old function could else find its log dropped
      perform gdq.create_triggers(t.queue_id, t.relid, t.relid, t.operations, t.granularity, t.always);
      perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
      if altered
         or exists (select from gdq.unwitnessed(array[t.table_id], null, 'CREATE TRIGGER') u where u.what is not null)
         or not gdq.version_fits(gdq.current_version(t.table_id), gdq.describe_table(t.table_id)) then
        perform gdq.switch_off(t.queue_id, t.relid, 'it was altered while the event triggers were off');
        return true;
      end if;
      old_version := gdq.current_version(t.table_id);
      update gdq.captured_table ct set format = 'json' where ct.table_id = t.table_id;
      version := gdq.create_version(t.table_id, gdq.describe_table(t.table_id), 3);
      perform gdq.arm(version, 0);
      perform gdq.note_ddl(t.table_id, 'FORMAT JSON', jsonb_build_object(
        'reason', 'the event triggers of gdq are missing or off',
        'old_version', old_version,
        'new_version', version));
      perform gdq.witness(array[t.table_id]);
      raise warning 'table % is captured in format json from now on: the event triggers of gdq are missing or off',
        gdq.table_name(t.relid);
      return true;
    exception when lock_not_available or deadlock_detected or internal_error then
      null;  -- the table is locked: the next call tries again
    end;
  end loop;
  return false;
end
$$;
comment on function gdq.leave_typed() is
  'Changes the format of one table from typed to json, if the event triggers are off.';

-- typed_only(t): the reason why a table cannot be captured without the event triggers; NULL when format json can.
-- Writes: nothing.
create or replace function gdq.typed_only(t gdq.captured_table) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select 'the event triggers of gdq are missing or off, and columns, exclude or where need format typed'
   where t.column_attnums is not null or t.exclude_attnums is not null or t.row_filter is not null
$$;
comment on function gdq.typed_only(gdq.captured_table) is
  'The reason why a table cannot be captured without the event triggers.';
