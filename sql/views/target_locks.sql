-- target_locks(target, state): "; " and the LOCK TABLE statement for those of the two tables that exist; empty for
-- none. Writes: nothing.
create or replace function gdq.target_locks(target text, state text) returns text
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
declare
  names text[] := array_remove(array[case when to_regclass(target) is not null then target end,
                                     case when to_regclass(state) is not null then state end], null);
begin
  return case when names = '{}' then ''
              else '; lock table only ' || array_to_string(names, ', only ') || ' in row exclusive mode' end;
end
$$;
comment on function gdq.target_locks(text, text) is
  'The LOCK TABLE statement for a target and its state, as far as they exist.';
