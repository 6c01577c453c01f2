-- maintain(): the work of all queues beside ticks: switches capture of one table on again where it was off, or else
-- completes, rotates, summarises and drops logs, enforces max_bytes, and empties at most one consumed segment, since a
-- late writer of that segment waits until this transaction ends; when nothing of that is due, looks for DDL that no
-- event trigger saw. Call it in a transaction of its own, again while it returns true.
-- Result: whether more is due. Writes: as the functions that it calls. Errors: GDQ04, GDQ07.
create or replace function gdq.maintain() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
declare
  t record;
  s record;
  cleared boolean := false;
begin
  perform gdq.require_read_committed('maintain');
  -- positions of another cluster would let unread rows go
  perform gdq.require_era(null);
  if gdq.note_losses() > 0 then
    return true;
  end if;
  for t in select ct.table_id
             from (select distinct r.queue_id, r.relid from gdq.resync r where r.kind = 'disarmed' offset 0) off
             join gdq.captured_table ct using (queue_id, relid)
            where gdq.capture_state(ct.queue_id, ct.relid) = 'disarmed' loop
    -- its lock on the table makes writers wait, so nothing else is done in this transaction
    if gdq.rearm(t.table_id) then
      return true;
    end if;
  end loop;
  -- these two hold locks that DDL of the application waits for, so they end here too
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
  for s in select * from gdq.idle_segments() loop
    cleared := gdq.truncate_segment(s.queue_id, s.table_id, s.segment);
    exit when cleared;
  end loop;
  if cleared then
    return true;
  end if;
  -- where event triggers are on there is hardly anything to find: every table within a minute of tickers' calls
  return gdq.check_tables(null, case when gdq.event_triggers_on() then
                                       extract(second from clock_timestamp())::integer % 60 end) > 0
      or gdq.leave_typed();
end
$$;
comment on function gdq.maintain() is
  'Rotates, summarises and empties logs; at most one segment a call: call again while it returns true.';

-- drop_old_versions(): drops the logs of versions that are no longer written and hold no rows, and forgets captured
-- tables that are gone once every consumer has passed their end. Never waits for a log.
-- Result: whether it dropped any; a few at a time, since each takes locks. Writes: drops segments and functions,
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
    begin
      for s in select ls.segment from gdq.log_segment ls where ls.version_id = v.version_id loop
        execute format('lock table only %s in access exclusive mode nowait', gdq.table_name(s));
      end loop;
      continue when exists (select from gdq.version_segments(v.version_id));
      if v.newest then
        -- it locks a partition that is captured through its root now, so nothing else is done in this transaction
        perform gdq.remove_table((select q.queue_name from gdq.queue q where q.queue_id = v.queue_id), v.relid,
                                 force => true);
        return true;
      end if;
      for s in select ls.segment from gdq.log_segment ls where ls.version_id = v.version_id loop
        execute format('drop table %s', gdq.table_name(s));
      end loop;
      perform gdq.drop_row_type(v.version_id);
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

-- complete_rings(): gives versions that DDL made with one segment their others; a few at a time, since each takes
-- locks.
-- Result: whether it did any. Writes: creates segments.
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
    if pg_try_advisory_xact_lock(gdq.lock_key('capture', r.relid)) then
      perform gdq.create_segment(r.version_id, r.slot);
      made := true;
    end if;
  end loop;
  return made;
end
$$;
comment on function gdq.complete_rings() is
  'Gives versions that DDL made with one segment their others; false when there were none.';
