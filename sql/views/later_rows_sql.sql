-- later_rows_sql(queue, tbl): the typed SELECTs of a table's log rows after a snapshot, as delta_sql() gives them, with
-- two parameters: $1 bigint, the snapshot's xmax, and $2 bigint[], the transactions that were open in it. One for each
-- segment of the table's log, with the same columns. For refreshes that begin_compiled_refresh() begins. The SELECTs
-- are good while view_stamp() is the same. Running one fails at a row that lacks the value of a column.
-- Result: rows (segment, rows_sql). Writes: nothing. Errors: 42704; 55000.
create or replace function gdq.later_rows_sql(queue text, tbl regclass)
  returns table (segment oid, rows_sql text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  id integer := gdq.find_table(queue, tbl);
  may_lack text[] := array(select l.name from gdq.table_columns(queue, tbl) l where l.omitted);
begin
  return query
    select s.segment::oid, gdq.table_changes_sql(id, null, null, null, may_lack, array[s.segment]::regclass[])
      from gdq.log_segment s
      join gdq.table_version v using (version_id)
     where v.table_id = id
     order by s.version_id, s.slot;
end
$$;
comment on function gdq.later_rows_sql(text, regclass) is
  'Typed SELECTs of a table''s log rows after a snapshot that is given as parameters.';
