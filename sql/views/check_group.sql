-- check_group(views): error for views that cannot be refreshed as one group. They must be of one queue and of the
-- engine postgres, with targets in one database. None may read the target of another, not by way of other views either:
-- at the group's snapshot that target does not yet hold the rows that the group is about to write.
-- Writes: nothing. Errors: 42704 for an unknown view; 0A000 for views that do not go together.
create or replace function gdq.check_group(views text[]) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  m record;
  first record;
  circle record;
begin
  for m in select n.name, v.view_id, v.queue_id, v.options->>'target_dsn' as target_dsn,
                  v.options->>'engine' is not distinct from 'postgres' as in_server,
                  gdq.target_is_lake(v.target) as lake
             from unnest(views) with ordinality n(name, number)
             left join gdq.view v on v.view_name = n.name
            order by n.number loop
    if m.view_id is null then
      raise exception 'view "%" does not exist', m.name
        using errcode = 'undefined_object', hint = 'gdq views lists them.';
    elsif m.lake then
      raise exception 'view "%" cannot be in a group: its target is a lake table, and no commit moves two of these',
        m.name
        using errcode = 'feature_not_supported',
              hint = 'A group takes views whose targets are tables of one PostgreSQL database.';
    elsif not m.in_server then
      raise exception 'view "%" cannot be in a group: it is refreshed by Spark', m.name
        using errcode = 'feature_not_supported', hint = 'A group takes views of the engine postgres.';
    end if;
    if first is null then
      first := m;
    elsif m.queue_id <> first.queue_id then
      raise exception 'views "%" and "%" are of two queues: no group', first.name, m.name
        using errcode = 'feature_not_supported';
    elsif m.target_dsn is distinct from first.target_dsn then
      raise exception 'views "%" and "%" have targets in two databases: no group', first.name, m.name
        using errcode = 'feature_not_supported',
              hint = 'One transaction moves a group: give all the same --target-dsn, or none.';
    end if;
  end loop;
  with recursive
    filled as (select v.view_id, v.view_name, gdq.target_oid(v.target) as target
                 from gdq.view v where v.options->>'target_dsn' is null),
    reads as (select above.view_id as above, below.view_id as below, below.view_name
                from gdq.view above join gdq.consumer c on c.consumer_name = above.consumer_name
                join gdq.subscription s on s.queue_id = above.queue_id and s.consumer_id = c.consumer_id
                cross join lateral gdq.subscribed_tables(s.subscription_id) t
                join filled below on below.target = t.relid),
    reached as (select v.view_id as member, v.view_name as name, r.below, r.view_name
                  from gdq.view v join reads r on r.above = v.view_id where v.view_name = any (views)
                union
                select o.member, o.name, r.below, r.view_name from reached o join reads r on r.above = o.below)
  select o.name, o.view_name into circle
    from reached o
   where o.view_name = any (views) and o.member <> o.below
   order by 1, 2 limit 1;
  if found then
    raise exception 'view "%" reads the target of view "%": they cannot be in one group', circle.name, circle.view_name
      using errcode = 'feature_not_supported', hint = format('Refresh %I after the group.', circle.name);
  end if;
end
$$;
comment on function gdq.check_group(text[]) is 'Error for views that cannot be refreshed as one group.';

-- target_is_lake(target): whether a view's target is a lake table, and not a table of PostgreSQL. Writes: nothing.
create or replace function gdq.target_is_lake(target text) returns boolean
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select target ~ '^(delta|parquet|iceberg):'
$$;
comment on function gdq.target_is_lake(text) is 'Whether a view''s target is a lake table.';

-- target_oid(target): the oid of a view's target in this database, whatever the rights of the session; NULL when there
-- is none. Writes: nothing.
create or replace function gdq.target_oid(target text) returns oid
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  parts text[];
begin
  if gdq.target_is_lake(target) then
    return null;
  end if;
  parts := parse_ident(target);
  return (select c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace
           where n.nspname = parts[1] and c.relname = parts[2]);
end
$$;
comment on function gdq.target_oid(text) is 'The oid of a view''s target in this database; NULL when there is none.';
