-- check_tables(queue, part): switches capture off for tables, of one queue or all (NULL), that were altered and no
-- event trigger saw it. That is a resync; maintain() arms them again with the columns that they have by then. Where
-- the event triggers are off a ticker calls it before its ticks, so that no batch has rows of an altered table
-- without that resync.
--   part: looks at one in 60 of the tables, by number; NULL: at all.
-- Result: the number of tables that were switched off.
-- Writes: resync, the event log, capture functions, table_check. Errors: 42704, GDQ04, GDQ07.
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

-- altered_tables(queue_id, part): the captured tables, of one queue or all (NULL), that are gone or whose catalog
-- rows have changed since note_catalog() saw them. part: looks at one in 60 of them, by number; NULL: at all.
-- Writes: nothing.
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

-- table_fault(t, files): why capture does not fit an altered table; NULL when it fits. files: the table's files when
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
