-- set_view_owner(view, role): gives a view to another role, with whose rights it is refreshed from then on. The target
-- is not touched: give the new owner its table too. Only administrators may call it, and only for a role that they may
-- act as: the view's code will run as that role. Writes: subscription; drops
-- the functions of the former owner, as drop_view() does. Errors: 42704 for view or role; 42501.
create or replace function gdq.set_view_owner(view text, role name) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v record;
begin
  select q.queue_name, vv.consumer_name into v
    from gdq.view vv join gdq.queue q using (queue_id) where vv.view_name = view;
  if v.consumer_name is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  perform gdq.set_consumer_role(v.queue_name, v.consumer_name, role);
  -- his functions are his own
  perform gdq.drop_functions(view);
end
$$;
comment on function gdq.set_view_owner(text, name) is
  'Gives a view to another role, with whose rights it is refreshed.';
