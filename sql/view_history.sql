-- view_history(view, max_runs): the refreshes of a view, newest first, at most max_runs (NULL: all that are kept, 1,000).
-- One row a refresh: action: full, delta, none (nothing had changed) or failed; reason: why full; rows_changed: rows
-- deleted from and inserted into the target; seconds from start to end; kind to choice as finish_view_run() has them; group_name: the group that was refreshed.
-- finished_at and action are NULL while it is at work, and for good where its process was killed. Writes: nothing. Errors: 42704.
create or replace function gdq.view_history(view text, max_runs integer default null)
  returns table (started_at timestamptz, finished_at timestamptz, action text, reason text, rows_changed bigint, seconds double precision, error text,
                 kind text, delta_rows bigint, rows_read bigint, work_seconds double precision, choice text, group_name text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := (select v.view_id from gdq.view v where v.view_name = view);
begin
  if id is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  return query
    select r.started_at, r.finished_at, r.action, r.reason, r.rows_changed, extract(epoch from r.finished_at - r.started_at)::double precision, r.error,
           r.kind, r.delta_rows, r.rows_read, r.work_seconds, r.choice, r.group_name
      from gdq.view_run r where r.view_id = id order by r.run_id desc limit max_runs;
end
$$;
comment on function gdq.view_history(text, integer) is 'The refreshes of a view, newest first.';

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

-- view_changed(view): whether a refresh would find something to do: a row or event of its tables that has become visible
-- since the position of its consumer, or a gap. Costs a look at an index of each log. What was done to the target itself
-- does not count, nor that capture is off: what is written then is nowhere to be seen. Writes: nothing. Errors: 42704.
create or replace function gdq.view_changed(view text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  s record;
  since pg_snapshot;
  log regclass;
  found_row boolean;
begin
  select q.queue_name, ss.subscription_id into s
    from gdq.view v join gdq.queue q using (queue_id) join gdq.consumer c on c.consumer_name = v.consumer_name
    join gdq.subscription ss on ss.queue_id = v.queue_id and ss.consumer_id = c.consumer_id
   where v.view_name = view;
  if s.subscription_id is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  since := (gdq.position_of(s.subscription_id)).snapshot;
  if exists (select from gdq.cut_tables(s.subscription_id))
     or exists (select from gdq.delta_events(s.queue_name, since, pg_current_snapshot(),
                  array(select t.relid::regclass from gdq.subscribed_tables(s.subscription_id) t)) e where e.kind <> 'message' and e.ev_id is not null) then
    return true;
  end if;
  for log in select g.segment from gdq.subscribed_tables(s.subscription_id) t join gdq.table_version tv using (table_id)
                    join gdq.log_segment g using (version_id) where pg_relation_size(g.segment) > 0 loop
    execute format('select exists (select from %s where ev_txid >= $1) or exists (select from %1$s where ev_txid = any ($2))', log)
      into found_row using pg_snapshot_xmax(since)::text::bigint, array(select x::text::bigint from pg_snapshot_xip(since) x);
    if found_row then
      return true;
    end if;
  end loop;
  return false;
exception when sqlstate 'GDQ02' or undefined_table then
  return true;  -- gone, or going: the refresh says what it is
end
$$;
comment on function gdq.view_changed(text) is 'Whether a refresh of a view would find something to do.';
