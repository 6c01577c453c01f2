-- tick_step(queue, ahead, lag, seen, snapshot): one step of a ticker of one queue, or of all (NULL): calls ticker()
-- with the first three arguments, and says when the next step is due. Call it in a transaction of its own, as ticker().
--   seen, snapshot: what the last step returned. If the event numbers are still those that it saw, nothing is done: no
--   table is read, and no number of a transaction is used up. So it may be called every millisecond. A transaction that
--   commits late moves no number: pass snapshot, too, once in the time of longest, and then the server's must be the
--   same.
-- Result: one row.
--   made: how many ticks were made, 0 or 1; NULL if nothing was done, and then seen and snapshot are as passed.
--   due: seconds until ticker() must be called, whatever comes: 0 or less if the tick of another queue is due; NULL if
--   nothing was done.
--   longest: the most seconds between two looks at the event numbers, since an event would make a tick due at once;
--   NULL if no queue is looked at.
--   guarded: whether event triggers guard the captured tables: without them maintain() is to be called each second,
--   as it sees what they would have; NULL if nothing was done.
--   seen: the event numbers of these queues. snapshot: the server's, if no queue had changes then; else NULL.
-- Writes: tick. Errors: as ticker().
create or replace function gdq.tick_step(queue text default null, ahead interval default '0',
  lag interval default null, inout seen text default null, inout snapshot text default null,
  out made integer, out due double precision, out longest double precision, out guarded boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if seen is not null and (snapshot is null or snapshot = pg_current_snapshot()::text)
     and not exists (select from jsonb_each_text(seen::jsonb) s(id, number)
                      where gdq.last_event(s.id::integer) <> s.number::bigint) then
    return;
  end if;
  guarded := gdq.event_triggers_on();
  snapshot := pg_current_snapshot()::text;
  made := gdq.ticker(queue, ahead, lag);
  select coalesce(jsonb_object_agg(q.queue_id, n.number) filter (where n.number <= t.event_seq and n.age >= w.begins),
                  '{}')::text,
         case when coalesce(bool_and(n.number <= t.event_seq and n.age >= w.whole), true) then tick_step.snapshot end,
         extract(epoch from min(case when n.number > t.event_seq or n.age < w.begins then w.begins
                                     when n.age < w.whole then w.whole
                                     else q.ticker_idle_period end - n.age)),
         extract(epoch from min(m.lag) filter (where n.number <= t.event_seq and n.age >= w.begins))
    into seen, snapshot, due, longest
    from gdq.queue q
   cross join lateral gdq.last_tick(q.queue_id) t
   cross join lateral (select gdq.last_event(q.queue_id), clock_timestamp() - t.created_at) n(number, age)
   cross join lateral gdq.tick_lag(q) m(lag)
   cross join lateral (select least(m.lag, tick_step.lag), gdq.lag_for_tick(m.lag, ahead, tick_step.lag))
           w(whole, begins)
   where not q.paused and (tick_step.queue is null or q.queue_name = tick_step.queue);
  if made > 0 then
    snapshot := null;  -- a commit is still to come
  end if;
end
$$;
comment on function gdq.tick_step(text, interval, interval, text, text) is
  'One step of a ticker: takes a tick that is due, and says when the next step is due.';

-- tick_lag(q): the age of a queue's last tick at which a tick for new events is due: ticker_max_lag, or if it is longer
-- the shortest pace that set_pace() gave its consumers: a consumer without one needs ticks at once, and a queue without
-- consumers keeps to ticker_max_lag. Writes: nothing.
create or replace function gdq.tick_lag(q gdq.queue) returns interval
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return greatest(q.ticker_max_lag,
                  (select min(coalesce(p.pace, '0'))
                     from gdq.subscription s
                     left join gdq.subscription_pace p using (subscription_id)
                    where s.queue_id = q.queue_id));
end
$$;
comment on function gdq.tick_lag(gdq.queue) is 'Age of the last tick at which a tick for new events is due.';

-- lag_for_tick(most, ahead, lag): the age of a queue's last tick at which a tick for new events is begun: most, which
-- is that of tick_lag(), or a shorter lag, less ahead, and at least half of it. Writes: nothing.
create or replace function gdq.lag_for_tick(most interval, ahead interval, lag interval) returns interval
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return least(most, lag) - least(greatest(ahead, interval '0'), least(most, lag) / 2);
end
$$;
comment on function gdq.lag_for_tick(interval, interval, interval) is
  'Age of the last tick at which a tick for new events is begun.';
