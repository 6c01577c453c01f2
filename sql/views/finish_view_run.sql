-- finish_view_run(run_id, action, reason, snapshot_from, snapshot_to, rows_changed, error, kind, delta_rows, rows_read,
-- work_seconds, choice): notes how a refresh ended.
--   action: full, delta, none (nothing had changed) or failed. reason: why the view was loaded in full. rows_changed:
--   rows deleted from and inserted into the target. error: the message of a failed refresh. kind: what was computed:
--   none, incremental, by-key or full. delta_rows: changes, netted. rows_read: rows read of the tables. work_seconds:
--   time for computing and writing. choice: why this kind was expected to cost less.
-- After a full load the view has not diverged. Writes: view, view_run, as note_work() and trim_view_runs() do.
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
    perform gdq.note_work(id, finish_view_run.work_seconds);
  end if;
  if action = 'full' then
    update gdq.view v set diverged = null where v.view_id = id and v.diverged is not null;
  end if;
  perform gdq.trim_view_runs(id);
end
$$;
comment on function gdq.finish_view_run(bigint, text, text, pg_snapshot, pg_snapshot, bigint, text, text, bigint,
  bigint, double precision, text) is
  'Notes how a refresh ended.';
