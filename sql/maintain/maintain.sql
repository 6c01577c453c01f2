-- maintain(): does the work of all queues that is due, besides ticks. A call looks at all logs, unless the one before
-- has left consumed segments to be emptied. A call ends after a step whose locks others may wait for: capture of one
-- table switched on again; logs completed, rotated or made quiet or busy; logs of old versions dropped; max_bytes
-- enforced; one consumed segment emptied. When none of these is due, it looks for DDL that no event trigger saw, and
-- makes the readers of logs.
-- Call it in a transaction of its own, and again while it returns true. It returns false while another session drops
-- logs.
-- Result: whether more may be due. Writes: as the functions that it calls. Errors: GDQ04, GDQ07.
create or replace function gdq.maintain() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
declare
  t record;
  s record;
  cleared boolean := false;
  found text := '';
begin
  perform gdq.require_read_committed('maintain');
  -- with positions of another cluster, unread rows would be deleted
  perform gdq.require_era(null);
  -- several sessions may do this side by side, but none while another drops logs
  if not pg_try_advisory_xact_lock_shared(gdq.lock_key('drop', 0)) then
    return false;
  end if;
  if gdq.note_losses() > 0 or gdq.empty_found() then
    return true;
  end if;
  for t in select ct.table_id
             from (select distinct r.queue_id, r.relid from gdq.resync r where r.kind = 'disarmed' offset 0) off
             join gdq.captured_table ct using (queue_id, relid)
            where gdq.capture_state(ct.queue_id, ct.relid) = 'disarmed' loop
    -- rearm() locks the table and writers wait, so nothing else is done in this transaction
    if gdq.rearm(t.table_id) then
      return true;
    end if;
  end loop;
  -- these hold locks that DDL of the application waits for, so the transaction ends after them too
  if gdq.complete_rings() or gdq.rotate_logs() > 0 or gdq.update_activity() then
    return true;
  end if;
  perform gdq.summarise_logs();
  if gdq.drop_old_versions() then
    return true;
  end if;
  if gdq.enforce_max_bytes() then
    return true;
  end if;
  perform gdq.rotate_control();
  perform gdq.trim_resync();
  perform gdq.trim_alarms();
  for s in select * from gdq.idle_segments() loop
    if not cleared then
      cleared := gdq.truncate_segment(s.queue_id, s.table_id, s.segment);
    elsif s.table_id is not null then
      found := concat_ws(',', nullif(found, ''), s.segment::oid);
    end if;
  end loop;
  perform gdq.set_found(found);
  if cleared then
    return true;
  end if;
  if gdq.capture_waiting() then
    return true;
  end if;
  if gdq.check_owners(extract(second from clock_timestamp())::integer % 60) then
    return true;
  end if;
  -- event triggers leave hardly anything to find: with them a call checks a sixtieth of the tables
  return gdq.check_tables(null, case when gdq.event_triggers_on() then
                                       extract(second from clock_timestamp())::integer % 60 end) > 0
      or gdq.leave_typed() or gdq.create_readers() > 0;
end
$$;
comment on function gdq.maintain() is
  'Rotates, summarises and empties logs, one step a call: call again while it returns true.';

-- capture_waiting(): captures a table that matches a rule for new tables and was not captured when it was made: without
-- event triggers, in an old snapshot, after a failure or a new name. A failure is tried again after a minute. It also
-- forgets tables that are gone.
-- Result: whether it captured one. Writes: as capture_wanted(); passed_table.
create or replace function gdq.capture_waiting() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  w record;
begin
  if not exists (select from gdq.new_table_rule) then
    return false;
  end if;
  perform gdq.forget_dropped();
  for w in select * from gdq.wanted_tables() t
            where coalesce(gdq.is_past(t.tried_at, interval '1 min'), true) loop
    if gdq.capture_wanted(w.rule_id, w.relid, 3, 'it was made or got its name before capture began') then
      return true;
    end if;
  end loop;
  return false;
end
$$;
comment on function gdq.capture_waiting() is
  'Captures a table that matches a rule for new tables and was not captured when it was made.';

