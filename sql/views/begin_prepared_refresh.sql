-- begin_prepared_refresh(view, position, stamp, definitions, audited): begins the refresh of a view in one transaction
-- of REPEATABLE READ, whose first statement after its locks this is; finish_prepared_refresh() ends it. Locked are the
-- view's tables and log_segments(), in ACCESS SHARE mode.
--   position, stamp, definitions, audited: as for refresh_unchanged().
-- Result: the segments of change logs with changes after the position; none where nothing has changed, which is noted
-- as a refresh; NULL where a whole refresh is to look. Writes: locks the subscription; view_run. Errors: 25001 in
-- another isolation; 40001.
create or replace function gdq.begin_prepared_refresh(view text, "position" text, stamp text, definitions text,
  audited boolean) returns regclass[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := (select v.queue_id from gdq.view v where v.view_name = view);
  changed regclass[];
begin
  perform gdq.require_repeatable_read();
  perform from gdq.subscription s
    where s.queue_id = queue_of
      and s.consumer_id = (select c.consumer_id
                             from gdq.view v join gdq.consumer c using (consumer_name) where v.view_name = view)
      for no key update;
  changed := gdq.view_changes(view, "position", stamp, definitions, audited, false);
  if changed = '{}' then
    perform gdq.note_unchanged(array[view], array["position"], null, now());
  end if;
  -- events of the event log, as TRUNCATE, are not rows to be added up
  return case when not changed && array(select gdq.event_segments(queue_of)) then changed end;
end
$$;
comment on function gdq.begin_prepared_refresh(text, text, text, text, boolean) is
  'Begins the refresh of a view in one transaction; NULL where a whole refresh is to look.';

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
