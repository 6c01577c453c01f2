-- check_interval(queue_id, table_id, s0, s1): error when rows of a table (NULL: of the event log) after the position s0 may
-- have been truncated. What a subscription has not passed is held for it; where none holds s0, the horizon decides,
-- which is one for all logs of the queue. Nor may s1 be later than what this transaction sees.
-- Writes: nothing. Errors: GDQ02; 22023.
create or replace function gdq.check_interval(queue_id integer, table_id integer, s0 pg_snapshot, s1 pg_snapshot) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if not gdq.snapshot_le(s1, pg_current_snapshot()) then
    raise exception 'snapshot % is later than the transaction''s own %', s1, pg_current_snapshot() using errcode = 'invalid_parameter_value';
  end if;
  if not gdq.snapshot_le((select h.snapshot from gdq.horizon h where h.queue_id = check_interval.queue_id), s0)
     and not exists (select from gdq.subscription s, gdq.position_of(s.subscription_id) p
                      where s.queue_id = check_interval.queue_id and gdq.snapshot_le(p.snapshot, s0)
                        and (check_interval.table_id is null
                             or exists (select from gdq.subscribed_tables(s.subscription_id) t
                                         where t.table_id = check_interval.table_id
                                           -- a table that it took up later is held from there on
                                           and not exists (select from gdq.copied_tables(s.subscription_id) c
                                                            where c.relid = t.relid and not gdq.snapshot_le(c.snapshot, s0))))) then
    raise exception 'changes after position % are no longer all there', s0 using errcode = 'GDQ02', hint = 'Load in full, and go on from there.';
  end if;
end
$$;
comment on function gdq.check_interval(integer, integer, pg_snapshot, pg_snapshot) is 'Error when rows of a log between two snapshots may be gone, or invisible yet.';

-- delta_sql(queue, tbl, s0, s1): the typed SELECT of a table's log rows in (s0, s1], columns as batch_sql(). For refreshes,
-- whose consumer holds s0 by begin_refresh(). Writes: nothing. Errors: 22023, 42704, GDQ02, 55000.
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
comment on function gdq.delta_sql(text, regclass, pg_snapshot, pg_snapshot) is 'Typed SELECT of a table''s log rows between two snapshots.';

-- delta_events(queue, s0, s1, tables): the truncate, ddl and resync events of a queue in (s0, s1], in order;
-- tables NULL: of all captured tables. A table whose capture is off has one more, a resync without a number: what was
-- written since is nowhere. Writes: nothing. Errors: 22023, 42704, GDQ02.
create or replace function gdq.delta_events(queue text, s0 pg_snapshot, s1 pg_snapshot, tables regclass[] default null)
  returns table (ev_id bigint, kind text, tbl text, data jsonb)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  events text := gdq.queue_events_sql(queue_of, coalesce(tables::oid[], array(select ct.relid::oid from gdq.captured_table ct where ct.queue_id = queue_of)), s0, s1, false);
begin
  perform gdq.check_interval(queue_of, null, s0, s1);
  if events is not null then
    return query execute 'select ev_id, op, tbl, new from (' || events || ') e order by ev_id';
  end if;
  return query
    select null::bigint, 'resync', coalesce(gdq.table_name(ct.relid), ct.table_name), jsonb_build_object('kind', 'off', 'reason', 'capture is off')
      from gdq.captured_table ct
     where ct.queue_id = queue_of and (tables is null or ct.relid = any (tables)) and gdq.capture_state(ct.queue_id, ct.relid) = 'disarmed';
end
$$;
comment on function gdq.delta_events(text, pg_snapshot, pg_snapshot, regclass[]) is 'Truncate, ddl and resync events of a queue between two snapshots.';

-- log_segments(queue, tables): every change and event log segment of these tables (NULL: all), and gdq.pin, for a reader
-- that locks them ACCESS SHARE before its first snapshot. Writes: nothing. Errors: 42704.
create or replace function gdq.log_segments(queue text, tables regclass[] default null) returns setof regclass
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
begin
  return query
    select s.segment from gdq.captured_table ct join gdq.table_version v using (table_id) join gdq.log_segment s using (version_id)
     where ct.queue_id = queue_of and (tables is null or ct.relid = any (tables))
    union all
    select e from gdq.event_segments(queue_of) e
    union all
    select 'gdq.pin'::regclass;
end
$$;
comment on function gdq.log_segments(text, regclass[]) is 'The log segments of captured tables, to lock before a first snapshot.';

-- table_columns(queue, tbl, version): the logged columns of a captured table, in column order: those of its newest version,
-- or of the one given. Writes: nothing. Errors: 42704.
create or replace function gdq.table_columns(queue text, tbl regclass, version bigint default null)
  returns table (attnum int, name text, type text, log_type text, as_text boolean, is_key boolean, log_key text, log_old text, log_new text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return query
    select c.attnum, c.name, c.type, c.log_type, c.as_text, c.key, c.log_key, c.log_old, c.log_new
      from gdq.table_version v, jsonb_to_recordset(v.columns)
             c(attnum int, name text, type text, log_type text, as_text boolean, key boolean, log_key text, log_old text, log_new text)
     where v.table_id = gdq.find_table(queue, tbl) and v.version_id = coalesce(version, gdq.current_version(v.table_id)) order by c.attnum;
end
$$;
comment on function gdq.table_columns(text, regclass, bigint) is 'The logged columns of a captured table.';
