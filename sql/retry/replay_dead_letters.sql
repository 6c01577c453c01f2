-- replay_dead_letters(queue, consumer, ids, older_than): hands dead letters to their consumer again, in its next batch.
-- Each counts as retried once, so it may be retried anew as often as gdq.set_retry_limit() allows, less one.
--   ids: dead_letter_id of those to replay; NULL: all. older_than: only those at least this old; NULL: of any age.
-- Result: how many are replayed. Writes: retry_event; deletes from dead_letter. Errors: 42704, 42501.
create or replace function gdq.replay_dead_letters(queue text, consumer text, ids bigint[] default null,
  older_than interval default null) returns bigint
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  with gone as (
    delete from gdq.dead_letter d
     where d.subscription_id = (select gdq.own_subscription(queue, consumer))
       and (ids is null or d.dead_letter_id = any (ids))
       and (older_than is null or d.died_at <= clock_timestamp() - older_than)
    returning d.*
  ), replayed as (
    insert into gdq.retry_event (subscription_id, ev_id, ev_txid, ev_time, op, tbl, key, old, new, origin,
                                 retries, due_at, dead, reason)
    select g.subscription_id, g.ev_id, g.ev_txid, g.ev_time, g.op, g.tbl, g.key, g.old, g.new, g.origin,
           1, clock_timestamp(), false, g.reason
      from gone g
     order by g.dead_letter_id
    returning retry_id
  )
  select count(*) from replayed
$$;
comment on function gdq.replay_dead_letters(text, text, bigint[], interval) is
  'Hands dead letters to their consumer again; returns how many.';
