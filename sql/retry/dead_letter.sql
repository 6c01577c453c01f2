-- dead_letter(batch_id, token, ev_id, reason, op): makes an event of an open batch a dead letter, without a retry. As
-- with retry_event(), it counts once the batch is finished under this token. Writes: retry_event. Errors: as
-- retry_event().
create or replace function gdq.dead_letter(batch_id bigint, token uuid, ev_id bigint, reason text default null,
  op text default null) returns void
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select from gdq.put_aside(batch_id, token, array[ev_id], array[op], interval '0', array[reason], true)
$$;
comment on function gdq.dead_letter(bigint, uuid, bigint, text, text) is
  'Makes an event of an open batch a dead letter.';
