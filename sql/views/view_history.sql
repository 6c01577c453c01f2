-- view_history(view, max_runs): the refreshes of a view, newest first; max_runs: at most this number; NULL: all that
-- are kept, which are 1,000.
-- Result: one row for each refresh. action, reason, rows_changed, error, kind, delta_rows, rows_read, work_seconds and
-- choice: as finish_view_run() has them; seconds: from start to end; group_name: the group that was refreshed; audit,
-- audit_keys, audit_seconds, audit_reason: as note_audit() has them, NULL without an audit.
-- finished_at and action are NULL while a refresh is at work, and stay NULL when its process was killed.
-- Writes: nothing. Errors: 42704.
create or replace function gdq.view_history(view text, max_runs integer default null)
  returns table (started_at timestamptz, finished_at timestamptz, action text, reason text, rows_changed bigint,
                 seconds double precision, error text, kind text, delta_rows bigint, rows_read bigint,
                 work_seconds double precision, choice text, group_name text, audit text,
                 audit_keys integer, audit_seconds double precision, audit_reason text)
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
           r.kind, r.delta_rows, r.rows_read, r.work_seconds, r.choice, r.group_name, r.audit, r.audit_keys,
           r.audit_seconds, r.audit_reason
      from gdq.view_run r
     where r.view_id = id
     order by r.run_id desc limit max_runs;
end
$$;
comment on function gdq.view_history(text, integer) is 'The refreshes of a view, newest first.';
