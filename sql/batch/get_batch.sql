-- get_batch(batch_id, token): the events of an open batch, of whole transactions only, in ev_id order; for one row that
-- is the order of its versions. Reading again gives the same events.
-- Result: op: insert, update, delete, truncate, ddl, resync or message. key, old and new: as the mode logs them; old
-- and new are NULL where there is no such image, and an update has neither old nor new value of a column that it left
-- as it was, where the table is captured with unchanged "omit" and the value is large.
-- new of a message: {"type": ..., "data": ...}, with extra1 to extra4 where given. origin: NULL unless the
-- table is captured with its origin.
-- Writes: nothing. Errors: GDQ01 for a stale token or a finished batch, also while reading; GDQ07; 42501.
create or replace function gdq.get_batch(batch_id bigint, token uuid)
  returns table (ev_id bigint, ev_txid bigint, ev_time timestamptz, op text, tbl text,
                 key jsonb, old jsonb, new jsonb, origin text)
language plpgsql volatile rows 1000 security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set max_parallel_workers_per_gather = 0
  set datestyle = 'ISO, YMD' set intervalstyle = postgres set timezone = 'UTC' set extra_float_digits = 1
  set bytea_output = hex set lc_monetary = 'C' set quote_all_identifiers = off set xmlbinary = base64
as $$
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
  events text;
begin
  events := gdq.subscription_events_sql(b.subscription_id, b.snapshot_from, b.snapshot_to);
  -- checked after the segments were looked up: while the batch is open they cannot have been truncated
  perform gdq.require_held(b, token);
  -- op: the delete and the insert that a changed key gives in mode pk have one number
  return query execute 'select * from (' || events || ') e order by ev_id, op';
end
$$;
comment on function gdq.get_batch(bigint, uuid) is 'The events of an open batch, in order.';
