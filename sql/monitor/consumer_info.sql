-- consumer_info(queue): one row a subscription: lag behind now in time (age of the tick that it has finished) and in
-- events by number, when it was last heard of, and whose it is; resync: the tables that it must copy anew, now or once it
-- comes to the event that says so, and the latest reason. Writes: nothing. Errors: 42704.
create or replace function gdq.consumer_info(queue text default null)
  returns table (queue_name text, consumer_name text, lag interval, lag_events bigint, last_seen timestamptz, last_tick bigint, tables text[], skip_origin text[],
                 owner_role name, paused boolean, resync text[], reason text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
#variable_conflict use_column
declare
  wanted integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
  select q.queue_name, c.consumer_name, clock_timestamp() - coalesce(t.created_at, p.finished_at),
         gdq.events_given_out(q.queue_id) - p.event_seq,
         greatest(p.finished_at, (select max(bt.granted_at) from gdq.batch b join gdq.batch_token bt using (batch_id) where b.subscription_id = s.subscription_id)),
         p.tick_id,
         case when not s.all_tables then array(select coalesce(gdq.table_name(ct.relid), gdq.last_table_name(ct.table_id)) from gdq.subscribed_tables(s.subscription_id) ct order by 1) end,
         s.skip_origin, s.owner_role,
         exists (select from gdq.subscription_pause sp where sp.subscription_id = s.subscription_id), r.tables, r.reason
    from gdq.subscription s join gdq.queue q using (queue_id) join gdq.consumer c using (consumer_id)
    left join lateral (select pp.* from gdq.position pp where pp.subscription_id = s.subscription_id order by pp.batch_no desc limit 1) p on true
    left join gdq.tick t on t.tick_id = p.tick_id
   cross join lateral (select array_agg(coalesce(gdq.table_name(rt.relid), 'messages') order by rt.relid) as tables, max(rt.reason) as reason
                         from gdq.resync_tables(s.subscription_id) rt) r
   where wanted is null or s.queue_id = wanted order by 1, 2;
end
$$;
comment on function gdq.consumer_info(text) is 'Consumers with their lag in time and events.';
