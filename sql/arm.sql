-- replace_capture(queue_id, relid, op, body, settings): CREATE OR REPLACE of one capture function; an existing one keeps
-- its owner. settings: SET clauses.
-- Writes: pg_proc. The caller holds lock_key('capture', relid): two replacements at once would fail.
create or replace function gdq.replace_capture(queue_id integer, relid oid, op text, body text, settings text default '')
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set check_function_bodies = off
as $$
begin
  execute format('create or replace function gdq_log.%I() returns trigger language plpgsql security definer%s as %L',
    gdq.capture_name(queue_id, relid, op), settings, body);
end
$$;
comment on function gdq.replace_capture(integer, oid, text, text, text) is 'CREATE OR REPLACE of one capture function.';

-- arm(version_id, slot): points the capture functions of a table at one slot of one version's log. No lock on the
-- captured table is taken and writers read nothing: one that still runs the old function writes to the old segment,
-- which batches read too. Functions that render user types as text pin the settings that text output follows; on demand
-- others pin the search_path, or a session that changes it for every request would have them planned anew each time.
-- Writes: replaces three functions; the caller holds lock_key('capture', relid).
create or replace function gdq.arm(version_id bigint, slot integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t record;
  op text;
  body text;
  settings text := '';
begin
  select ct.queue_id, ct.relid, ct.pin_search_path, r.activity <> 'busy' as announces,
         v.shape is not null or exists (select from jsonb_to_recordset(v.columns) c(as_text boolean) where as_text) as as_text
    into strict t
    from gdq.table_version v
    join gdq.captured_table ct using (table_id)
    join gdq.log_ring r using (version_id)
   where v.version_id = arm.version_id;
  if t.as_text or t.pin_search_path then
    settings := ' set search_path = pg_catalog, pg_temp';
  end if;
  if t.as_text then
    settings := settings || ' set datestyle = ''ISO, YMD'' set intervalstyle = postgres set timezone = ''UTC'' set extra_float_digits = 1'
      ' set bytea_output = hex set lc_monetary = ''C'' set quote_all_identifiers = off set xmlbinary = base64';
  end if;
  foreach op in array array['i', 'u', 'd'] loop
    body := gdq.capture_body(version_id, slot, op);
    if t.announces then
      body := gdq.announcing_body(body, t.queue_id, t.relid);
    end if;
    perform gdq.replace_capture(t.queue_id, t.relid, op, body, settings);
  end loop;
end
$$;
comment on function gdq.arm(bigint, integer) is 'Points the capture functions of a table at one slot of one version''s log.';

-- disarm(queue_id, relid): makes the capture functions of a table do nothing. Needs no right and no lock on the table,
-- unlike dropping the triggers, and works in an old snapshot: functions are looked up outside MVCC. A rotation may be
-- replacing the same function: it is over in a moment, and is waited for, since writes would fail otherwise.
-- Result: whether the queue has capture functions for the table. Writes: replaces the functions that exist.
-- Errors: any after 10 s, or half of the session's statement_timeout.
create or replace function gdq.disarm(queue_id integer, relid oid) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  op text;
  found_any boolean := false;
  patience interval := coalesce(least(interval '10 s', nullif(current_setting('statement_timeout')::interval, interval '0') / 2), interval '10 s');
begin
  foreach op in array array['i', 'u', 'd'] loop
    continue when to_regprocedure(format('gdq_log.%I()', gdq.capture_name(queue_id, relid, op))) is null;
    found_any := true;
    loop
      begin
        -- held to the end of this transaction, it keeps rotations away; not waited for, as its holder may be stuck
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

-- log_event(queue_id, kind, relid, data): one row in a queue's event log, numbered by the queue's sequence.
-- kind: truncate, ddl, resync or message. Result: its ev_id. Writes: the event log.
create or replace function gdq.log_event(queue_id integer, kind text, relid oid, data jsonb) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id bigint;
begin
  execute format('select gdq_log.%I($1, $2, $3)', 'q' || queue_id || '_event') into id using kind, relid, data;
  return id;
end
$$;
comment on function gdq.log_event(integer, text, oid, jsonb) is 'Writes one event into a queue''s event log.';

-- note_resync(queue_id, relid, kind, reason): records what capture has missed, and tells consumers in order.
-- Writes: inserts into resync and a resync event into the event log.
create or replace function gdq.note_resync(queue_id integer, relid oid, kind text, reason text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  insert into gdq.resync (queue_id, relid, kind, reason) values (queue_id, relid, kind, reason);
  perform gdq.log_event(queue_id, 'resync', relid, jsonb_build_object('kind', kind, 'reason', reason));
end
$$;
comment on function gdq.note_resync(integer, oid, text, text) is 'Records a gap of capture and puts a resync event into the event log.';
