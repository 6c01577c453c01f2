-- delta_events(queue, s0, s1, tables): the truncate, ddl and resync events of a queue in (s0, s1], in order; tables
-- NULL: of all captured tables. A table whose capture is off gives one more resync event, without a number: changes
-- since then were not captured. Writes: nothing. Errors: 22023, 42704, GDQ01, GDQ02.
create or replace function gdq.delta_events(queue text, s0 pg_snapshot, s1 pg_snapshot, tables regclass[] default null)
  returns table (ev_id bigint, kind text, tbl text, data jsonb)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  captured oid[] := array(select ct.relid::oid from gdq.captured_table ct where ct.queue_id = queue_of);
  events text := gdq.queue_events_sql(queue_of, coalesce(tables::oid[], captured), s0, s1, false);
begin
  perform gdq.check_interval(queue_of, null, s0, s1);
  if events is not null then
    return query execute 'select ev_id, op, tbl, new from (' || events || ') e order by ev_id';
  end if;
  return query
    select null::bigint, 'resync', coalesce(gdq.table_name(ct.relid), ct.table_name),
           jsonb_build_object('kind', 'off', 'reason', 'capture is off')
      from gdq.captured_table ct
     where ct.queue_id = queue_of
       and (tables is null or ct.relid = any (tables))
       and gdq.capture_state(ct.queue_id, ct.relid) = 'disarmed';
end
$$;
comment on function gdq.delta_events(text, pg_snapshot, pg_snapshot, regclass[]) is
  'Truncate, ddl and resync events of a queue between two snapshots.';
