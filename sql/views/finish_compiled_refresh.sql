-- finish_compiled_refresh(view, position, group_name, started, kind, reason, rows_changed, delta_rows, rows_read,
-- kept): ends the refresh that begin_compiled_refresh() has begun in this transaction: the consumer moves to the
-- transaction's snapshot, and the view has one more run in its history.
--   position: the target's before. group_name: the group that is refreshed. started: when. kind: as view_history() has
--   it. reason: why it was loaded in full. rows_changed: deleted plus inserted. delta_rows: netted changes. rows_read:
--   of the tables; NULL where nothing has changed. kept: values of subqueries at the transaction's snapshot; NULL or
--   empty for none.
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
  at record;
  seen pg_snapshot := pg_current_snapshot();
  action text := case when kind = 'full' then 'full' when rows_read is null then 'none' else 'delta' end;
  seconds double precision := extract(epoch from clock_timestamp() - started);
  made record;
  moved text;
begin
  if current_setting('transaction_isolation') <> 'repeatable read' then
    perform gdq.require_repeatable_read();
  end if;
  select vv.view_id, vv.queue_id, vv.consumer_name, s.subscription_id, s.owner_role,
         vv.audit_share is distinct from 0 as audited, p.batch_no, p.tick_id, p.snapshot,
         -- era_of() in the same query
         (select case when ee.written_by = ee.xmin and ee.written_in = 'gdq.era'::regclass then ee.era end
            from gdq.era ee where ee.queue_id = vv.queue_id order by ee.era_no desc limit 1) as era into at
    from gdq.view vv
    join gdq.consumer c on c.consumer_name = vv.consumer_name
    join gdq.subscription s on s.queue_id = vv.queue_id and s.consumer_id = c.consumer_id
    cross join lateral (select * from gdq.position pp where pp.subscription_id = s.subscription_id
                         order by pp.batch_no desc limit 1) p
   where vv.view_name = view;
  if at.owner_role is distinct from gdq.invoker() then
    perform gdq.own_subscription((select q.queue_name from gdq.queue q where q.queue_id = at.queue_id),
                                 at.consumer_name);
  elsif at.era is null then
    perform gdq.require_era(at.queue_id);
  end if;
  -- the nonce was compared at the beginning
  if kind <> 'full' and "position" is distinct from format('queue/%s/%s/%s/%s', at.era, at.tick_id,
                                                          split_part("position", '/', 4), at.snapshot) then
    raise exception 'view "%" is not at position %', view, "position"
      using errcode = 'GDQ01', hint = 'Another refresh has moved it.';
  elsif not gdq.snapshot_le(at.snapshot, seen) then
    raise exception 'position % is later than the server', at.snapshot
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'The server has lost transactions that it had. gdq rebase starts a new era.';
  end if;
  with t as (
    insert into gdq.tick (queue_id, snapshot, event_seq, refresh)
      values (at.queue_id, seen, gdq.last_event(at.queue_id), true) returning tick_id, nonce, event_seq
  ), p as (
    insert into gdq.position (subscription_id, batch_no, tick_id, snapshot, event_seq)
      select at.subscription_id, at.batch_no + 1, t.tick_id, seen, t.event_seq from t on conflict do nothing
      returning 1
  ), r as (
    insert into gdq.view_run (view_id, group_name, started_at, finished_at, action, reason, kind, rows_changed,
                              delta_rows, rows_read, work_seconds, snapshot_from, snapshot_to)
      values (at.view_id, group_name, started, clock_timestamp(), action, case when action = 'full' then reason end,
              kind, rows_changed, delta_rows, rows_read, seconds,
              case when action <> 'full' then at.snapshot end, seen)
  )
  select t.tick_id, t.nonce, exists (select from p) as first into made from t;
  if not made.first then
    raise exception 'another refresh of view "%" has just ended', view
      using errcode = 'serialization_failure', hint = 'Call again.';
  end if;
  if action = 'full' then
    insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot)
      select at.subscription_id, c.relid, 'copied', seen from gdq.cut_tables(at.subscription_id) c;
    update gdq.view vv set diverged = null where vv.view_id = at.view_id and vv.diverged is not null;
  end if;
  if at.audited then
    perform gdq.note_work(at.view_id, seconds);
  end if;
  if random() < 0.02 then
    perform gdq.trim_view_runs(at.view_id);
  end if;
  -- position_text() of the new tick
  moved := format('queue/%s/%s/%s/%s', at.era, made.tick_id, made.nonce, seen);
  if kept <> '{}' then
    update gdq.compiled_view c set kept = finish_compiled_refresh.kept, kept_at = moved where c.view_id = at.view_id;
  end if;
  return moved;
end
$$;
comment on function
  gdq.finish_compiled_refresh(text, text, text, timestamptz, text, text, bigint, bigint, bigint, jsonb) is
  'Ends the refresh that begin_compiled_refresh() has begun; the position of the transaction''s snapshot.';
