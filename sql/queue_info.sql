-- queue_info(queue): one row a queue (NULL: all) with its settings and the age of its last tick; events_since_tick
-- counts numbers given out, rolled-back ones included. Writes: nothing. Errors: 42704.
create or replace function gdq.queue_info(queue text default null)
  returns table (queue_name text, queue_id integer, tables integer, consumers integer, last_tick bigint, last_tick_lag interval, events_since_tick bigint,
                 ticker_max_count integer, ticker_max_lag interval, ticker_idle_period interval, rotation_period interval, rotation_bytes bigint, retention interval)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select q.queue_name, q.queue_id, (select count(*)::int from gdq.captured_table ct where ct.queue_id = q.queue_id),
         (select count(*)::int from gdq.subscription s where s.queue_id = q.queue_id),
         t.tick_id, clock_timestamp() - t.created_at, gdq.last_event(q.queue_id) - t.event_seq,
         q.ticker_max_count, q.ticker_max_lag, q.ticker_idle_period, q.rotation_period, q.rotation_bytes, q.retention
    from gdq.queue q, gdq.last_tick(q.queue_id) t
   where queue is null or q.queue_id = gdq.find_queue(queue) order by q.queue_name
$$;
comment on function gdq.queue_info(text) is 'Queues with their settings and the age of their last tick.';

-- table_info(queue): one row a captured table. state is resync while some subscription has not passed a gap of capture,
-- or capture is off; reason is the latest. Writes: nothing. Errors: 42704.
create or replace function gdq.table_info(queue text default null)
  returns table (queue_name text, table_name text, mode text, key text[], columns text[], version bigint, state text, reason text, log_bytes bigint)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select q.queue_name, coalesce(gdq.table_name(ct.relid), ct.table_name), ct.mode,
         (select array_agg(c->>'name') from jsonb_array_elements(v.columns) c where (c->>'key')::boolean),
         (select array_agg(c->>'name') from jsonb_array_elements(v.columns) c),
         v.version_id, case when r.reason is null then 'ok' else 'resync' end, r.reason,
         (select sum(pg_total_relation_size(s.segment))::bigint from gdq.table_version tv join gdq.log_segment s using (version_id) where tv.table_id = ct.table_id)
    from gdq.captured_table ct join gdq.queue q using (queue_id)
    join gdq.table_version v on v.version_id = gdq.current_version(ct.table_id)
    left join lateral (select r.reason from gdq.resync r
                        where r.queue_id = ct.queue_id and r.relid = ct.relid
                          and (gdq.capture_state(ct.queue_id, ct.relid) <> 'armed'
                               or exists (select from gdq.subscription s, gdq.position_of(s.subscription_id) p
                                           where s.queue_id = ct.queue_id and not pg_visible_in_snapshot(r.txid::text::xid8, p.snapshot)
                                             and ct.table_id in (select (gdq.subscribed_tables(s.subscription_id)).table_id)))
                        order by r.resync_id desc limit 1) r on true
   where queue is null or q.queue_id = gdq.find_queue(queue) order by 1, 2
$$;
comment on function gdq.table_info(text) is 'Captured tables with mode, columns and state.';

-- consumer_info(queue): one row a subscription: lag behind now in time (age of the tick that it has finished) and in
-- events by number, and when it was last heard of. Writes: nothing. Errors: 42704.
create or replace function gdq.consumer_info(queue text default null)
  returns table (queue_name text, consumer_name text, lag interval, lag_events bigint, last_seen timestamptz, last_tick bigint, tables text[])
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select q.queue_name, c.consumer_name, clock_timestamp() - coalesce(t.created_at, p.finished_at),
         gdq.last_event(q.queue_id) - p.event_seq,
         greatest(p.finished_at, (select max(bt.granted_at) from gdq.batch b join gdq.batch_token bt using (batch_id) where b.subscription_id = s.subscription_id)),
         p.tick_id,
         case when not s.all_tables then array(select coalesce(gdq.table_name(ct.relid), ct.table_name) from gdq.subscribed_tables(s.subscription_id) ct order by 1) end
    from gdq.subscription s join gdq.queue q using (queue_id) join gdq.consumer c using (consumer_id)
   cross join lateral gdq.position_of(s.subscription_id) p
    left join gdq.tick t on t.tick_id = p.tick_id
   where queue is null or q.queue_id = gdq.find_queue(queue) order by 1, 2
$$;
comment on function gdq.consumer_info(text) is 'Consumers with their lag in time and events.';
