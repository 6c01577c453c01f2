-- start_view_run(view): notes that a refresh begins. Result: the run's id. Writes: view_run. Errors: 42704.
create or replace function gdq.start_view_run(view text) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  run bigint;
begin
  insert into gdq.view_run (view_id) select v.view_id from gdq.view v where v.view_name = view returning run_id into run;
  if run is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  return run;
end
$$;
comment on function gdq.start_view_run(text) is 'Notes that a refresh begins.';
