-- table_columns(queue, tbl, version): the logged columns of a version of a captured table, in column order. version
-- NULL: the newest.
-- Result: omitted: whether updates may leave out a large value of the column if they leave it as it was: those of this
-- version; version NULL: of any that there is.
-- Writes: nothing. Errors: 42704.
create or replace function gdq.table_columns(queue text, tbl regclass, version bigint default null)
  returns table (attnum int, name text, type text, log_type text, as_text boolean, is_key boolean,
                 log_key text, log_old text, log_new text, omitted boolean)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return query
    select c.attnum, c.name, c.type, c.log_type, c.as_text, c.key, c.log_key, c.log_old, c.log_new,
           c.attnum = any (gdq.omitted_columns(v.table_id, table_columns.version))
      from gdq.table_version v,
           jsonb_to_recordset(v.columns) c(attnum int, name text, type text, log_type text, as_text boolean,
                                           key boolean, log_key text, log_old text, log_new text)
     where v.table_id = gdq.find_table(queue, tbl)
       and v.version_id = coalesce(version, gdq.current_version(v.table_id))
     order by c.attnum;
end
$$;
comment on function gdq.table_columns(text, regclass, bigint) is 'The logged columns of a captured table.';
