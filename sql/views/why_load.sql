-- why_load(view, compiled): why a target without a position that holds is loaded in full. Writes: nothing.
create or replace function gdq.why_load(view text, compiled gdq.compiled_view) returns text
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
  return case when not exists (select from gdq_target.position p where p.view = why_load.view) then 'first load'
              when to_regclass(compiled.target) is null then 'the target table is gone'
              else 'the target is not as the last refresh left it' end;
end
$$;
comment on function gdq.why_load(text, gdq.compiled_view) is
  'Why a target without a position that holds is loaded in full.';
