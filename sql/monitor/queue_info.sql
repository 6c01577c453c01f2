-- queue_info(queue): one row for each queue (NULL: all queues) with its settings, its last tick, its event rate and the
-- size of its logs. Cheap with a thousand captured tables: it reads sizes of files. No lock is waited for longer than
-- 100 ms: a queue that is being dropped is shown with NULLs or not at all.
-- Result: last_event: the last event number given out. events_since_tick: event numbers given out since the last tick,
-- rolled-back events included. events_per_second: of the last minute, or since the oldest tick. log_bytes and segments:
-- of log segments that hold rows. tables_resync: captured tables in resync. open_writers: open transactions that have
-- written to the queue's logs. tick_lag: the time between two ticks while changes come: ticker_max_lag, or longer if
-- all consumers have a longer pace, see set_pace(). For unread events see consumer_info().
-- Writes: nothing. Errors: 42704.
create or replace function gdq.queue_info(queue text default null)
  returns table (queue_name text, queue_id integer, last_tick bigint, tick_age interval, last_event bigint,
                 events_since_tick bigint, events_per_second double precision, log_bytes bigint, segments integer,
                 tables integer, tables_resync integer, consumers integer, open_writers integer, paused boolean,
                 ticker_max_count integer, ticker_max_lag interval, ticker_idle_period interval,
                 rotation_period interval, rotation_bytes bigint, retention interval, unlogged boolean,
                 max_bytes bigint, tick_lag interval)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
#variable_conflict use_column
declare
  wanted integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
  with logs as materialized (
    select s.queue, sum(s.total)::bigint as bytes, count(*)::integer as segments
      from gdq.log_sizes(wanted, true) s group by 1
  ), queues as materialized (
    select q as settings, q.queue_id, gdq.events_given_out(q.queue_id) as last_event,
           gdq.retained_tick(q.queue_id, interval '1 minute') as minute
      from gdq.queue q where wanted is null or q.queue_id = wanted
  ), gaps as materialized (
    select ct.queue_id, count(*)::integer as tables
      from gdq.captured_table ct, gdq.open_resync(ct.queue_id, ct.relid, ct.table_id)
     where (wanted is null or ct.queue_id = wanted)
       and (ct.queue_id, ct.relid) in (select r.queue_id, r.relid from gdq.resync r)
     group by 1
  )
  select (q.settings).queue_name, q.queue_id, t.tick_id,
         greatest(clock_timestamp() - t.created_at, interval '0'), q.last_event,
         q.last_event - t.event_seq,
         (q.last_event - old.event_seq)
           / greatest(extract(epoch from clock_timestamp() - old.created_at), 0.001)::double precision,
         coalesce(l.bytes, 0), coalesce(l.segments, 0),
         (select count(*)::integer from gdq.captured_table ct where ct.queue_id = q.queue_id), coalesce(g.tables, 0),
         (select count(*)::integer from gdq.subscription s where s.queue_id = q.queue_id),
         (select count(distinct w.xid)::integer from gdq.open_writers(q.queue_id) w), (q.settings).paused,
         (q.settings).ticker_max_count, (q.settings).ticker_max_lag, (q.settings).ticker_idle_period,
         (q.settings).rotation_period, (q.settings).rotation_bytes, (q.settings).retention, (q.settings).unlogged,
         (q.settings).max_bytes, gdq.tick_lag(q.settings)
    from queues q
    left join logs l on l.queue = q.queue_id
    left join gaps g on g.queue_id = q.queue_id
    left join gdq.tick old on old.tick_id = q.minute
    left join lateral (select tt.tick_id, tt.created_at, tt.event_seq from gdq.tick tt
                        where tt.queue_id = q.queue_id and not tt.refresh order by tt.tick_id desc limit 1) t on true
   order by 1;
end
$$;
comment on function gdq.queue_info(text) is
  'Queues with their settings, their last tick, their event rate and the size of their logs.';
