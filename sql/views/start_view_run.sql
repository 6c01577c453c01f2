-- start_view_run(view, group_name): notes that a refresh of a view begins. group_name: the group that is refreshed;
-- NULL: the view by itself. Result: the run's id. Writes: view_run. Errors: 42704.
create or replace function gdq.start_view_run(view text, group_name text default null) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  run bigint;
begin
  insert into gdq.view_run (view_id, group_name)
    select v.view_id, start_view_run.group_name from gdq.view v where v.view_name = view
    returning run_id into run;
  if run is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  return run;
end
$$;
comment on function gdq.start_view_run(text, text) is 'Notes that a refresh begins; returns the run''s id.';
