-- consumer_info(queue): one row for each consumer of a queue (NULL: of all queues): how far it is behind, what it takes
-- and which role owns it. Waits for no lock longer than 100 ms, as queue_info().
-- Result: lag: the greatest age that the oldest unfinished change can have; 0 when no event number was given out after
-- the position. unread_events: event numbers given out after the position; rolled-back events and those of other tables
-- count too. unread_bytes: bytes of the logs that the consumer takes, to a page. last_seen: when it last took or
-- finished a batch. batch_age: time since its oldest open batch was opened; NULL when none is. tables: NULL when it
-- takes all. resync: the tables that it must copy anew, now or when it comes to their resync event; reason: why.
-- retries: events that wait for a retry. pace: see set_pace(); NULL: it needs changes at once.
-- Writes: nothing. Errors: 42704.
create or replace function gdq.consumer_info(queue text default null)
  returns table (queue_name text, consumer_name text, lag interval, unread_events bigint, unread_bytes bigint,
                 last_seen timestamptz, batch_age interval, last_tick bigint, retries bigint, dead_letters bigint,
                 resync text[], reason text, tables text[], skip_origin text[], owner_role name, paused boolean,
                 pace interval)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
#variable_conflict use_column
declare
  wanted integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
  with subscriptions as materialized (
    select s, q.queue_id, q.queue_name, c.consumer_name, p.batch_no, p.tick_id, p.snapshot, p.event_seq, p.finished_at,
           greatest(gdq.events_given_out(q.queue_id) - p.event_seq, 0) as unread
      from gdq.subscription s
      join gdq.queue q using (queue_id)
      join gdq.consumer c using (consumer_id)
      left join lateral (select pp.* from gdq.position pp where pp.subscription_id = s.subscription_id
                          order by pp.batch_no desc limit 1) p on true
     where wanted is null or s.queue_id = wanted
  ), depth as materialized (
    select u.queue_id, d.*
      from (select queue_id, array_agg(distinct event_seq) as positions
              from subscriptions where unread > 0 group by 1) u,
           gdq.log_depth(u.queue_id, u.positions) d
  )
  select u.queue_name, u.consumer_name,
         case when u.unread > 0
              then greatest(clock_timestamp() - coalesce(next.created_at, newest.created_at, u.finished_at),
                            interval '0')
              when u.unread = 0 then interval '0' end,
         u.unread,
         (select coalesce(sum(d.bytes), 0)::bigint from depth d
           where d.queue_id = u.queue_id and d.event_seq = u.event_seq
             and ((u.s).all_tables or gdq.takes_table(u.s, d.table_id))),
         greatest(u.finished_at, (select max(bt.granted_at) from gdq.batch b join gdq.batch_token bt using (batch_id)
                                   where b.subscription_id = (u.s).subscription_id)),
         clock_timestamp() - b.opened_at, u.tick_id,
         (select count(*) from gdq.waiting_retries((u.s).subscription_id, 'infinity', null)),
         (select count(*) from gdq.dead_letter dl where dl.subscription_id = (u.s).subscription_id),
         r.tables, r.reason,
         case when not (u.s).all_tables
              then array(select coalesce(gdq.table_name(ct.relid), gdq.last_table_name(ct.table_id))
                           from gdq.subscribed_tables((u.s).subscription_id) ct order by 1) end,
         (u.s).skip_origin, (u.s).owner_role,
         exists (select from gdq.subscription_pause sp where sp.subscription_id = (u.s).subscription_id),
         (select sp.pace from gdq.subscription_pace sp where sp.subscription_id = (u.s).subscription_id)
    from subscriptions u
    left join lateral (select t.created_at from gdq.tick t
                        where t.queue_id = u.queue_id and not t.refresh and t.tick_id > u.tick_id
                          and t.event_seq > u.event_seq
                        order by t.tick_id limit 1) next on u.unread > 0
    left join lateral (select t.created_at from gdq.tick t where t.queue_id = u.queue_id and not t.refresh
                        order by t.tick_id desc limit 1) newest on true
    left join lateral (select bb.opened_at from gdq.batch bb
                        where bb.subscription_id = (u.s).subscription_id and bb.batch_no > u.batch_no
                        order by bb.batch_no limit 1) b on true
   cross join lateral (select array_agg(coalesce(gdq.table_name(rt.relid), 'messages') order by rt.relid) as tables,
                              max(rt.reason) as reason
                         from gdq.resync_tables((u.s).subscription_id) rt) r
   order by 1, 2;
end
$$;
comment on function gdq.consumer_info(text) is
  'Consumers with their lag in time, events and bytes, their tables and the role that owns them.';
