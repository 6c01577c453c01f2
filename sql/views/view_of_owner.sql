-- The view that a session may refresh by CALL.

-- view_of_owner(view): the view's row. Writes: nothing. Errors: 42704; 42501 when the session acts as another role than
-- the view's owner.
create or replace function gdq.view_of_owner(view text) returns gdq.view
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  found_view gdq.view := (select v from gdq.view v where v.view_name = view);
  owner name := (select s.owner_role from gdq.subscription s join gdq.consumer c using (consumer_id)
                  where s.queue_id = found_view.queue_id and c.consumer_name = found_view.consumer_name);
begin
  if found_view.view_id is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  elsif owner <> gdq.invoker() then
    raise exception 'view "%" is refreshed with the rights of %, this session acts as %', view, owner, gdq.invoker()
      using errcode = 'insufficient_privilege', hint = format('SET ROLE %I first.', owner);
  end if;
  return found_view;
end
$$;
comment on function gdq.view_of_owner(text) is
  'The row of a view that belongs to the session''s role; else error 42501.';
