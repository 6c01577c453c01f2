-- member_info(queue, consumer): one row for each member of a consumer, with the open batch that the member holds.
-- Without arguments: the members of all consumers.
-- Result: batch_id: the oldest open batch that the member holds, NULL when it holds none; held_for: the time since that
-- batch was handed to the member, or since the member's last touch_batch(). Writes: nothing. Errors: 42704.
create or replace function gdq.member_info(queue text default null, consumer text default null)
  returns table (queue_name text, consumer_name text, member_name text, batch_id bigint, held_for interval)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select q.queue_name, c.consumer_name, m.member_name, held.batch_id, clock_timestamp() - held.granted_at
    from gdq.member m
    join gdq.subscription s using (subscription_id)
    join gdq.queue q using (queue_id)
    join gdq.consumer c using (consumer_id)
    left join lateral (select b.batch_id, holder.granted_at
                         from gdq.position_of(s.subscription_id) pos
                         join gdq.batch b on b.subscription_id = s.subscription_id and b.batch_no > pos.batch_no
                        cross join lateral (select bt.member, bt.granted_at from gdq.batch_token bt
                                             where bt.batch_id = b.batch_id order by bt.grant_id desc limit 1) holder
                        where holder.member = m.member_name
                          and not exists (select from gdq.batch_end e where e.batch_id = b.batch_id)
                        order by b.batch_no limit 1) held on true
   where (queue is null or q.queue_id = gdq.find_queue(queue))
     and (consumer is null or s.subscription_id = gdq.find_subscription(queue, consumer))
   order by 1, 2, 3
$$;
comment on function gdq.member_info(text, text) is 'Members of consumers with the batches that they hold.';
