-- differing_options(queue, tbl, options): the names of those options that a captured table does not have.
--   options: as for alter_table_options().
-- Result: empty when alter_table_options() would change nothing. Writes: nothing.
-- Errors: 42704; 22023 and 42703 for the options.
create or replace function gdq.differing_options(queue text, tbl regclass, options jsonb) returns text[]
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = gdq.find_table(queue, tbl);
  perform gdq.new_options(t, options);
  return array(select k from jsonb_object_keys(options) k
                where gdq.new_options(t, jsonb_build_object(k, options->k)) is distinct from t order by k);
end
$$;
comment on function gdq.differing_options(text, regclass, jsonb) is
  'The names of those options that a captured table does not have.';
