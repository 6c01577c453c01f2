-- delta_sql(queue, tbl, s0, s1, may_lack): the typed SELECT of a table's log rows in (s0, s1], with the columns of
-- batch_sql(). For refreshes, which keep the rows after s0 by begin_refresh().
--   may_lack: columns that the caller does not need of rows whose log lacks them, as an update left them as they were;
--   NULL: all of them. Running the SELECT fails at a row that lacks others.
-- Writes: nothing. Errors: 22023, 42704, 55000, GDQ01, GDQ02.
create or replace function gdq.delta_sql(queue text, tbl regclass, s0 pg_snapshot, s1 pg_snapshot,
                                         may_lack text[] default '{}') returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  changes text := gdq.table_changes_sql(gdq.find_table(queue, tbl), s0, s1, null, may_lack);
begin
  perform gdq.check_interval(gdq.find_queue(queue), gdq.find_table(queue, tbl), s0, s1);
  return changes;
end
$$;
comment on function gdq.delta_sql(text, regclass, pg_snapshot, pg_snapshot, text[]) is
  'Typed SELECT of a table''s log rows between two snapshots.';

-- check_interval(queue_id, table_id, s0, s1): error when rows of a table's log (NULL: of the event log) after the
-- snapshot s0 may have been truncated. Rows after the position of a subscription that takes the table are kept. Where
-- no such position is at or before s0, the horizon decides, which is one for all logs of the queue. Also an error when
-- s1 is later than this transaction's snapshot.
-- Writes: nothing. Errors: GDQ02; 22023.
create or replace function gdq.check_interval(queue_id integer, table_id integer, s0 pg_snapshot, s1 pg_snapshot)
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if not gdq.snapshot_le(s1, pg_current_snapshot()) then
    raise exception 'snapshot % is later than the transaction''s own %', s1, pg_current_snapshot()
      using errcode = 'invalid_parameter_value';
  end if;
  if not gdq.snapshot_le((select h.snapshot from gdq.horizon h where h.queue_id = check_interval.queue_id), s0)
     and not exists (select from gdq.subscription s, gdq.position_of(s.subscription_id) p
                      where s.queue_id = check_interval.queue_id
                        and gdq.snapshot_le(p.snapshot, s0)
                        and (check_interval.table_id is null
                             or exists (select from gdq.subscribed_tables(s.subscription_id) t
                                         where t.table_id = check_interval.table_id
                                           -- of a table that was copied later, only rows after the copy are kept
                                           and not exists (select from gdq.copied_tables(s.subscription_id) c
                                                            where c.relid = t.relid
                                                              and not gdq.snapshot_le(c.snapshot, s0))))) then
    raise exception 'changes after position % are no longer all there', s0
      using errcode = 'GDQ02', hint = 'Load in full, and go on from there.';
  end if;
end
$$;
comment on function gdq.check_interval(integer, integer, pg_snapshot, pg_snapshot) is
  'Error when rows of a log between two snapshots may be gone, or invisible yet.';
