-- drop_group(name): removes a group; its views stay, and are refreshed one by one. Result: true; false when there was
-- none. Writes: view_group, view.
create or replace function gdq.drop_group(name text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  lock table gdq.view_group in share row exclusive mode;
  update gdq.view v
     set group_id = null
    from gdq.view_group g
   where g.group_name = drop_group.name and v.group_id = g.group_id;
  delete from gdq.view_group g where g.group_name = drop_group.name;
  return found;
end
$$;
comment on function gdq.drop_group(text) is 'Removes a group, not its views; false when there was none.';
