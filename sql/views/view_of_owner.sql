-- The view that a session may refresh by CALL.

-- view_of_owner(view): the view's row. Writes: nothing. Errors: 42704; 42501 when the session acts as another role than
-- the view's owner.
create or replace function gdq.view_of_owner(view text) returns gdq.view
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  found_view record;
begin
  select v as row, s.owner_role as owner into found_view
    from gdq.view v
    left join gdq.consumer c on c.consumer_name = v.consumer_name
    left join gdq.subscription s on s.queue_id = v.queue_id and s.consumer_id = c.consumer_id
   where v.view_name = view;
  if found_view.row is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  elsif found_view.owner <> gdq.invoker() then
    raise exception 'view "%" is refreshed with the rights of %, this session acts as %',
      view, found_view.owner, gdq.invoker()
      using errcode = 'insufficient_privilege', hint = format('SET ROLE %I first.', found_view.owner);
  end if;
  return found_view.row;
end
$$;
comment on function gdq.view_of_owner(text) is
  'The row of a view that belongs to the session''s role; else error 42501.';
