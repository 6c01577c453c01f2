-- rotate_logs(): switches every log that is due to its next segment, if that segment is empty. A switch replaces the
-- capture functions and needs no lock on a captured table. DDL of a table excludes its rotation by an advisory lock;
-- rotation does not wait for it.
-- Result: how many logs were switched. Writes: capture and event functions, log_ring, event_ring.
create or replace function gdq.rotate_logs() returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  r record;
  rotated integer := 0;
begin
  for r in select ct.table_id, ct.queue_id, ct.relid, lr.version_id, (lr.current_slot + 1) % 3 as next_slot
             from gdq.queue q
            cross join lateral gdq.active_tables(q.queue_id) t
             join gdq.captured_table ct on ct.table_id = t
             join gdq.log_ring lr on lr.version_id = gdq.current_version(ct.table_id)
            cross join lateral gdq.slot_size(lr.version_id, lr.current_slot) cur
            where cur.heap > 0 and (gdq.slot_size(lr.version_id, (lr.current_slot + 1) % 3)).heap = 0
              and (gdq.is_past(lr.switched_at, q.rotation_period) or cur.total >= q.rotation_bytes) loop
    continue when not pg_try_advisory_xact_lock(gdq.lock_key('capture', r.relid));
    -- a statement of its own: one that takes the lock too would look with a snapshot from before it
    if gdq.current_version(r.table_id) = r.version_id and gdq.capture_state(r.queue_id, r.relid) = 'armed' then
      begin
        perform gdq.arm(r.version_id, r.next_slot);
        update gdq.log_ring lr
           set current_slot = r.next_slot, switched_at = clock_timestamp()
         where lr.version_id = r.version_id;
        rotated := rotated + 1;
      exception when lock_not_available or internal_error then
        null;  -- DDL in an old snapshot is switching capture off, without the advisory lock
      end;
    end if;
  end loop;
  for r in select er.queue_id, er.next_slot
             from gdq.queue q
            cross join lateral (select e.*, (e.current_slot + 1) % 3 as next_slot from gdq.event_ring e
                                 where e.queue_id = q.queue_id) er
            cross join lateral (select to_regclass(format('gdq_log.q%s_s%s', q.queue_id, er.current_slot)) as written,
                                       to_regclass(format('gdq_log.q%s_s%s', q.queue_id, er.next_slot)) as next) log
            where pg_relation_size(log.written) > 0
              and pg_relation_size(log.next) = 0
              and (gdq.is_past(er.switched_at, q.rotation_period)
                   or pg_total_relation_size(log.written) >= q.rotation_bytes) loop
    if pg_try_advisory_xact_lock(gdq.lock_key('tick', r.queue_id)) then
      perform gdq.arm_event_log(r.queue_id, r.next_slot);
      update gdq.event_ring er
         set current_slot = r.next_slot, switched_at = clock_timestamp()
       where er.queue_id = r.queue_id;
      rotated := rotated + 1;
    end if;
  end loop;
  return rotated;
end
$$;
comment on function gdq.rotate_logs() is 'Switches every log that is due to its next segment.';

-- slot_size(version_id, slot): bytes of the log tables of one slot. Result: heap: without indexes and out-of-line
-- values; total: with them; both NULL when the slot has not been made yet. Writes: nothing.
create or replace function gdq.slot_size(version_id bigint, slot integer, out heap bigint, out total bigint)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select sum(pg_relation_size(s.segment)), sum(pg_total_relation_size(s.segment))
    from gdq.log_segment s where s.version_id = slot_size.version_id and s.slot = slot_size.slot
$$;
comment on function gdq.slot_size(bigint, integer) is 'Bytes of the log tables of one slot.';

-- idle_segments(): the log segments that hold rows and are not written now, except those of quiet logs (see
-- capture/update_activity.sql). Writes: nothing.
create or replace function gdq.idle_segments() returns table (queue_id integer, table_id integer, segment regclass)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select ct.queue_id, ct.table_id, s.segment
    from gdq.queue q
   cross join lateral gdq.active_tables(q.queue_id) t
    join gdq.captured_table ct on ct.table_id = t
    join gdq.table_version v using (table_id)
    join gdq.log_ring r using (version_id)
    join gdq.log_segment s using (version_id)
   where (s.slot <> r.current_slot
          or v.version_id <> gdq.current_version(ct.table_id)
          or gdq.capture_state(ct.queue_id, ct.relid) in ('dropped', 'covered'))
     and pg_relation_size(s.segment) > 0
  union all
  select er.queue_id, null, e
    from gdq.event_ring er, gdq.event_segments(er.queue_id) e
   where pg_relation_size(e) > 0 and e <> to_regclass(format('gdq_log.q%s_s%s', er.queue_id, er.current_slot))
