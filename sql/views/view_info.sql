-- view_info(view): one row a view (NULL: all) with how fresh it is and how its last refresh went.
-- Result: age: since the start of the last refresh that succeeded, so the snapshot that the target stands for is at
-- most as old; NULL before the first. last_refresh: when the last refresh ended; last_action (full, delta, none or
-- failed), last_reason, rows_changed, error, kind and delta_rows are of that one. group_name: the group of views that
-- the view is refreshed with. Writes: nothing. Errors: 42704.
create or replace function gdq.view_info(view text default null)
  returns table (view_name text, queue_name text, consumer_name text, tables text[], target text, definition text,
                 options jsonb, created_at timestamptz, age interval, last_refresh timestamptz, last_action text,
                 last_reason text, rows_changed bigint, error text, kind text, delta_rows bigint, group_name text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if view is not null and not exists (select from gdq.view v where v.view_name = view) then
    raise exception 'view "%" does not exist', view
      using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  return query
    select v.view_name, q.queue_name, v.consumer_name,
           array(select coalesce(gdq.table_name(ct.relid), ct.table_name)
                   from gdq.subscription s join gdq.consumer c using (consumer_id),
                        gdq.subscribed_tables(s.subscription_id) ct
                  where s.queue_id = v.queue_id and c.consumer_name = v.consumer_name order by 1),
           v.target, v.definition, v.options, v.created_at, clock_timestamp() - done.started_at,
           r.finished_at, r.action, r.reason, r.rows_changed, r.error, r.kind, r.delta_rows, g.group_name
      from gdq.view v
      join gdq.queue q using (queue_id)
      left join gdq.view_group g using (group_id)
      left join lateral (select * from gdq.view_run vr where vr.view_id = v.view_id and vr.finished_at is not null
                          order by vr.run_id desc limit 1) r on true
      left join lateral (select vr.started_at from gdq.view_run vr
                          where vr.view_id = v.view_id and vr.action <> 'failed'
                          order by vr.run_id desc limit 1) done on true
     where view is null or v.view_name = view order by v.view_name;
end
$$;
comment on function gdq.view_info(text) is 'Views with how fresh they are and how their last refresh went.';
