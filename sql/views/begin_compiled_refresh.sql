-- begin_compiled_refresh(view, compiled, position, audited, group_name, looked): begins the refresh of a view in a
-- transaction of REPEATABLE READ; finish_compiled_refresh() ends it. Locked are the view's tables and log_segments(),
-- in ACCESS SHARE mode.
--   compiled: as compiled_views() gave it. position: the target's; NULL for a target that is to be looked at. audited:
--   whether audits can compare the view after this refresh. group_name: the group that is refreshed; NULL for none.
--   looked: as for view_changes().
-- Result: one row. segments: those of change logs with changes after the position; none where nothing has changed; NULL
-- where their changes are not enough, or a whole refresh is to look. stays: whether the position stays where it is
-- without changes, which is noted as a refresh. xmax, running: the position's snapshot, with the transactions that were
-- open in it.
-- Writes: locks the subscription; view_run. Errors: 25001 in another isolation; 40001.
create or replace function gdq.begin_compiled_refresh(view text, compiled gdq.compiled_view, "position" text,
  audited boolean, group_name text, looked oid[],
  out xmax bigint, out running bigint[], out segments oid[], out stays boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  since pg_snapshot := split_part("position", '/', 5)::pg_snapshot;
  found_changes record;
  queue_of integer;
begin
  if current_setting('transaction_isolation') <> 'repeatable read' then
    perform gdq.require_repeatable_read();
  end if;
  found_changes := gdq.view_changes(view, "position", compiled.stamp, compiled.definitions, audited, false,
                                    looked::regclass[]);
  segments := found_changes.changed::oid[];
  stays := found_changes.stays;
  if segments = '{}' and stays then
    perform gdq.note_unchanged(array[view], array["position"], group_name, now());
  elsif segments is not null or pg_try_advisory_xact_lock(gdq.lock_key('view', compiled.view_id::oid)) then
    -- after the lock, as another refresh that has the view may wait for the row
    select s.queue_id into queue_of
      from gdq.subscription s
     where (s.queue_id, s.consumer_id) = (select v.queue_id, c.consumer_id
                                            from gdq.view v
                                            join gdq.consumer c on c.consumer_name = v.consumer_name
                                           where v.view_name = view) for no key update;
    if segments <> '{}' and segments::regclass[] && array(select gdq.event_segments(queue_of)) then
      segments := null;  -- events of the event log, as TRUNCATE, are not rows to be added up
    end if;
  end if;
  xmax := pg_snapshot_xmax(since)::text::bigint;
  running := string_to_array(split_part(since::text, ':', 3), ',')::bigint[];
end
$$;
comment on function gdq.begin_compiled_refresh(text, gdq.compiled_view, text, boolean, text, oid[]) is
  'Begins the refresh of a view in one transaction; NULL segments where changes are not enough.';

-- require_repeatable_read(): error in another isolation. Writes: nothing. Errors: 25001.
create or replace function gdq.require_repeatable_read() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if current_setting('transaction_isolation') <> 'repeatable read' then
    raise exception 'a refresh in one transaction needs REPEATABLE READ, this transaction is %',
      upper(current_setting('transaction_isolation'))
      using errcode = 'active_sql_transaction', hint = 'Begin the transaction with ISOLATION LEVEL REPEATABLE READ.';
  end if;
end
$$;
comment on function gdq.require_repeatable_read() is 'Error in another isolation than REPEATABLE READ.';
