-- off_reason(table_id): the reason recorded last why capture of a table is off. Writes: nothing.
create or replace function gdq.off_reason(table_id integer) returns text
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select r.reason
    from gdq.captured_table ct join gdq.resync r using (queue_id, relid)
   where ct.table_id = off_reason.table_id
   order by r.resync_id desc limit 1
$$;
comment on function gdq.off_reason(integer) is 'The reason recorded last why capture of a table is off.';
