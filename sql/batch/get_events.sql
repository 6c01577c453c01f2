-- get_events(batch_id, token): all events of an open batch, for a consumer that handles one event after the other:
-- first those of get_retries(), then those of get_batch(), each in its order.
-- Result: the columns of get_batch(), and retries: how often the event was put aside. No rows when batch_id is NULL, so
-- that a client can ask for the next batch and its events in one round trip. Writes: nothing. Errors: GDQ01 for a stale
-- token or a finished batch, also while reading; GDQ04; GDQ07; 42501.
create or replace function gdq.get_events(batch_id bigint, token uuid)
  returns table (ev_id bigint, ev_txid bigint, ev_time timestamptz, op text, tbl text,
                 key jsonb, old jsonb, new jsonb, origin text, retries integer)
language plpgsql volatile strict rows 1000 security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set max_parallel_workers_per_gather = 0
  set datestyle = 'ISO, YMD' set intervalstyle = postgres set timezone = 'UTC' set extra_float_digits = 1
  set bytea_output = hex set lc_monetary = 'C' set quote_all_identifiers = off set xmlbinary = base64
as $$
#variable_conflict use_column
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
  events text;
  -- up to this number of events readers give the rows
  read_max constant bigint := 1000;
begin
  perform gdq.require_read_committed('get_events');
  if exists (select from gdq.retry_delivery d where d.batch_id = b.batch_id) then
    return query
      select r.ev_id, r.ev_txid, r.ev_time, r.op, r.tbl, r.key, r.old, r.new, r.origin, r.retries
        from gdq.get_retries(b.batch_id, get_events.token) r;
  end if;
  -- a SELECT that is planned for the batch is worth its time where there are many rows
  if gdq.events_by_number(b) <= read_max then
    begin
      events := gdq.usual_events_sql(b);
      if events is null then
        events := gdq.subscription_events_sql(b.subscription_id, b.snapshot_from, b.snapshot_to, true);
      end if;
      return query execute 'select *, 0 from (' || events || ') e order by ev_id, op';
      -- after the readers have locked their segments: while the batch is open these cannot have been truncated
      perform gdq.require_held(b, token);
      return;
    exception when undefined_function or undefined_table then
      null;  -- a reader was dropped meanwhile, with an empty log or by an install
    end;
  end if;
  events := gdq.subscription_events_sql(b.subscription_id, b.snapshot_from, b.snapshot_to);
  -- as in get_batch()
  perform gdq.require_held(b, token);
  return query execute 'select *, 0 from (' || events || ') e order by ev_id, op';
end
$$;
comment on function gdq.get_events(bigint, uuid) is 'All events of an open batch, retries first.';
