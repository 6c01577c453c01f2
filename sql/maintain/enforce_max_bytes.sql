-- enforce_max_bytes(): frees log space of a queue whose logs are larger than its max_bytes, and would still be after
-- all consumed segments are emptied. It first ends what retention keeps. If that is not enough, it cuts off the slowest
-- consumer: its position moves to the last tick, and each of its tables must be copied anew.
-- One step a call, since emptying comes first. Nothing is done that would free no segment: rows in the segments that
-- are written now, or after the last tick, are no consumer's lag. A consumer that a worker has locked is passed over:
-- the worker's transaction would keep the log anyway.
-- Result: whether it did a step. Writes: queue, position, batch_token, subscription_resync; a WARNING into the server's
-- log.
create or replace function gdq.enforce_max_bytes() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  q gdq.queue;
  last gdq.tick;
  kept bigint;
  freed bigint;
begin
  for q in select * from gdq.queue qq where qq.max_bytes < gdq.queue_bytes(qq.queue_id) order by qq.queue_id loop
    last := gdq.last_tick(q.queue_id);
    kept := gdq.queue_bytes(q.queue_id) - gdq.consumed_bytes(q.queue_id);
    continue when kept <= q.max_bytes;
    freed := gdq.cut_retention(q, last);
    if freed > 0 then
      raise warning 'queue "%": its logs pass max_bytes, retention keeps nothing before tick %',
        q.queue_name, last.tick_id;
    end if;
    if kept - freed > q.max_bytes and gdq.cut_slowest(q, last) or freed > 0 then
      return true;
    end if;
  end loop;
  return false;
end
$$;
comment on function gdq.enforce_max_bytes() is
  'Frees log space where logs pass max_bytes: ends retention, then cuts off the slowest consumer.';

-- consumed_bytes(queue_id): bytes of the log segments of a queue that are not written now and whose rows nobody needs
-- any more. Writes: nothing.
create or replace function gdq.consumed_bytes(queue_id integer) returns bigint
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce(sum(pg_total_relation_size(s.segment)), 0)::bigint
    from gdq.idle_segments() s
   where s.queue_id = consumed_bytes.queue_id
     and gdq.segment_is_consumed(s.segment, gdq.held_snapshot(s.queue_id, s.table_id))
$$;
comment on function gdq.consumed_bytes(integer) is 'Bytes of the log segments whose rows nobody needs any more.';

-- cut_retention(q, last): ends the retention of everything before the tick last, if retention alone keeps any segment.
-- Result: the bytes of such segments. Writes: queue.
create or replace function gdq.cut_retention(q gdq.queue, last gdq.tick) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  consumed bigint := gdq.consumed_bytes(q.queue_id);
begin
  if q.retention = interval '0' or q.retain_after = last.tick_id then
    return 0;
  end if;
  update gdq.queue qq set retain_after = last.tick_id where qq.queue_id = q.queue_id;
  consumed := gdq.consumed_bytes(q.queue_id) - consumed;
  if consumed <= 0 then
    update gdq.queue qq set retain_after = q.retain_after where qq.queue_id = q.queue_id;
  end if;
  return greatest(consumed, 0);
end
$$;
comment on function gdq.cut_retention(gdq.queue, gdq.tick) is 'Ends the retention of everything before a tick.';

-- cut_slowest(q, last): moves the slowest subscription that keeps a segment, which is not written now, from being
-- emptied, to the tick last. It notes that the tables of the subscription must be copied anew, and that messages are
-- lost if there were any. Result: whether there was such a subscription. Writes: position, batch_token,
-- subscription_resync.
create or replace function gdq.cut_slowest(q gdq.queue, last gdq.tick) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  s record;
  pos gdq.position;
  why text := format('max_bytes: the logs of queue "%s" passed %s bytes, changes up to tick %s were dropped',
                     q.queue_name, q.max_bytes, last.tick_id);
begin
  for s in select sub.subscription_id, c.consumer_name
             from gdq.subscription sub
             join gdq.consumer c using (consumer_id)
             join gdq.latest_positions() p using (subscription_id)
            where sub.queue_id = q.queue_id and not gdq.snapshot_le(last.snapshot, p.snapshot)
              and exists (select from gdq.idle_segments() i
                           where i.queue_id = q.queue_id
                             and (i.table_id is null
                                  or i.table_id in (select (gdq.subscribed_tables(sub.subscription_id)).table_id))
                             and not gdq.segment_is_consumed(i.segment, p.snapshot)
                             and gdq.segment_is_consumed(i.segment, last.snapshot))
            order by pg_snapshot_xmax(p.snapshot), p.event_seq loop
    perform from gdq.subscription sub where sub.subscription_id = s.subscription_id for no key update skip locked;
    continue when not found;
    pos := gdq.position_of(s.subscription_id);
    insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot, reason)
      select s.subscription_id, t.relid, 'cut', pos.snapshot, why from gdq.subscribed_tables(s.subscription_id) t
       where t.relid not in (select c.relid from gdq.cut_tables(s.subscription_id) c where c.relid is not null)
      union all
      select s.subscription_id, null, 'cut', pos.snapshot, why
       where gdq.takes_messages(s.subscription_id) and gdq.holds_messages(q.queue_id, pos.snapshot, last.snapshot)
         and not exists (select from gdq.cut_tables(s.subscription_id) c where c.relid is null);
    perform gdq.move_position(s.subscription_id, last);
    raise warning 'queue "%": consumer "%" must copy its tables anew: %', q.queue_name, s.consumer_name, why;
    return true;
  end loop;
  return false;
end
$$;
comment on function gdq.cut_slowest(gdq.queue, gdq.tick) is
  'Moves the slowest subscription of a queue to the last tick; its tables must be copied anew.';

-- holds_messages(queue_id, s0, s1): whether the event log of a queue has messages in (s0, s1]. Writes: nothing.
create or replace function gdq.holds_messages(queue_id integer, s0 pg_snapshot, s1 pg_snapshot) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  messages text := gdq.queue_events_sql(queue_id, '{}', s0, s1, true);
  found_any boolean := false;
begin
  if messages is not null then
    execute format('select exists (select from (%s) m where op = ''message'')', messages) into found_any;
  end if;
  return found_any;
end
$$;
comment on function gdq.holds_messages(integer, pg_snapshot, pg_snapshot) is
  'Whether a queue has messages between two snapshots.';

-- queue_bytes(queue_id): bytes of the logs of a queue on disk, with indexes and out-of-line values. Writes: nothing.
create or replace function gdq.queue_bytes(queue_id integer) returns bigint
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select coalesce(sum(pg_total_relation_size(s)), 0)::bigint from gdq.queue_segments(queue_id) s
$$;
comment on function gdq.queue_bytes(integer) is 'Bytes of the logs of a queue.';
