-- held_snapshot(queue_id, table_id): the oldest snapshot that rows of a table (NULL: of the event log) are held for: the
-- positions of the subscriptions that take it, the last tick, and the tick that is retention old. A subscription
-- without a position would hold everything. Writes: nothing.
create or replace function gdq.held_snapshot(queue_id integer, table_id integer) returns pg_snapshot
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select h
    from (select coalesce(p.snapshot, '1:1:') as h
            from gdq.subscription s
            left join lateral (select pp.snapshot from gdq.position pp where pp.subscription_id = s.subscription_id order by pp.batch_no desc limit 1) p on true
           where s.queue_id = held_snapshot.queue_id
             and (s.all_tables or held_snapshot.table_id is null
                  or exists (select from gdq.subscription_table st
                              where st.subscription_id = s.subscription_id and st.table_id = held_snapshot.table_id))
           union all
          select (gdq.last_tick(held_snapshot.queue_id)).snapshot
           union all
          select t.snapshot
            from (select greatest(gdq.retained_tick(q.queue_id, q.retention), q.retain_after) as tick_id from gdq.queue q
                   where q.queue_id = held_snapshot.queue_id and q.retention > interval '0') kept join gdq.tick t using (tick_id)) held
   order by pg_snapshot_xmax(h), (select count(*) from pg_snapshot_xip(h)) desc limit 1
$$;
comment on function gdq.held_snapshot(integer, integer) is 'The oldest snapshot that rows of a log are held for.';

-- segment_is_consumed(segment, held): whether every row of a segment counts as finished in a snapshot. Sees all that
-- has committed, so it must run in READ COMMITTED. Writes: nothing.
create or replace function gdq.segment_is_consumed(segment regclass, held pg_snapshot) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  consumed boolean;
begin
  execute format('select not exists (select from %s where ev_txid >= $1) and not exists (select from %1$s where ev_txid = any ($2))', segment)
    into consumed using pg_snapshot_xmax(held)::text::bigint, array(select x::text::bigint from pg_snapshot_xip(held) x);
  return consumed;
end
$$;
comment on function gdq.segment_is_consumed(regclass, pg_snapshot) is 'Whether every row of a segment counts as finished in a snapshot.';

-- truncate_segment(queue_id, table_id, segment): empties a log segment whose rows nobody needs any more. Never waits:
-- a writer that has not committed, or a reader, holds the segment, and it is left for the next time. The check runs
-- again under the lock, with a snapshot taken after it: a late writer may have committed in between.
-- Result: whether it was emptied. Writes: TRUNCATE of the segment; horizon. Errors: GDQ04.
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
comment on function gdq.truncate_segment(integer, integer, regclass) is 'Empties a log segment whose rows nobody needs any more; never waits.';

-- slot_size(version_id, slot): bytes of the log tables of one slot, without and with indexes and out-of-line values;
-- NULL when the slot has not been made yet. Writes: nothing.
create or replace function gdq.slot_size(version_id bigint, slot integer, out heap bigint, out total bigint)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select sum(pg_relation_size(s.segment)), sum(pg_total_relation_size(s.segment))
    from gdq.log_segment s where s.version_id = slot_size.version_id and s.slot = slot_size.slot
$$;
comment on function gdq.slot_size(bigint, integer) is 'Bytes of the log tables of one slot.';

-- rotate_logs(): switches every log that is due to its next segment, if that is empty: CREATE OR REPLACE of the capture
-- functions, no lock on any captured table. DDL of a table excludes its rotation by an advisory lock; rotation gives way.
-- Result: how many logs were switched. Writes: capture and event functions, log_ring, event_ring, BRIN summaries.
create or replace function gdq.rotate_logs() returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  r record;
  rotated integer := 0;
