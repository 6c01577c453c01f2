-- finish_prepared_refresh(view, position, rows_changed, delta_rows, rows_read, seconds): ends the refresh that
-- begin_prepared_refresh() has begun in this transaction: the consumer moves to the transaction's snapshot, and the
-- view has one more run in its history.
--   position: as given to begin_prepared_refresh(). rows_changed: deleted plus inserted. delta_rows: netted changes.
--   rows_read: of the tables. seconds: of computing.
-- Result: the position of the transaction's snapshot, which the target gets in the same transaction. Writes: tick,
-- position, view_run, view. Errors: 25001; 42704; 42501; GDQ01 when the consumer is elsewhere; 55000 when the server
-- has lost transactions.
create or replace function gdq.finish_prepared_refresh(view text, "position" text, rows_changed bigint,
  delta_rows bigint, rows_read bigint, seconds double precision) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
  v gdq.view := (select vv from gdq.view vv where vv.view_name = view);
  queue_name text := (select q.queue_name from gdq.queue q where q.queue_id = v.queue_id);
  id integer := gdq.own_subscription(queue_name, v.consumer_name);
  pos gdq.position := gdq.position_of(id);
  seen pg_snapshot := pg_current_snapshot();
  made gdq.tick;
begin
  perform gdq.require_repeatable_read();
  if gdq.position_text(v.queue_id, pos.tick_id, pos.snapshot) is distinct from "position" then
    raise exception 'view "%" is not at position %', view, "position"
      using errcode = 'GDQ01', hint = 'Another refresh has moved it.';
  elsif not gdq.snapshot_le(pos.snapshot, seen) then
    raise exception 'position % is later than the server', "position"
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'The server has lost transactions that it had. gdq rebase starts a new era.';
  end if;
  insert into gdq.tick as t (queue_id, snapshot, event_seq, refresh)
    values (v.queue_id, seen, gdq.last_event(v.queue_id), true) returning t.* into made;
  insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
    values (id, pos.batch_no + 1, made.tick_id, seen, made.event_seq);
  insert into gdq.view_run (view_id, started_at, finished_at, action, kind, rows_changed, delta_rows, rows_read,
                            work_seconds, snapshot_from, snapshot_to)
    values (v.view_id, now(), clock_timestamp(), 'delta', case when delta_rows > 0 then 'incremental' else 'none' end,
            rows_changed, delta_rows, rows_read, seconds, pos.snapshot, seen);
  perform gdq.note_work(v.view_id, seconds);
  if random() < 0.02 then
    perform gdq.trim_view_runs(v.view_id);
  end if;
  return gdq.position_text(v.queue_id, made.tick_id, seen);
end
$$;
comment on function gdq.finish_prepared_refresh(text, text, bigint, bigint, bigint, double precision) is
  'Ends the refresh that begin_prepared_refresh() has begun; the position of the transaction''s snapshot.';
