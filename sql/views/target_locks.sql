-- target_locks(target, state): "; " and the LOCK TABLE statement for those of the two tables that exist; empty for
-- none. Writes: nothing.
create or replace function gdq.target_locks(target text, state text) returns text
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
  return coalesce((select '; lock table only ' || string_agg(t, ', only ') || ' in row exclusive mode'
                     from unnest(array[target, state]) t where to_regclass(t) is not null), '');
end
$$;
comment on function gdq.target_locks(text, text) is
  'The LOCK TABLE statement for a target and its state, as far as they exist.';
