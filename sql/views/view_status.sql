-- view_status(queue): one row a view of a queue (NULL: of all queues) with how fresh it is. age: since the start of the last
-- refresh that was finished, so the snapshot that the target stands for is at most as old; NULL before the first.
-- last_action, rows_changed, error, kind, delta_rows: of the last refresh that ended. group_name: the group that it is refreshed with. Writes: nothing. Errors: 42704.
create or replace function gdq.view_status(queue text default null)
  returns table (queue_name text, view_name text, age interval, last_action text, rows_changed bigint, error text, kind text, delta_rows bigint,
                 group_name text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  wanted integer := case when queue is not null then gdq.find_queue(queue) end;
begin
  return query
    select q.queue_name, v.view_name, clock_timestamp() - done.started_at, ended.action, ended.rows_changed, ended.error,
           ended.kind, ended.delta_rows, g.group_name
      from gdq.view v join gdq.queue q using (queue_id) left join gdq.view_group g using (group_id)
      left join lateral (select r.* from gdq.view_run r where r.view_id = v.view_id and r.finished_at is not null order by r.run_id desc limit 1) ended on true
      left join lateral (select r.started_at from gdq.view_run r where r.view_id = v.view_id and r.action <> 'failed' order by r.run_id desc limit 1) done on true
     where wanted is null or v.queue_id = wanted order by 1, 2;
end
$$;
comment on function gdq.view_status(text) is 'Views with how fresh they are.';
