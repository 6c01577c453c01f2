-- purge_dead_letters(queue, consumer, ids, older_than): deletes dead letters of a consumer.
--   ids: dead_letter_id of those to delete; NULL: all. older_than: only those at least this old; NULL: of any age.
-- Result: how many were deleted. Writes: deletes from dead_letter. Errors: 42704, 42501.
create or replace function gdq.purge_dead_letters(queue text, consumer text, ids bigint[] default null,
  older_than interval default null) returns bigint
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  with gone as (
    delete from gdq.dead_letter d
     where d.subscription_id = (select gdq.own_subscription(queue, consumer))
       and (ids is null or d.dead_letter_id = any (ids))
       and (older_than is null or d.died_at <= clock_timestamp() - older_than)
    returning d.dead_letter_id
  )
  select count(*) from gone
$$;
comment on function gdq.purge_dead_letters(text, text, bigint[], interval) is 'Deletes dead letters; returns how many.';