begin
  for r in select ct.table_id, ct.queue_id, ct.relid, lr.version_id, (lr.current_slot + 1) % 3 as next_slot
             from gdq.queue q cross join lateral gdq.active_tables(q.queue_id) t join gdq.captured_table ct on ct.table_id = t
             join gdq.log_ring lr on lr.version_id = gdq.current_version(ct.table_id)
            cross join lateral gdq.slot_size(lr.version_id, lr.current_slot) cur
            where cur.heap > 0 and (gdq.slot_size(lr.version_id, (lr.current_slot + 1) % 3)).heap = 0
              and (lr.switched_at <= clock_timestamp() - q.rotation_period or cur.total >= q.rotation_bytes) loop
    if pg_try_advisory_xact_lock(gdq.lock_key('capture', r.relid))
       and gdq.current_version(r.table_id) = r.version_id and gdq.capture_state(r.queue_id, r.relid) = 'armed' then
      begin
        perform gdq.arm(r.version_id, r.next_slot);
        update gdq.log_ring lr set current_slot = r.next_slot, switched_at = clock_timestamp() where lr.version_id = r.version_id;
        rotated := rotated + 1;
      exception when lock_not_available or internal_error then
        null;  -- DDL in an old snapshot is switching capture off, without the advisory lock
      end;
    end if;
  end loop;
  for r in select er.queue_id, (er.current_slot + 1) % 3 as next_slot
             from gdq.queue q join gdq.event_ring er using (queue_id)
            where pg_relation_size(to_regclass(format('gdq_log.q%s_s%s', q.queue_id, er.current_slot))) > 0
              and pg_relation_size(to_regclass(format('gdq_log.q%s_s%s', q.queue_id, (er.current_slot + 1) % 3))) = 0
              and (er.switched_at <= clock_timestamp() - q.rotation_period
                   or pg_total_relation_size(to_regclass(format('gdq_log.q%s_s%s', q.queue_id, er.current_slot))) >= q.rotation_bytes) loop
    if pg_try_advisory_xact_lock(gdq.lock_key('tick', r.queue_id)) then
      perform gdq.arm_event_log(r.queue_id, r.next_slot);
      update gdq.event_ring er set current_slot = r.next_slot, switched_at = clock_timestamp() where er.queue_id = r.queue_id;
      rotated := rotated + 1;
    end if;
  end loop;
  return rotated;
end
$$;
comment on function gdq.rotate_logs() is 'Switches every log that is due to its next segment.';

-- complete_rings(): gives versions that DDL made with one segment their others; a few at a time, since each takes locks.
-- Result: whether it did any. Writes: creates segments.
create or replace function gdq.complete_rings() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
  made boolean := false;
begin
  for r in select v.version_id, slot, ct.relid
             from (select ls.version_id from gdq.log_segment ls group by ls.version_id having count(distinct ls.slot) < 3 offset 0) short
             join gdq.table_version v using (version_id) join gdq.captured_table ct using (table_id), generate_series(0, 2) slot
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
comment on function gdq.complete_rings() is 'Gives versions that DDL made with one segment their others; false when there were none.';

-- drop_old_versions(): drops the logs of versions that are no longer written and hold no rows, and forgets captured
-- tables that are gone once every consumer has passed their end. Never waits for a log.
-- Result: whether it dropped any; a few at a time, since each takes locks. Writes: drops segments and functions, deletes control rows.
create or replace function gdq.drop_old_versions() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = warning
as $$
declare
  v record;
  s regclass;
  dropped integer := 0;
