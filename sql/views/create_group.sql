-- create_group(name, views): stores a group of views. A refresh brings all views of a group to one snapshot, in one
-- transaction. A view is in one group at most.
-- Result: true; false when the very same group existed. Writes: view_group, view.
-- Errors: 22023 for a bad name or no views; 42704 for an unknown view; 42710 when the group exists with other views, or
-- a view is in another group; 0A000 for views that do not go together (check_group()).
create or replace function gdq.create_group(name text, views text[]) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
begin
  if name is null or octet_length(name) not between 1 and 63 then
    raise exception 'a group name has 1 to 63 bytes' using errcode = 'invalid_parameter_value';
  end if;
  if coalesce(cardinality(views), 0) = 0 then
    raise exception 'a group needs a view' using errcode = 'invalid_parameter_value';
  end if;
  lock table gdq.view_group in share row exclusive mode;
  select g.group_id into id from gdq.view_group g where g.group_name = create_group.name;
  if id is not null then
    if array(select v.view_name from gdq.view v where v.group_id = id order by 1)
       = array(select distinct u.v from unnest(views) u(v) order by 1) then
      return false;
    end if;
    raise exception 'group "%" exists with other views', name
      using errcode = 'duplicate_object', hint = 'gdq alter-group adds and removes views.';
  end if;
  insert into gdq.view_group (group_name) values (create_group.name) returning group_id into id;
  perform gdq.join_group(id, views);
  return true;
end
$$;
comment on function gdq.create_group(text, text[]) is
  'Stores a group of views that are refreshed together; false when the very same one existed.';

-- join_group(id, views): puts views into a group. The caller holds the lock on view_group. Writes: view. Errors: as
-- create_group().
create or replace function gdq.join_group(id integer, views text[]) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  other record;
begin
  perform gdq.check_group(array(select v.view_name from gdq.view v where v.group_id = id) || views);
  select v.view_name, g.group_name into other
    from gdq.view v join gdq.view_group g using (group_id) where v.view_name = any (views) and v.group_id <> id limit 1;
  if other.view_name is not null then
    raise exception 'view "%" is in group "%"', other.view_name, other.group_name using errcode = 'duplicate_object',
      hint = format('Take it out: gdq alter-group %s --remove %s', other.group_name, other.view_name);
  end if;
  update gdq.view v set group_id = id where v.view_name = any (views);
end
$$;
comment on function gdq.join_group(integer, text[]) is 'Puts views into a group.';

-- find_group(name): the id of a group. Writes: nothing. Errors: 42704.
create or replace function gdq.find_group(name text) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := (select g.group_id from gdq.view_group g where g.group_name = find_group.name);
begin
  if id is null then
    raise exception 'group "%" does not exist', name
      using errcode = 'undefined_object', hint = 'gdq groups lists them.';
  end if;
  return id;
end
$$;
comment on function gdq.find_group(text) is 'Id of a group by name; error 42704 when there is none.';
