-- alter_group(name, add, remove): puts views into a group and takes others out. The group's next refresh brings a new
-- view to the snapshot of the others; a view that was taken out is refreshed by itself.
-- Result: true; false when nothing changed. Writes: view. Errors: 42704 for an unknown group or view; 42710 when a view
-- is in another group; 0A000 for views that do not go together (check_group()).
create or replace function gdq.alter_group(name text, add text[] default '{}', remove text[] default '{}')
  returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
  missing text;
  before text[];
begin
  lock table gdq.view_group in share row exclusive mode;
  id := gdq.find_group(name);
  select u.v into missing
    from unnest(remove) u(v)
   where not exists (select from gdq.view v where v.view_name = u.v) limit 1;
  if missing is not null then
    raise exception 'view "%" does not exist', missing
      using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  before := array(select v.view_name from gdq.view v where v.group_id = id order by 1);
  update gdq.view v set group_id = null where v.group_id = id and v.view_name = any (remove);
  perform gdq.join_group(id, add);
  return before <> array(select v.view_name from gdq.view v where v.group_id = id order by 1);
end
$$;
comment on function gdq.alter_group(text, text[], text[]) is
  'Puts views into a group and takes others out; false when nothing changed.';
