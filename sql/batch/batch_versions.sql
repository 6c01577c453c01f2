-- batch_versions(batch_id, token, tbl): the versions of a table that an open batch holds rows of, oldest first. DDL
-- between two versions changed the table's columns; batch_sql() reads each version with its own columns.
-- Result: version; columns: those of table_columns(), as a jsonb array. Writes: nothing. Errors: GDQ01, GDQ07, 42501,
-- 42704.
create or replace function gdq.batch_versions(batch_id bigint, token uuid, tbl regclass)
  returns table (version bigint, columns jsonb)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
  from_snapshot pg_snapshot := gdq.delivered_from(b, tbl);
  id integer;
begin
  select t.table_id into id from gdq.subscribed_tables(b.subscription_id) t where t.relid = tbl;
  if id is null then
    raise exception 'table % is not among those of batch %', tbl, batch_id using errcode = 'undefined_object';
  end if;
  return query
    select v.version_id, v.columns
      from gdq.table_version v
     where v.table_id = id
       and exists (select from gdq.version_segments(v.version_id) s
                    where gdq.changes_sql(s, 'ev_id', from_snapshot, b.snapshot_to) is not null)
     order by v.version_id;
  perform gdq.require_held(b, token);
end
$$;
comment on function gdq.batch_versions(bigint, uuid, regclass) is
  'The versions of a table that a batch holds rows of, oldest first.';
