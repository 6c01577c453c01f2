-- dead_letters(queue, consumer): the events that a consumer has given up, oldest first. consumer NULL: those of all
-- consumers that the session's role may use. Writes: nothing. Errors: 42704, 42501.
create or replace function gdq.dead_letters(queue text, consumer text default null)
  returns table (dead_letter_id bigint, queue_name text, consumer_name text, ev_id bigint, ev_txid bigint,
                 ev_time timestamptz, op text, tbl text, key jsonb, old jsonb, new jsonb, origin text,
                 retries integer, reason text, died_at timestamptz)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select d.dead_letter_id, dead_letters.queue, c.consumer_name, d.ev_id, d.ev_txid, d.ev_time,
         d.op, d.tbl, d.key, d.old, d.new, d.origin, d.retries, d.reason, d.died_at
    from gdq.subscription s join gdq.consumer c using (consumer_id) join gdq.dead_letter d using (subscription_id)
   where s.queue_id = gdq.find_queue(queue)
     and case when consumer is null then gdq.may_use_consumer((select gdq.invoker()), s.subscription_id)
              else s.subscription_id = (select gdq.own_subscription(queue, consumer)) end
   order by d.dead_letter_id
$$;
comment on function gdq.dead_letters(text, text) is 'The events that consumers of a queue have given up.';
