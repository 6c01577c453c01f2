-- finish_compiled_refresh(view, position, group_name, started, kind, reason, rows_changed, delta_rows, rows_read,
-- kept): ends the refresh that begin_compiled_refresh() has begun in this transaction: the consumer moves to the
-- transaction's snapshot, and the view has one more run in its history.
--   position: the target's before. group_name: the group that is refreshed. started: when. kind: as view_history() has
--   it. reason: why it was loaded in full. rows_changed: deleted plus inserted. delta_rows: netted changes. rows_read:
--   of the tables. kept: values of subqueries at the transaction's snapshot; NULL or empty for none.
-- Result: the position of the transaction's snapshot, which the target gets in the same transaction. Writes: tick,
-- position, view_run, view, subscription_resync, compiled_view. Errors: 25001; 42704; 42501; 40001 and GDQ01 when
-- another refresh has moved the consumer; 55000 when the server has lost transactions.
create or replace function gdq.finish_compiled_refresh(view text, "position" text, group_name text,
  started timestamptz, kind text, reason text, rows_changed bigint, delta_rows bigint, rows_read bigint,
  kept jsonb) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
  v gdq.view := (select vv from gdq.view vv where vv.view_name = view);
  queue_name text := (select q.queue_name from gdq.queue q where q.queue_id = v.queue_id);
  id integer := gdq.own_subscription(queue_name, v.consumer_name);
  pos gdq.position := gdq.position_of(id);
  seen pg_snapshot := pg_current_snapshot();
  action text := case when kind = 'full' then 'full' else 'delta' end;
  seconds double precision := extract(epoch from clock_timestamp() - started);
  made gdq.tick;
  moved text;
begin
  perform gdq.require_repeatable_read();
  if kind <> 'full' and gdq.position_text(v.queue_id, pos.tick_id, pos.snapshot) is distinct from "position" then
    raise exception 'view "%" is not at position %', view, "position"
      using errcode = 'GDQ01', hint = 'Another refresh has moved it.';
  elsif not gdq.snapshot_le(pos.snapshot, seen) then
    raise exception 'position % is later than the server', pos.snapshot
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'The server has lost transactions that it had. gdq rebase starts a new era.';
  end if;
  insert into gdq.tick as t (queue_id, snapshot, event_seq, refresh)
    values (v.queue_id, seen, gdq.last_event(v.queue_id), true) returning t.* into made;
  insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
    values (id, pos.batch_no + 1, made.tick_id, seen, made.event_seq) on conflict do nothing;
  if not found then
    raise exception 'another refresh of view "%" has just ended', view
      using errcode = 'serialization_failure', hint = 'Call again.';
  end if;
  insert into gdq.view_run (view_id, group_name, started_at, finished_at, action, reason, kind, rows_changed,
                            delta_rows, rows_read, work_seconds, snapshot_from, snapshot_to)
    values (v.view_id, group_name, started, clock_timestamp(), action, case when action = 'full' then reason end,
            kind, rows_changed, delta_rows, rows_read, seconds,
            case when action = 'delta' then pos.snapshot end, seen);
  if action = 'full' then
    insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot)
      select id, c.relid, 'copied', seen from gdq.cut_tables(id) c;
    update gdq.view vv set diverged = null where vv.view_id = v.view_id and vv.diverged is not null;
  end if;
  perform gdq.note_work(v.view_id, seconds);
  if random() < 0.02 then
    perform gdq.trim_view_runs(v.view_id);
  end if;
  moved := gdq.position_text(v.queue_id, made.tick_id, seen);
  if kept <> '{}' then
    update gdq.compiled_view c set kept = finish_compiled_refresh.kept, kept_at = moved where c.view_id = v.view_id;
  end if;
  return moved;
end
$$;
comment on function
  gdq.finish_compiled_refresh(text, text, text, timestamptz, text, text, bigint, bigint, bigint, jsonb) is
  'Ends the refresh that begin_compiled_refresh() has begun; the position of the transaction''s snapshot.';
