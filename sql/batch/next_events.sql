-- next_events(queue, consumer, max_events, after_tick, few): next_batch() of a consumer without members; and of a batch
-- of few events these too, in the same call.
--   max_events: as for next_batch(). after_tick: no batch unless the queue has a later tick, which is found out without
--   a lock: for a consumer whose last batch ended at that tick. few: up to this number of events, by number, they come
--   with the batch; NULL: none do.
-- Result: no row when there is no batch. Else one row for each event, with the columns of open_events() for its part
-- events, in their order; and at last a row with the columns of next_batch(), and complete: whether the rows before it
-- are all events of the batch. If it is false, forget them, and read the events with get_events() or open_events(): so
-- it is with retries, and where a transaction that committed late has brought more.
-- Writes: as next_batch(). Errors: as next_batch() and get_events().
create or replace function gdq.next_events(queue text, consumer text, max_events integer default 50000,
  after_tick bigint default null, few integer default 500)
  returns table (batch_id bigint, token uuid, tick_from bigint, tick_to bigint,
                 snapshot_from pg_snapshot, snapshot_to pg_snapshot, complete boolean,
                 ev_id bigint, ev_txid bigint, ev_time timestamptz, op text, tbl text, key jsonb, old jsonb, new jsonb,
                 message text, origin text, retries integer, types jsonb)
language plpgsql volatile rows 100 security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  opened record;
  b gdq.batch;
  number bigint;
begin
  if after_tick is not null and after_tick >= (
       select (gdq.last_tick(q.queue_id)).tick_id from gdq.queue q where q.queue_name = next_events.queue) then
    return;
  end if;
  select * into opened from gdq.next_batch(queue, consumer, max_events);
  if opened.batch_id is null then
    return;
  end if;
  select * into b from gdq.batch bb where bb.batch_id = opened.batch_id;
  complete := few is not null and gdq.events_by_number(b) <= few
              and not exists (select from gdq.retry_delivery d where d.batch_id = opened.batch_id);
  if complete then
    return query
      select null::bigint, null::uuid, null::bigint, null::bigint, null::pg_snapshot, null::pg_snapshot, null::boolean,
             e.*
        from gdq.few_events(b, opened.token) e limit few::bigint + 1;
    get diagnostics number = row_count;
    complete := number <= few;
  end if;
  batch_id := opened.batch_id;
  token := opened.token;
  tick_from := opened.tick_from;
  tick_to := opened.tick_to;
  snapshot_from := opened.snapshot_from;
  snapshot_to := opened.snapshot_to;
  return next;
end
$$;
comment on function gdq.next_events(text, text, integer, bigint, integer) is
  'Opens the next batch of a consumer, and gives its events if they are few.';
