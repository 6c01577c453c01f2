-- later_rows_sql(queue, tbl): the typed SELECT of a table's log rows after a snapshot, as delta_sql() gives it, with
-- two parameters: $1 bigint, the snapshot's xmax, and $2 bigint[], the transactions that were open in it; and the
-- segments of the log that it reads: all of the table's. For refreshes that begin_compiled_refresh() begins. The SELECT
-- is good while view_stamp() is the same. Running it fails at a row that lacks the value of a column.
-- Result: one row (rows_sql, segments). Writes: nothing. Errors: 42704; 55000.
create or replace function gdq.later_rows_sql(queue text, tbl regclass)
  returns table (rows_sql text, segments oid[])
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.find_table(queue, tbl);
begin
  segments := array(select s.segment::oid from gdq.log_segment s join gdq.table_version v using (version_id)
                     where v.table_id = id order by s.version_id, s.slot);
  rows_sql := gdq.table_changes_sql(id, null, null, null,
    array(select l.name from gdq.table_columns(queue, tbl) l where l.omitted), segments::regclass[]);
  return next;
end
$$;
comment on function gdq.later_rows_sql(text, regclass) is
  'Typed SELECT of a table''s log rows after a snapshot that is given as parameters.';
