-- drop_functions(view): drops the functions of schema gdq_target that refresh a view, if the owner of gdq may. Writes:
-- compiled_view.
create or replace function gdq.drop_functions(view text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  made regprocedure;
begin
  for made in
    select p.oid
      from gdq.compiled_view c
      join gdq.view v using (view_id)
      join pg_proc p on p.oid in (to_regproc(c.changes), to_regproc(c.load), to_regproc(c.look))
     where v.view_name = view
       and p.pronamespace = to_regnamespace('gdq_target') and p.proname ~ '^(refresh|load|look)_[0-9a-f]{12}$'
  loop
    execute format('drop function %s', made);
  end loop;
  delete from gdq.compiled_view c using gdq.view v where v.view_name = drop_functions.view and c.view_id = v.view_id;
exception when insufficient_privilege then
  null;
end
$$;
comment on function gdq.drop_functions(text) is
  'Drops the functions that refresh a view, if the owner of gdq may.';
