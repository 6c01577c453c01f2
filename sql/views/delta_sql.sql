-- delta_sql(queue, tbl, s0, s1): the typed SELECT of a table's log rows in (s0, s1], columns as batch_sql(). For
-- refreshes, whose consumer holds s0 by begin_refresh(). Writes: nothing. Errors: 22023, 42704, GDQ02, 55000.
create or replace function gdq.delta_sql(queue text, tbl regclass, s0 pg_snapshot, s1 pg_snapshot) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  changes text := gdq.table_changes_sql(gdq.find_table(queue, tbl), s0, s1);
begin
  perform gdq.check_interval(gdq.find_queue(queue), gdq.find_table(queue, tbl), s0, s1);
  return changes;
end
$$;
comment on function gdq.delta_sql(text, regclass, pg_snapshot, pg_snapshot) is
  'Typed SELECT of a table''s log rows between two snapshots.';

-- check_interval(queue_id, table_id, s0, s1): error when rows of a table (NULL: of the event log) after the position s0
-- may have been truncated. What a subscription has not passed is held for it; where none holds s0, the horizon decides,
-- which is one for all logs of the queue. Nor may s1 be later than what this transaction sees.
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
                                           -- a table that it took up later is held from there on
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
