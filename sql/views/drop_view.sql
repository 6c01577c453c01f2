-- drop_view(view): removes a view, its history and its consumer, and takes it out of its group; the target is not
-- touched. The functions that refresh it go too, if the owner of gdq may drop them.
-- Result: true; false when there was none. Writes: deletes from view and view_run, and what unregister_consumer()
-- deletes. Errors: 42501 for the consumer of another role.
create or replace function gdq.drop_view(view text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  old gdq.view;
begin
  perform gdq.drop_functions(view);
  delete from gdq.view v where v.view_name = view returning * into old;
  if old.view_id is null then
    return false;
  end if;
  perform gdq.unregister_consumer((select q.queue_name from gdq.queue q where q.queue_id = old.queue_id),
                                  old.consumer_name);
  if old.group_id is not null then
    raise notice 'view "%" was in group "%", which goes on without it',
      view, (select g.group_name from gdq.view_group g where g.group_id = old.group_id);
  end if;
  return true;
end
$$;
comment on function gdq.drop_view(text) is 'Removes a view and its consumer; false when there was none.';
