-- batch_tables(batch_id, token): the captured tables whose logs may hold rows of an open batch. Writes: nothing.
-- Errors: GDQ01, GDQ07, 42501.
create or replace function gdq.batch_tables(batch_id bigint, token uuid) returns table (tbl regclass, table_name text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
begin
  return query
    select t.relid, coalesce(gdq.table_name(t.relid), gdq.last_table_name(t.table_id))
      from gdq.changed_tables(b.subscription_id, b.snapshot_from, coalesce(b.snapshot_to, pg_current_snapshot())) t
     where exists (select from gdq.table_version v, gdq.version_segments(v.version_id) where v.table_id = t.table_id)
     order by 2;
end
$$;
comment on function gdq.batch_tables(bigint, uuid) is 'The captured tables whose logs may hold rows of an open batch.';
