-- copy_sql(queue, tbl): SELECT of the rows of a captured table as get_events() would give them after an INSERT: columns
-- key and new, both jsonb. Rows that the table's row filter leaves out are missing. Run it in the transaction whose
-- snapshot is given to resynced(), under a search_path of pg_catalog alone, as a role that may read the table.
-- Writes: nothing. Errors: 42704.
create or replace function gdq.copy_sql(queue text, tbl regclass) returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  v gdq.table_version;
  image record;
  logged text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = gdq.find_table(queue, tbl);
  select * into strict v from gdq.table_version tv where tv.version_id = gdq.current_version(t.table_id);
  image := gdq.json_images(v.columns);
  select string_agg(quote_ident('new_' || c.suffix), ', ' order by c.attnum) into logged
    from jsonb_to_recordset(v.columns) c(attnum int, suffix text);
  return format('select %s as key, %s as new from (select %s from %s%s r%s) as r(%s)',
    image.key, image.new_image,
    substr(gdq.image_values(v.columns, 'r', false), 3),
    case when (select c.relkind = 'p' from pg_class c where c.oid = t.relid) then '' else 'only ' end,
    gdq.table_name(t.relid),
    coalesce(' where ' || gdq.filter_sql(t.row_filter, v.filter_names, 'r'), ''),
    logged);
end
$$;
comment on function gdq.copy_sql(text, regclass) is
  'SELECT of the rows of a captured table as events have them after an INSERT.';
