-- doctor_flow(queue_id, patience): the findings of doctor() about ticks and consumers that do not move. Writes:
-- nothing.
create or replace function gdq.doctor_flow(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set intervalstyle = postgres
as $$
#variable_conflict use_column
begin
  return query
  select 'error', 'ticker_silent', q.queue_name,
         case when t.age < interval '0'
           then format('the last tick of queue %I lies %s in the future: '
                       'the clock was set back, and none was taken since', q.queue_name, gdq.span_text(-t.age))
           else format('queue %I has had no tick for %s, though one is due%s',
                       q.queue_name, gdq.span_text(t.age), ', and ' || h.who || ' is at it') end,
         coalesce(h.cure, 'Start gdq ticker, or look at its log.'), false
    from gdq.queue q,
         lateral (select clock_timestamp() - tt.created_at as age, tt.event_seq
                    from gdq.tick tt
                   where tt.queue_id = q.queue_id and not tt.refresh
                   order by tt.tick_id desc limit 1) t
    left join lateral gdq.lock_holders('{}', array[gdq.lock_key('tick', q.queue_id)], patience) h on true
   where not q.paused
     and (doctor_flow.queue_id is null or q.queue_id = doctor_flow.queue_id)
     and (t.age < interval '0'
          or t.age > patience + case when gdq.events_given_out(q.queue_id) > t.event_seq then gdq.tick_lag(q)
                                      else q.ticker_idle_period end);
  return query
  with behind as materialized (
    select c.*, q.rotation_bytes, p.batch_no, p.finished_at, v.view_name as view,
           format(case when v.view_name is null then 'consumer %I of queue %I' else 'view %s of queue %I' end,
                  coalesce(v.view_name, c.consumer_name), q.queue_name) as who
      from gdq.queue q, gdq.consumer_info(q.queue_name) c
      join gdq.consumer n using (consumer_name)
      join gdq.subscription s using (consumer_id)
      left join lateral (select pp.batch_no, pp.finished_at
                           from gdq.position pp
                          where pp.subscription_id = s.subscription_id
                          order by pp.batch_no desc limit 1) p on true
      left join gdq.view v on v.queue_id = s.queue_id and v.consumer_name = n.consumer_name
     where s.queue_id = q.queue_id and (doctor_flow.queue_id is null or q.queue_id = doctor_flow.queue_id)
  )
  select 'warning', 'consumer_never_seen', b.consumer_name,
         format('%s was registered %s ago and has finished no batch since; its changes are kept', b.who,
                gdq.span_text(clock_timestamp() - b.finished_at)),
         case when b.view is null
           then 'Start it, see why its batches are rolled back if it runs, or unregister it: gdq.unregister_consumer().'
           else 'Refresh it: gdq refresh. If it is not needed: gdq.drop_view().' end, false
    from behind b
   where b.batch_no = 0 and b.batch_age is null and clock_timestamp() - b.finished_at > patience
  union all
  select 'warning', 'consumer_lagging', b.consumer_name,
         format('%s is %s, %s and %s behind%s%s', b.who, gdq.span_text(b.lag),
                b.unread_events || case b.unread_events when 1 then ' event' else ' events' end,
                pg_size_pretty(b.unread_bytes), case when b.paused then ', and is paused' end,
                ', last seen ' || gdq.span_text(clock_timestamp() - b.last_seen) || ' ago'),
         case when b.paused then 'Resume it with gdq.resume()'
              when b.view is null then 'See whether it runs and keeps up'
              else 'Refresh it: gdq refresh' end
         || case when b.view is null then '; unregister it when it is not needed: its changes are kept.'
                 else '. If it is not needed: gdq.drop_view(); its changes are kept.' end, false
    from behind b
   where not (b.batch_no = 0 and b.batch_age is null)
     and (b.lag > patience or b.unread_bytes > 2 * b.rotation_bytes)
  union all
  select 'warning', 'dead_letters', b.consumer_name,
         format('consumer %I of queue %I has given up %s events', b.consumer_name, b.queue_name, b.dead_letters),
         'See gdq.dead_letters(); then gdq.replay_dead_letters() or gdq.purge_dead_letters().', false
    from behind b
   where b.dead_letters > 0;
end
$$;
comment on function gdq.doctor_flow(integer, interval) is 'Findings of doctor() about ticks and consumers.';