$$;
comment on function gdq.idle_segments() is 'The log segments that hold rows and are not written now.';

-- truncate_segment(queue_id, table_id, segment): empties a log segment whose rows nobody needs any more. Never waits: a
-- segment that an uncommitted writer or a reader has locked is left for the next call. The check runs again under the
-- lock with a fresh snapshot, since a late writer may have committed in between.
-- Result: whether the segment was emptied. Writes: TRUNCATE of the segment; horizon. Errors: GDQ04.
create or replace function gdq.truncate_segment(queue_id integer, table_id integer, segment regclass) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  held pg_snapshot;
begin
  perform gdq.require_read_committed('truncation');
  if not gdq.segment_is_consumed(segment, gdq.held_snapshot(queue_id, table_id))
     or not pg_try_advisory_xact_lock(gdq.lock_key('position', queue_id)) then
    return false;
  end if;
  begin
    execute format('lock table only %s in access exclusive mode nowait', gdq.table_name(segment));
  exception when lock_not_available then
    return false;
  end;
  held := gdq.held_snapshot(queue_id, table_id);
  if not gdq.segment_is_consumed(segment, held) then
    return false;
  end if;
  execute format('truncate only %s', gdq.table_name(segment));
  update gdq.horizon h set snapshot = held
   where h.queue_id = truncate_segment.queue_id and not gdq.snapshot_le(held, h.snapshot);
  return true;
end
$$;
comment on function gdq.truncate_segment(integer, integer, regclass) is
  'Empties a log segment whose rows nobody needs any more; never waits.';

-- empty_found(): empties the next of the log segments that an earlier call of maintain() in this session found and had
-- no turn for. Looking at all logs for each segment would take hours where thousands of tables are written. What was
-- found counts for five seconds, so that other work of maintain() is not put off for longer. Only a hint: each segment
-- is checked as truncate_segment() does. Result: whether a segment was emptied. Writes: as truncate_segment().
create or replace function gdq.empty_found() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  hint constant text[] := regexp_match(current_setting('gdq.found_segments', true), '^([0-9]{1,12}):([0-9,]*)$');
  place record;
  rest text;
begin
  if hint is null or hint[2] = '' then
    return false;
  end if;
  if abs(extract(epoch from clock_timestamp()) - hint[1]::bigint) < 5 then
    rest := hint[2];
    while rest <> '' loop
      select ct.queue_id, ct.table_id, ls.segment into place
        from gdq.log_segment ls
        join gdq.table_version v using (version_id)
        join gdq.captured_table ct using (table_id)
        join gdq.log_ring r using (version_id)
       where ls.segment = split_part(rest, ',', 1)::bigint::oid and ls.slot <> r.current_slot
         and pg_relation_size(ls.segment) > 0;
      rest := substr(rest, length(split_part(rest, ',', 1)) + 2);
      if place.segment is not null and gdq.truncate_segment(place.queue_id, place.table_id, place.segment) then
        perform set_config('gdq.found_segments', hint[1] || ':' || rest, false);
        return true;
      end if;
    end loop;
  end if;
  perform set_config('gdq.found_segments', '', false);
  return false;
end
$$;
comment on function gdq.empty_found() is
  'Empties the next of the log segments that an earlier call of maintain() in this session found.';

-- set_found(segments): leaves the numbers of log segments, with commas, for the next calls of maintain() in this
-- session. Writes: a setting of the session.
create or replace function gdq.set_found(segments text) returns void
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select set_config('gdq.found_segments', floor(extract(epoch from clock_timestamp())) || ':' || segments, false)
$$;
comment on function gdq.set_found(text) is
  'Leaves log segments to be emptied for the next calls of maintain() in this session.';
