-- view_history(view, max_runs): the refreshes of a view, newest first, at most max_runs (NULL: all that are kept,
-- 1,000). One row a refresh: action: full, delta, none (nothing had changed) or failed; reason: why full; rows_changed:
-- rows deleted from and inserted into the target; seconds from start to end; kind to choice as finish_view_run() has
-- them; group_name: the group that was refreshed. finished_at and action are NULL while it is at work, and for good
-- where its process was killed. Writes: nothing. Errors: 42704.
create or replace function gdq.view_history(view text, max_runs integer default null)
  returns table (started_at timestamptz, finished_at timestamptz, action text, reason text, rows_changed bigint,
                 seconds double precision, error text, kind text, delta_rows bigint, rows_read bigint,
                 work_seconds double precision, choice text, group_name text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := (select v.view_id from gdq.view v where v.view_name = view);
begin
  if id is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  return query
    select r.started_at, r.finished_at, r.action, r.reason, r.rows_changed,
           extract(epoch from r.finished_at - r.started_at)::double precision, r.error,
           r.kind, r.delta_rows, r.rows_read, r.work_seconds, r.choice, r.group_name
      from gdq.view_run r
     where r.view_id = id
     order by r.run_id desc limit max_runs;
end
$$;
comment on function gdq.view_history(text, integer) is 'The refreshes of a view, newest first.';
