-- rearm(table_id): switches capture of a table on again after it was off, and records that changes before this point
-- were missed. Steps that may be refused or take time come first. Then the triggers: making them waits for writers at
-- work, so that no write is half captured, and later writers wait until this transaction ends.
-- Result: whether capture is on. When it is not, a new reason is recorded; without a new one (no lock in 100 ms, a
-- race) try again. Writes: triggers, functions, perhaps a version; resync and the event log.
create or replace function gdq.rearm(table_id integer) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  t gdq.captured_table;
  described jsonb;
  version bigint := gdq.current_version(table_id);
  fault text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = rearm.table_id;
  if not exists (select from pg_class c where c.oid = t.relid) then
    perform gdq.note_dropped(t.table_id, 'DROP');
    return false;
  end if;
  perform gdq.refuse_partitions(t.relid);
  if t.format = 'typed' and gdq.typed_only(t) is null and not gdq.event_triggers_on() then
    update gdq.captured_table ct set format = 'json' where ct.table_id = t.table_id;
  end if;
  fault := coalesce(gdq.capture_fault(table_id),
                    case when t.format = 'typed' and not gdq.event_triggers_on() then gdq.typed_only(t) end);
  if fault is not null then
    raise exception '%', fault;
  end if;
  described := gdq.describe_table(table_id);
  perform gdq.check_key(table_id, described);
  if not gdq.version_fits(version, described) then
    version := gdq.create_version(table_id, described, 3);
  end if;
  perform gdq.create_triggers(t.queue_id, t.relid, t.relid, t.operations, t.granularity, t.always);
  perform gdq.own_functions(t.queue_id, t.relid);
  perform gdq.revoke_logs(table_id);
  perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
  if gdq.capture_state(t.queue_id, t.relid) <> 'disarmed'
     or not gdq.version_fits(version, gdq.describe_table(table_id))
     or gdq.current_version(table_id) <> version then
    raise exception 'the table changed meanwhile' using errcode = 'serialization_failure';
  end if;
  perform gdq.note_rename(table_id);
  perform gdq.guard_leaves(table_id, null);
  fault := coalesce(gdq.capture_fault(table_id), gdq.trigger_fault(table_id));
  if fault is not null then
    raise exception '%', fault;
  end if;
  perform gdq.replace_capture(t.queue_id, t.relid, 't', gdq.truncate_body(t.queue_id, t.relid, t.origin));
  perform gdq.arm(version, (select lr.current_slot from gdq.log_ring lr where lr.version_id = version));
  perform gdq.witness(array[table_id]);
  perform gdq.note_resync(t.queue_id, t.relid, 'armed', 'changes before this point were missed');
  return true;
exception
  when lock_not_available or serialization_failure or deadlock_detected or internal_error then
    return false;
  when others then
    fault := 'capture stays off: ' || sqlerrm;
    if fault is distinct from (select r.reason from gdq.resync r
                                where r.queue_id = t.queue_id and r.relid = t.relid
                                order by r.resync_id desc limit 1) then
      perform gdq.note_resync(t.queue_id, t.relid, 'disarmed', fault);
    end if;
    return false;
end
$$;
comment on function gdq.rearm(integer) is 'Switches capture of a table on again and records that changes were missed.';
