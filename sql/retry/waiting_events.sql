-- waiting_events(queue, consumer): the events of a consumer that wait for a retry, without those that an open batch
-- brings again. With them a consumer finds the keys whose later changes have to wait, too.
-- Result: due_in: the seconds until the event is due, negative if it is. Writes: nothing. Errors: 42704, 42501, GDQ07.
create or replace function gdq.waiting_events(queue text, consumer text)
  returns table (ev_id bigint, ev_txid bigint, ev_time timestamptz, op text, tbl text, key jsonb, old jsonb, new jsonb,
                 retries integer, due_in double precision)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  id integer := gdq.own_subscription(queue, consumer);
begin
  return query
    select r.ev_id, r.ev_txid, r.ev_time, r.op, r.tbl, r.key, r.old, r.new, r.retries,
           extract(epoch from r.due_at - clock_timestamp())::double precision
      from gdq.waiting_retries(id, 'infinity', null) w join gdq.retry_event r on r.retry_id = w.retry_id
     order by r.ev_id, r.retry_id;
end
$$;
comment on function gdq.waiting_events(text, text) is
  'The events of a consumer that wait for a retry, with their values.';
