-- check_tables(queue, part): switches capture off for tables, of one queue or all, that were altered and no event
-- trigger saw
-- it: recorded as resync; maintain() arms them again with the columns that they have by then. A ticker calls it before
-- its ticks where the event triggers are off, so that no batch has rows of an altered table without that resync.
-- part: looks at one in 60 of them, by number.
-- Result: how many were switched off. Writes: resync, the event log, capture functions, table_check. Errors: 42704,
-- GDQ04, GDQ07.
create or replace function gdq.check_tables(queue text default null, part integer default null) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  catalog text;
  files text;
  fault text;
  found_altered integer := 0;
begin
  perform gdq.require_read_committed('check_tables');
  perform gdq.require_era(case when queue is not null then gdq.find_queue(queue) end);
  for t in select a.* from gdq.altered_tables(case when queue is not null then gdq.find_queue(queue) end, part) a loop
    continue when not pg_try_advisory_xact_lock(gdq.lock_key('capture', t.relid));
    if not exists (select from pg_class c where c.oid = t.relid) then
      perform gdq.note_dropped(t.table_id, 'DROP');
      found_altered := found_altered + 1;
      continue;
    end if;
    -- read before the table is looked at: DDL that commits in between is found the next time
    catalog := gdq.catalog_mark(t.relid);
    files := gdq.table_files(t.relid);
    fault := gdq.table_fault(t, coalesce((select k.files from gdq.table_check k where k.table_id = t.table_id), files));
    if fault is null then
      perform gdq.note_catalog(t.table_id, catalog, files);
    else
      perform gdq.switch_off(t.queue_id, t.relid, fault);
      found_altered := found_altered + 1;
    end if;
  end loop;
  return found_altered;
end
$$;
comment on function gdq.check_tables(text, integer) is 'Switches capture off for tables that were altered unseen.';

-- altered_tables(queue_id, part): the captured tables, of one queue or all, whose catalog rows are others than when
-- note_catalog() saw them last, or that are gone. part: looks at one in 60 of them, by number. Writes: nothing.
create or replace function gdq.altered_tables(queue_id integer default null, part integer default null)
  returns setof gdq.captured_table
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return query
    select ct.* from gdq.captured_table ct left join gdq.table_check k using (table_id)
     where (altered_tables.queue_id is null or ct.queue_id = altered_tables.queue_id)
       and (part is null or ct.table_id % 60 = part)
       and case when k.catalog is distinct from gdq.catalog_mark(ct.relid)
                then gdq.capture_state(ct.queue_id, ct.relid) = 'armed' else false end;
end
$$;
comment on function gdq.altered_tables(integer, integer) is 'Captured tables whose catalog rows have changed.';

-- table_fault(t, files): why capture does not fit an altered table; NULL when it does. files: those that it had when
-- its catalog rows were remembered. Where event triggers are on they have seen every rewrite. Writes: nothing.
create or replace function gdq.table_fault(t gdq.captured_table, files text) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.table_version;
begin
  select * into v from gdq.table_version tv where tv.version_id = gdq.current_version(t.table_id);
  if not gdq.version_fits(v.version_id, gdq.describe_table(t.table_id)) then
    return 'its columns were altered and no event trigger saw it';
  elsif files <> gdq.table_files(t.relid) and not gdq.event_triggers_on() then
    return 'it or its partitions were altered and have other files, and no event trigger saw it';
  end if;
  perform gdq.check_key(t.table_id, v.columns);
  return coalesce(gdq.capture_fault(t.table_id), gdq.trigger_fault(t.table_id));
exception when others then
  return sqlerrm;
end
$$;
comment on function gdq.table_fault(gdq.captured_table, text) is
  'Why capture does not fit an altered table; NULL when it does.';

-- leave_typed(): where the event triggers are off, gives one table of format typed the format json, which no unseen
-- ALTER can make fail; the next one in the next call. Nothing is missed by that: it waits for the writers of the
-- moment. A table of which only some columns are logged, which json cannot, is switched off.
-- Result: whether there was such a table. Writes: captured_table, a version, capture functions, resync, the event log.
create or replace function gdq.leave_typed() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  t gdq.captured_table;
  old_version bigint;
  version bigint;
begin
  if gdq.event_triggers_on() then
    return false;
  end if;
  for t in select ct.* from gdq.captured_table ct
            where ct.format = 'typed' and gdq.capture_state(ct.queue_id, ct.relid) = 'armed' order by ct.table_id loop
    if gdq.typed_only(t) is not null then
      perform gdq.switch_off(t.queue_id, t.relid, gdq.typed_only(t));
      return true;
    end if;
    begin
      -- takes the lock that waits for writers: one that ran the old function could else meet its log dropped
      perform gdq.create_triggers(t.queue_id, t.relid, t.relid, t.operations, t.granularity, t.always);
      perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
      if exists (select from gdq.table_check k where k.table_id = t.table_id and k.files <> gdq.table_files(t.relid))
         or not gdq.version_fits(gdq.current_version(t.table_id), gdq.describe_table(t.table_id)) then
        perform gdq.switch_off(t.queue_id, t.relid, 'it was altered while the event triggers were off');
        return true;
      end if;
      old_version := gdq.current_version(t.table_id);
      update gdq.captured_table ct set format = 'json' where ct.table_id = t.table_id;
      version := gdq.create_version(t.table_id, gdq.describe_table(t.table_id), 3);
      perform gdq.arm(version, 0);
      perform gdq.note_ddl(t.table_id, 'FORMAT JSON', jsonb_build_object(
        'reason', 'the event triggers of gdq are missing or off',
        'old_version', old_version,
        'new_version', version));
      perform gdq.note_catalog(t.table_id);
      raise warning 'table % is captured in format json from now on: the event triggers of gdq are missing or off',
        gdq.table_name(t.relid);
      return true;
    exception when lock_not_available or deadlock_detected or internal_error then
      null;  -- busy: the next time
    end;
  end loop;
  return false;
end
$$;
comment on function gdq.leave_typed() is 'Where the event triggers are off, gives a table the format that needs none.';

-- typed_only(t): why a table cannot do without the event triggers; NULL when it can, in format json. Writes: nothing.
create or replace function gdq.typed_only(t gdq.captured_table) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select 'the event triggers of gdq are missing or off, and columns, exclude or where need format typed'
   where t.column_attnums is not null or t.exclude_attnums is not null or t.row_filter is not null
$$;
comment on function gdq.typed_only(gdq.captured_table) is 'Why a table cannot do without the event triggers.';
