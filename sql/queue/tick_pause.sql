-- tick_pause(queue, longest, ahead, lag): seconds that a ticker may wait before it calls ticker(queue, ahead, lag)
-- again: until the next tick is due, for events that wait or may come meanwhile; at most longest, at least 1 ms. queue
-- NULL: all queues.
-- Writes: nothing. Errors: 42704.
create or replace function gdq.tick_pause(queue text default null, longest interval default '50 ms',
  ahead interval default '0', lag interval default null) returns double precision
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  only_queue integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return (
    select extract(epoch from least(longest, greatest(interval '1 ms', coalesce(min(
             -- on an idle queue a tick is due as soon as the first event comes, so look again after lag
             case when t.created_at + due > clock_timestamp() or gdq.last_event(q.queue_id) > t.event_seq
                    then t.created_at + due - clock_timestamp()
                  else due end),
             longest))))::double precision
      from gdq.queue q, gdq.last_tick(q.queue_id) t, gdq.lag_for_tick(q, ahead, tick_pause.lag) due
     where not q.paused and (only_queue is null or q.queue_id = only_queue));
end
$$;
comment on function gdq.tick_pause(text, interval, interval, interval) is
  'Seconds that a ticker may wait before it calls ticker() again.';

-- lag_for_tick(q, ahead, lag): the age of a queue's last tick at which a tick for new events is begun: ticker_max_lag,
-- or a shorter lag, less ahead, and at least half of it. Writes: nothing.
create or replace function gdq.lag_for_tick(q gdq.queue, ahead interval, lag interval) returns interval
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return least(q.ticker_max_lag, lag)
       - least(greatest(ahead, interval '0'), least(q.ticker_max_lag, lag) / 2);
end
$$;
comment on function gdq.lag_for_tick(gdq.queue, interval, interval) is
  'Age of the last tick at which a tick for new events is begun.';
