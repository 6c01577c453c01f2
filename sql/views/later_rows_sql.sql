-- later_rows_sql(queue, tbl, segments): the typed SELECT of a table's log rows after a snapshot, as delta_sql() gives
-- it, with two parameters: $1 bigint, the snapshot's xmax, and $2 bigint[], the transactions that were open in it. For
-- refreshes that begin_prepared_refresh() has begun, which gives the segments; the same segments have the same SELECT
-- while view_stamp() is the same. Running it fails at a row that lacks the value of a column.
-- Writes: nothing. Errors: 42704, 55000.
create or replace function gdq.later_rows_sql(queue text, tbl regclass, segments regclass[]) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.find_table(queue, tbl);
begin
  return gdq.table_changes_sql(id, null, null, null,
    array(select l.name from gdq.table_columns(queue, tbl) l where l.omitted), segments);
end
$$;
comment on function gdq.later_rows_sql(text, regclass, regclass[]) is
  'Typed SELECT of a table''s log rows after a snapshot that is given as parameters.';
