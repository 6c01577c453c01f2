-- retry_info(queue, consumer): one row for each event that waits for a retry, or that an open batch brings again, in
-- the order of due_at. Without arguments: those of all consumers. Rows of consumers that the session's role may not use
-- are left out.
-- Result: batch_id: the open batch that brings the event again; NULL while it waits. Writes: nothing. Errors: 42704.
create or replace function gdq.retry_info(queue text default null, consumer text default null)
  returns table (queue_name text, consumer_name text, ev_id bigint, op text, tbl text, key jsonb, retries integer,
                 due_at timestamptz, batch_id bigint, reason text)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select q.queue_name, c.consumer_name, r.ev_id, r.op, r.tbl, r.key, r.retries, r.due_at, u.batch_id, r.reason
    from gdq.subscription s join gdq.queue q using (queue_id) join gdq.consumer c using (consumer_id)
   cross join lateral (select w.retry_id, null::bigint as batch_id
                         from gdq.waiting_retries(s.subscription_id, 'infinity', null) w
                        union all
                       select d.retry_id, d.batch_id
                         from gdq.batch b join gdq.retry_delivery d on d.batch_id = b.batch_id
                        where b.subscription_id = s.subscription_id
                          and not gdq.is_finished(b.subscription_id, b.batch_no, b.batch_id)) u
    join gdq.retry_event r on r.retry_id = u.retry_id
   where (queue is null or q.queue_id = gdq.find_queue(queue))
     and (consumer is null or s.subscription_id = gdq.find_subscription(queue, consumer))
     and gdq.may_use_consumer((select gdq.invoker()), s.subscription_id)
   order by r.due_at, r.retry_id
$$;
comment on function gdq.retry_info(text, text) is 'Events that wait to come again, or that an open batch brings again.';
