-- dead_letter(batch_id, token, ev_id, reason, op): gives an event of an open batch up, without a retry. As retry_event():
-- it counts once the batch is finished under this token. Writes: retry_event. Errors: as retry_event().
create or replace function gdq.dead_letter(batch_id bigint, token uuid, ev_id bigint, reason text default null, op text default null)
  returns void
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select from gdq.put_aside(batch_id, token, array[ev_id], array[op], interval '0', array[reason], true)
$$;
comment on function gdq.dead_letter(bigint, uuid, bigint, text, text) is 'Makes an event of an open batch a dead letter.';

-- dead_letters(queue, consumer): the events that consumers gave up, oldest first; consumer NULL: those of all that the session's role may use.
-- Writes: nothing. Errors: 42704, 42501.
create or replace function gdq.dead_letters(queue text, consumer text default null)
  returns table (dead_letter_id bigint, queue_name text, consumer_name text, ev_id bigint, ev_txid bigint, ev_time timestamptz,
                 op text, tbl text, key jsonb, old jsonb, new jsonb, origin text, retries integer, reason text, died_at timestamptz)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select d.dead_letter_id, dead_letters.queue, c.consumer_name, d.ev_id, d.ev_txid, d.ev_time,
         d.op, d.tbl, d.key, d.old, d.new, d.origin, d.retries, d.reason, d.died_at
    from gdq.subscription s join gdq.consumer c using (consumer_id) join gdq.dead_letter d using (subscription_id)
   where s.queue_id = gdq.find_queue(queue) and case when consumer is null then gdq.may_use_consumer((select gdq.invoker()), s.subscription_id)
                                                              else s.subscription_id = (select gdq.own_subscription(queue, consumer)) end
   order by d.dead_letter_id
$$;
comment on function gdq.dead_letters(text, text) is 'The events that consumers of a queue gave up.';

-- replay_dead_letters(queue, consumer, ids, older_than): hands dead letters to their consumer again, in its next batch,
-- as if retried once: they have all their retries before them. ids NULL: all; older_than NULL: of any age.
-- Result: how many. Writes: retry_event; deletes from dead_letter. Errors: 42704, 42501.
create or replace function gdq.replay_dead_letters(queue text, consumer text, ids bigint[] default null, older_than interval default null)
  returns bigint
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  with gone as (
    delete from gdq.dead_letter d
     where d.subscription_id = (select gdq.own_subscription(queue, consumer))
       and (ids is null or d.dead_letter_id = any (ids)) and (older_than is null or d.died_at <= clock_timestamp() - older_than)
    returning d.*
  ), replayed as (
    insert into gdq.retry_event (subscription_id, ev_id, ev_txid, ev_time, op, tbl, key, old, new, origin, retries, due_at, dead, reason)
    select g.subscription_id, g.ev_id, g.ev_txid, g.ev_time, g.op, g.tbl, g.key, g.old, g.new, g.origin, 1, clock_timestamp(), false, g.reason
      from gone g order by g.dead_letter_id
    returning retry_id
  )
  select count(*) from replayed
$$;
comment on function gdq.replay_dead_letters(text, text, bigint[], interval) is 'Hands dead letters to their consumer again; returns how many.';

-- purge_dead_letters(queue, consumer, ids, older_than): forgets dead letters. ids NULL: all; older_than NULL: of any age.
-- Result: how many. Writes: deletes from dead_letter. Errors: 42704, 42501.
create or replace function gdq.purge_dead_letters(queue text, consumer text, ids bigint[] default null, older_than interval default null)
  returns bigint
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  with gone as (
    delete from gdq.dead_letter d
     where d.subscription_id = (select gdq.own_subscription(queue, consumer))
       and (ids is null or d.dead_letter_id = any (ids)) and (older_than is null or d.died_at <= clock_timestamp() - older_than)
    returning d.dead_letter_id
  )
  select count(*) from gone
$$;
comment on function gdq.purge_dead_letters(text, text, bigint[], interval) is 'Forgets dead letters; returns how many.';
