-- group_info(name): one row for each group of views (NULL: all groups).
-- Result: views: by name. last_refresh and error: those of the last refresh of the group that ended. Writes: nothing.
-- Errors: 42704.
create or replace function gdq.group_info(name text default null)
  returns table (group_name text, queue_name text, views text[], created_at timestamptz, last_refresh timestamptz,
                 error text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  wanted integer := case when name is not null then gdq.find_group(name) end;
begin
  return query
    select g.group_name,
           (select q.queue_name from gdq.view v join gdq.queue q using (queue_id)
             where v.group_id = g.group_id limit 1),
           array(select v.view_name from gdq.view v where v.group_id = g.group_id order by 1),
           g.created_at, r.finished_at, r.error
      from gdq.view_group g
      left join lateral (select vr.* from gdq.view v join gdq.view_run vr using (view_id)
                          where v.group_id = g.group_id and vr.group_name = g.group_name and vr.finished_at is not null
                          order by vr.run_id desc limit 1) r on true
     where wanted is null or g.group_id = wanted order by 1;
end
$$;
comment on function gdq.group_info(text) is 'Groups of views that are refreshed together.';
