-- finish_view_run(run_id, action, reason, snapshot_from, snapshot_to, rows_changed, error, kind, delta_rows, rows_read,
-- work_seconds, choice): notes how a refresh ended.
--   action: full, delta, none (nothing had changed) or failed. reason: why the view was loaded in full. rows_changed:
--   rows deleted from and inserted into the target. error: the message of a failed refresh. kind: what was computed:
--   none, incremental, by-key or full. delta_rows: changes, netted. rows_read: rows read of the tables. work_seconds:
--   time for computing and writing. choice: why this kind was expected to cost less.
-- A hundredth of work_seconds is added to what audits of the view may take, ten seconds in all at most. After a full
-- load the view has not diverged. Writes: view, view_run; the last 1,000 rows of a view are kept.
create or replace function gdq.finish_view_run(run_id bigint, action text, reason text default null,
  snapshot_from pg_snapshot default null, snapshot_to pg_snapshot default null, rows_changed bigint default null,
  error text default null, kind text default null, delta_rows bigint default null, rows_read bigint default null,
  work_seconds double precision default null, choice text default null) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
begin
  update gdq.view_run r
     set finished_at = clock_timestamp(), action = finish_view_run.action, reason = finish_view_run.reason,
         snapshot_from = finish_view_run.snapshot_from, snapshot_to = finish_view_run.snapshot_to,
         rows_changed = finish_view_run.rows_changed, error = finish_view_run.error, kind = finish_view_run.kind,
         delta_rows = finish_view_run.delta_rows, rows_read = finish_view_run.rows_read,
         work_seconds = finish_view_run.work_seconds, choice = finish_view_run.choice
   where r.run_id = finish_view_run.run_id returning r.view_id into id;
  if action <> 'failed' then
    update gdq.view v
       set audit_credit = least(v.audit_credit + 0.01 * coalesce(finish_view_run.work_seconds, 0), 10),
           diverged = case when action <> 'full' then v.diverged end
     where v.view_id = id;
  end if;
  delete from gdq.view_run r
   where r.view_id = id
     and r.run_id <= (select o.run_id from gdq.view_run o where o.view_id = id
                       order by o.run_id desc offset 1000 limit 1);
end
$$;
comment on function gdq.finish_view_run(bigint, text, text, pg_snapshot, pg_snapshot, bigint, text, text, bigint,
  bigint, double precision, text) is
  'Notes how a refresh ended.';
