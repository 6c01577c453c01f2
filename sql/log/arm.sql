-- Replacing capture functions: arm() makes them write to a log, disarm() makes them do nothing.

-- arm(version_id, slot): points the capture functions of a table at one slot of one version's log. It takes no lock on
-- the captured table, and writers need not notice: one that still runs the old function writes to the old segment,
-- which batches read too.
-- Functions that render user types as text pin the settings that text output follows. With the option pin_search_path
-- all pin the search_path, for sessions that change it for every request: such a change has an unpinned function
-- planned anew. While the log is not busy, the functions announce each change, see update_activity().
-- Writes: replaces three functions; log_ring. The caller holds lock_key('capture', relid).
create or replace function gdq.arm(version_id bigint, slot integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t record;
  op text;
  settings text := '';
begin
  select ct.queue_id, ct.relid, ct.pin_search_path,
         v.shape is not null
           or exists (select from jsonb_to_recordset(v.columns) c(as_text boolean) where as_text) as as_text,
         case when r.activity <> 'busy' then er.current_slot end as event_slot
    into strict t
    from gdq.table_version v
    join gdq.captured_table ct using (table_id)
    join gdq.log_ring r using (version_id)
    join gdq.event_ring er using (queue_id)
   where v.version_id = arm.version_id;
  if t.as_text or t.pin_search_path then
    settings := ' set search_path = pg_catalog, pg_temp';
  end if;
  if t.as_text then
    settings := settings || $sql$
      set datestyle = 'ISO, YMD'
      set intervalstyle = postgres
      set timezone = 'UTC'
      set extra_float_digits = 1
      set bytea_output = hex
      set lc_monetary = 'C'
      set quote_all_identifiers = off
      set xmlbinary = base64
    $sql$;
  end if;
  foreach op in array array['i', 'u', 'd'] loop
    perform gdq.replace_capture(t.queue_id, t.relid, op,
                                gdq.capture_body(version_id, slot, op, t.event_slot), settings);
  end loop;
  perform gdq.witness_functions(version_id);
end
$$;
comment on function gdq.arm(bigint, integer) is
  'Points the capture functions of a table at one slot of one version''s log.';

-- disarm(queue_id, relid): makes the capture functions of a table do nothing. Unlike dropping the triggers, it needs no
-- right and no lock on the table, and works in an old snapshot, since functions are looked up outside MVCC. It waits
-- for a rotation that is replacing the same function, since the application's writes would fail otherwise.
-- Result: whether the queue has capture functions for the table. Writes: replaces the functions that exist. Errors: any
-- after 10 s, or half of the session's statement_timeout.
create or replace function gdq.disarm(queue_id integer, relid oid) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  op text;
  found_any boolean := false;
  patience interval := coalesce(least(interval '10 s',
                                      nullif(current_setting('statement_timeout')::interval, interval '0') / 2),
                                interval '10 s');
begin
  foreach op in array array['i', 'u', 'd'] loop
    continue when to_regprocedure(format('gdq_log.%I()', gdq.capture_name(queue_id, relid, op))) is null;
    found_any := true;
    loop
      begin
        -- to its end this transaction keeps rotations away by the lock; it does not wait, as the holder may be stuck
        perform pg_try_advisory_xact_lock(gdq.lock_key('capture', relid));
        perform gdq.replace_capture(queue_id, relid, op, E'begin\n  return null;\nend');
        exit;
      exception when internal_error or lock_not_available or deadlock_detected then
        if clock_timestamp() > statement_timestamp() + patience then
          raise;
        end if;
      end;
    end loop;
  end loop;
  return found_any;
end
$$;
comment on function gdq.disarm(integer, oid) is 'Makes the capture functions of a table do nothing.';

-- replace_capture(queue_id, relid, op, body, settings): makes or replaces one capture function; an existing one keeps
-- its owner. settings: SET clauses. Writes: pg_proc. The caller holds lock_key('capture', relid): two replacements at
-- once would fail.
create or replace function gdq.replace_capture(queue_id integer, relid oid, op text, body text,
                                               settings text default '')
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set check_function_bodies = off
as $$
begin
  execute format('create or replace function gdq_log.%I() returns trigger language plpgsql security definer%s as %L',
    gdq.capture_name(queue_id, relid, op),
    -- a truncate event holds the name of the partition
    settings || case op when 't' then ' set quote_all_identifiers = off' else '' end,
    body);
end
$$;
comment on function gdq.replace_capture(integer, oid, text, text, text) is 'Makes or replaces one capture function.';