-- drop_old_versions(): drops the logs of table versions that are no longer written and hold no rows. It also forgets
-- captured tables that were dropped, once every consumer has passed the end of their changes. Never waits for a lock on
-- a log.
-- Result: whether it dropped any; at most 20 a call, since each takes locks. Writes: drops segments and functions,
-- deletes control rows.
create or replace function gdq.drop_old_versions() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
declare
  v record;
  s regclass;
  dropped integer := 0;
begin
  for v in select tv.version_id, ct.queue_id, ct.relid, tv.version_id = gdq.current_version(ct.table_id) as newest
             from (select o.version_id, o.table_id
                     from gdq.table_version o
                    where exists (select from gdq.table_version n
                                   where n.table_id = o.table_id and n.version_id > o.version_id)
                    union
                   select o.version_id, o.table_id
                     from gdq.resync r
                     join gdq.captured_table c using (queue_id, relid)
                     join gdq.table_version o using (table_id)
                    where r.kind in ('dropped', 'covered') offset 0) tv
             join gdq.captured_table ct using (table_id)
            where not exists (select from gdq.version_segments(tv.version_id))
              and (tv.version_id <> gdq.current_version(ct.table_id)
                   or (gdq.capture_state(ct.queue_id, ct.relid) in ('dropped', 'covered')
                       and not exists (select from gdq.table_version o
                                        where o.table_id = ct.table_id and o.version_id <> tv.version_id)
                       and pg_visible_in_snapshot((select max(r.txid) from gdq.resync r
                                                    where r.queue_id = ct.queue_id and r.relid = ct.relid)::text::xid8,
                                                  gdq.held_snapshot(ct.queue_id, ct.table_id))))
            order by tv.version_id loop
    if not pg_try_advisory_xact_lock(gdq.lock_key('drop', 0)) then
      return dropped > 0;
    end if;
    -- before this session had the lock, another one may have dropped it
    continue when not exists (select from gdq.table_version tv where tv.version_id = v.version_id);
    begin
      for s in select ls.segment from gdq.log_segment ls where ls.version_id = v.version_id loop
        execute format('lock table only %s in access exclusive mode nowait', gdq.table_name(s));
      end loop;
      continue when exists (select from gdq.version_segments(v.version_id));
      if v.newest then
        -- remove_table() may lock a partition that is captured through its root now, so the transaction ends here
        perform gdq.remove_table((select q.queue_name from gdq.queue q where q.queue_id = v.queue_id), v.relid,
                                 force => true);
        return true;
      end if;
      for s in select ls.segment from gdq.log_segment ls where ls.version_id = v.version_id loop
        execute format('drop table %s', gdq.table_name(s));
      end loop;
      perform gdq.drop_version(v.version_id);
      delete from gdq.table_version tv where tv.version_id = v.version_id;
      dropped := dropped + 1;
      exit when dropped = 20;
    exception when lock_not_available then
      null;
    end;
  end loop;
  return dropped > 0;
end
$$;
comment on function gdq.drop_old_versions() is
  'Drops the logs of versions that are no longer written and hold no rows.';

-- complete_rings(): creates the missing segments of versions that DDL made with one segment; at most 40 a call, since
-- each takes locks.
-- Result: whether it created any. Writes: creates segments.
create or replace function gdq.complete_rings() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
  made boolean := false;
begin
  for r in select v.version_id, slot, ct.relid
             from (select ls.version_id from gdq.log_segment ls
                    group by ls.version_id having count(distinct ls.slot) < 3 offset 0) short
             join gdq.table_version v using (version_id)
             join gdq.captured_table ct using (table_id),
                  generate_series(0, 2) slot
            where v.version_id = gdq.current_version(ct.table_id)
              and not exists (select from gdq.log_segment s where s.version_id = v.version_id and s.slot = slot.slot)
            order by 1, 2 limit 40 loop
    continue when not pg_try_advisory_xact_lock(gdq.lock_key('capture', r.relid));
    -- another session may have made it before this one had the lock
    if not exists (select from gdq.log_segment s where s.version_id = r.version_id and s.slot = r.slot) then
      perform gdq.create_segment(r.version_id, r.slot);
      made := true;
    end if;
  end loop;
  return made;
end
$$;
comment on function gdq.complete_rings() is
  'Creates the missing segments of versions that DDL made with one; false when there were none.';
