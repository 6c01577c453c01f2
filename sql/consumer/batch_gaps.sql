-- batch_gaps(batch_id, token, of_table): the truncate, ddl and resync events of one table in an open batch, in order.
-- batch_rows() and batch_sql() give the table's row changes only.
-- Result: one row for each event; data: its details, of a TRUNCATE also its origin. Writes: nothing. Errors: GDQ01 for
-- a stale token or a finished batch; 42704 for a table that the consumer does not take; 42501; GDQ07.
create or replace function gdq.batch_gaps(batch_id bigint, token uuid, of_table regclass)
  returns table (ev_id bigint, kind text, tbl text, data jsonb)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
  queue_of integer := (select s.queue_id from gdq.subscription s where s.subscription_id = b.subscription_id);
  events text := gdq.queue_events_sql(queue_of, array[of_table::oid], b.snapshot_from, b.snapshot_to,
                                      false, b.subscription_id);
begin
  perform gdq.require_held(b, token);
  if not exists (select from gdq.subscribed_tables(b.subscription_id) t where t.relid = of_table)
     and not exists (select from gdq.subscription_resync r
                      where r.subscription_id = b.subscription_id and r.relid = of_table and r.kind = 'removed') then
    raise exception 'table % is not among those of batch %', of_table, batch_id using errcode = 'undefined_object';
  end if;
  if events is not null then
    return query execute format($sql$
      select ev_id, op, tbl, case when origin is null then new
                                  else coalesce(new, '{}') || jsonb_build_object('origin', origin) end
        from (%s) e order by ev_id $sql$, events);
  end if;
end
$$;
comment on function gdq.batch_gaps(bigint, uuid, regclass) is
  'The truncate, ddl and resync events of one table in an open batch.';
