-- tick_pause(queue, longest, ahead): seconds that a ticker may wait before it calls ticker(queue, ahead) again: until
-- the next tick is due, for events that wait or may come meanwhile; at most longest, at least 1 ms. queue NULL: all
-- queues.
-- Writes: nothing. Errors: 42704.
create or replace function gdq.tick_pause(queue text default null, longest interval default '50 ms',
  ahead interval default '0') returns double precision
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  only_queue integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return (
    select extract(epoch from least(longest, greatest(interval '1 ms', coalesce(min(
             -- on an idle queue a tick is due as soon as the first event comes, so look again after lag
             case when t.created_at + lag > clock_timestamp() or gdq.last_event(q.queue_id) > t.event_seq
                    then t.created_at + lag - clock_timestamp()
                  else lag end),
             longest))))::double precision
      from gdq.queue q, gdq.last_tick(q.queue_id) t, gdq.lag_for_tick(q, ahead) lag
     where not q.paused and (only_queue is null or q.queue_id = only_queue));
end
$$;
comment on function gdq.tick_pause(text, interval, interval) is
  'Seconds that a ticker may wait before it calls ticker() again.';

-- lag_for_tick(q, ahead): the age of a queue's last tick at which a tick for new events is begun: ticker_max_lag less
-- ahead, and at least half of ticker_max_lag. Writes: nothing.
create or replace function gdq.lag_for_tick(q gdq.queue, ahead interval) returns interval
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return q.ticker_max_lag - least(greatest(ahead, interval '0'), q.ticker_max_lag / 2);
end
$$;
comment on function gdq.lag_for_tick(gdq.queue, interval) is
  'Age of the last tick at which a tick for new events is begun.';