begin
  for v in select tv.version_id, ct.queue_id, ct.relid, tv.version_id = gdq.current_version(ct.table_id) as newest
             from (select o.version_id, o.table_id from gdq.table_version o
                    where exists (select from gdq.table_version n where n.table_id = o.table_id and n.version_id > o.version_id)
                   union
                   select o.version_id, o.table_id from gdq.resync r join gdq.captured_table c using (queue_id, relid) join gdq.table_version o using (table_id)
                    where r.kind in ('dropped', 'covered') offset 0) tv join gdq.captured_table ct using (table_id)
            where not exists (select from gdq.version_segments(tv.version_id))
              and (tv.version_id <> gdq.current_version(ct.table_id)
                   or (gdq.capture_state(ct.queue_id, ct.relid) in ('dropped', 'covered')
                       and not exists (select from gdq.table_version o where o.table_id = ct.table_id and o.version_id <> tv.version_id)
                       and pg_visible_in_snapshot((select max(r.txid) from gdq.resync r where r.queue_id = ct.queue_id and r.relid = ct.relid)::text::xid8,
                                                  gdq.held_snapshot(ct.queue_id, ct.table_id))))
            order by tv.version_id loop
    begin
      for s in select ls.segment from gdq.log_segment ls where ls.version_id = v.version_id loop
        execute format('lock table only %s in access exclusive mode nowait', gdq.table_name(s));
      end loop;
      continue when exists (select from gdq.version_segments(v.version_id));
      if v.newest then
        -- it locks a partition that is captured through its root now, so nothing else is done in this transaction
        perform gdq.remove_table((select q.queue_name from gdq.queue q where q.queue_id = v.queue_id), v.relid, force => true);
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
comment on function gdq.drop_old_versions() is 'Drops the logs of versions that are no longer written and hold no rows.';

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
  if gdq.check_logs() > 0 then
    return true;
  end if;
  for t in select ct.table_id
             from (select distinct r.queue_id, r.relid from gdq.resync r where r.kind = 'disarmed' offset 0) off join gdq.captured_table ct using (queue_id, relid)
            where gdq.capture_state(ct.queue_id, ct.relid) = 'disarmed' loop
    -- its lock on the table makes writers wait, so nothing else is done in this transaction
    if gdq.rearm(t.table_id) then
      return true;
    end if;
  end loop;
  -- these two hold locks that DDL of the application waits for, so they end here too
  if gdq.complete_rings() or gdq.rotate_logs() > 0 or gdq.settle_logs() then
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
  return gdq.check_tables(null, case when gdq.event_triggers_on() then extract(second from clock_timestamp())::integer % 60 end) > 0 or gdq.leave_typed();
end
$$;
comment on function gdq.maintain() is 'Rotates, summarises and empties logs; at most one segment a call: call again while it returns true.';

-- idle_segments(): the segments that hold rows and are not written now, those of quiet logs aside. Writes: nothing.
create or replace function gdq.idle_segments() returns table (queue_id integer, table_id integer, segment regclass)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select ct.queue_id, ct.table_id, s.segment
    from gdq.queue q cross join lateral gdq.active_tables(q.queue_id) t join gdq.captured_table ct on ct.table_id = t
    join gdq.table_version v using (table_id) join gdq.log_ring r using (version_id) join gdq.log_segment s using (version_id)
   where (s.slot <> r.current_slot or v.version_id <> gdq.current_version(ct.table_id) or gdq.capture_state(ct.queue_id, ct.relid) in ('dropped', 'covered'))
     and pg_relation_size(s.segment) > 0
  union all
  select er.queue_id, null, e
    from gdq.event_ring er, gdq.event_segments(er.queue_id) e
   where pg_relation_size(e) > 0 and e <> to_regclass(format('gdq_log.q%s_s%s', er.queue_id, er.current_slot))
$$;
comment on function gdq.idle_segments() is 'The log segments that hold rows and are not written now.';

-- summarise_logs(): brings the BRIN index of growing segments up to date, which autovacuum, off for logs, does not. A
-- segment that somebody holds is left for the next time. Sizes are taken of segments only: those of other tables would
-- wait for their DDL. Writes: BRIN summaries.
create or replace function gdq.summarise_logs() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  log record;
begin
  for log in select i.indexrelid
               from (select s from gdq.queue q, gdq.queue_segments(q.queue_id) s where pg_relation_size(s) >= 1048576 offset 0) large
               join pg_index i on i.indrelid = large.s loop
    begin
      perform brin_summarize_new_values(log.indexrelid);
    exception when lock_not_available then
      null;
    end;
  end loop;
end
$$;
comment on function gdq.summarise_logs() is 'Brings the BRIN index of growing logs up to date.';
