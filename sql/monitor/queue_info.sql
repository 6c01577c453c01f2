-- The listings. Each is safe beside whatever removes a queue, a consumer or a log meanwhile: what is going is shown
-- with NULLs or not at all, and nobody is waited for longer than 100 ms.

-- queue_info(queue): one row a queue (NULL: all) with its settings and the age of its last tick; events_since_tick
-- counts numbers given out, rolled-back ones included. Writes: nothing. Errors: 42704.
create or replace function gdq.queue_info(queue text default null)
  returns table (queue_name text, queue_id integer, tables integer, consumers integer, last_tick bigint, last_tick_lag interval, events_since_tick bigint,
                 ticker_max_count integer, ticker_max_lag interval, ticker_idle_period interval, rotation_period interval, rotation_bytes bigint, retention interval,
                 unlogged boolean, max_bytes bigint, paused boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
#variable_conflict use_column
declare
  wanted integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
  select q.queue_name, q.queue_id, (select count(*)::int from gdq.captured_table ct where ct.queue_id = q.queue_id),
         (select count(*)::int from gdq.subscription s where s.queue_id = q.queue_id),
         t.tick_id, clock_timestamp() - t.created_at, gdq.events_given_out(q.queue_id) - t.event_seq,
         q.ticker_max_count, q.ticker_max_lag, q.ticker_idle_period, q.rotation_period, q.rotation_bytes, q.retention, q.unlogged,
         q.max_bytes, q.paused
    from gdq.queue q
    left join lateral (select tt.tick_id, tt.created_at, tt.event_seq from gdq.tick tt
                        where tt.queue_id = q.queue_id and not tt.refresh order by tt.tick_id desc limit 1) t on true
   where wanted is null or q.queue_id = wanted order by q.queue_name;
end
$$;
comment on function gdq.queue_info(text) is 'Queues with their settings and the age of their last tick.';
