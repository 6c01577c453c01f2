-- batch_sql(batch_id, token, tbl, version): the typed SELECT of one table's rows in an open batch: ev_id, ev_txid,
-- ev_time, ev_op (I, U, D; o and n: the two halves of a split update), then the logged columns. Not sorted. Run it with
-- enable_seqscan and max_parallel_workers_per_gather off. Before the columns come ev_origin and ev_unchanged, where the
-- table is captured so: see table_changes_sql().
--   version: only rows of this version, with its columns (see batch_versions); NULL: all rows, with the columns of the
--   newest version.
-- Writes: nothing. Errors: GDQ01, GDQ07, 42501, 42704, 55000 (see table_changes_sql).
create or replace function gdq.batch_sql(batch_id bigint, token uuid, tbl regclass, version bigint default null)
  returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
  id integer;
  changes text;
begin
  select t.table_id into id from gdq.subscribed_tables(b.subscription_id) t where t.relid = tbl;
  if id is null then
    raise exception 'table % is not among those of batch %', tbl, batch_id using errcode = 'undefined_object';
  end if;
  changes := gdq.table_changes_sql(id, gdq.delivered_from(b, tbl), b.snapshot_to, version);
  perform gdq.require_held(b, token);
  if (select t.origin from gdq.captured_table t where t.table_id = id) then
    changes := gdq.skip_origin_sql(b.subscription_id, 'ev_origin', changes);
  end if;
  return changes;
end
$$;
comment on function gdq.batch_sql(bigint, uuid, regclass, bigint) is
  'Typed SELECT of one table''s rows in an open batch.';
