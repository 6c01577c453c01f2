-- check_tables(queue, part): switches capture off for tables that were altered without the DDL guard having recorded
-- it; queue NULL: of all queues. A resync is recorded; maintain() switches capture on again with the columns that the
-- tables have by then. A tick checks by itself where an alarm asks for it, or the event triggers are off.
--   part: checks one in so many of the tables, by number, that each is checked once a minute; NULL: all. After an
--   unanswered alarm all tables are checked.
-- Result: the number of tables that were switched off. Writes: as check_witness(); alarm_check. Errors: 42704, GDQ04,
-- GDQ07.
create or replace function gdq.check_tables(queue text default null, part integer default null) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  only_queue integer := case when queue is not null then gdq.find_queue(queue) end;
  alarm record;
  checked record;
  parts integer;
begin
  perform gdq.require_read_committed('check_tables');
  perform gdq.require_era(only_queue);
  alarm := gdq.alarms();
  -- up to fifty tables take a few milliseconds
  parts := least(60, (select count(*) from gdq.captured_table) / 50 + 1);
  checked := gdq.check_witness(array(
    select t.table_id from gdq.watched_tables(case when not alarm.due then only_queue end) t
     where alarm.due or part is null or t.table_id % parts = part % parts));
  if alarm.changed and checked.unrecorded = '{}' then
    perform gdq.settle_alarms(alarm.seen, alarm.open, alarm.settled);
  end if;
  return checked.altered;
end
$$;
comment on function gdq.check_tables(text, integer) is 'Switches capture off for tables that were altered unseen.';

-- watched_tables(queue_id): the captured tables of a queue (NULL: of all) whose capture is on. Those of a restored
-- queue are left out: rebase() looks at them. Writes: nothing.
create or replace function gdq.watched_tables(queue_id integer default null) returns setof gdq.captured_table
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return query
    with off as materialized (
      select distinct on (r.queue_id, r.relid) r.queue_id, r.relid, r.kind
        from gdq.resync r where r.kind <> 'gap' order by r.queue_id, r.relid, r.resync_id desc
    )
    select ct.*
      from gdq.captured_table ct
     where (watched_tables.queue_id is null or ct.queue_id = watched_tables.queue_id)
       and not exists (select from off
                        where off.queue_id = ct.queue_id and off.relid = ct.relid and off.kind <> 'armed')
       and ct.queue_id not in (select q.queue_id from gdq.restored_queues() q);
end
$$;
comment on function gdq.watched_tables(integer) is 'Captured tables whose capture is on.';

-- check_witness(tables): compares the catalogs with the witness of these captured tables, by their ids. Where they
-- differ, capture is switched off and a resync recorded; a difference that cannot concern capture is witnessed. A new
-- name is a ddl event. It waits at most 100 ms for a lock.
-- Result: altered: how many tables were switched off; unrecorded: those for which that could not be recorded.
-- Writes: resync, the event log, capture functions, witness, log_ring, table_rename.
create or replace function gdq.check_witness(tables integer[], out altered integer, out unrecorded integer[])
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  found record;
  t gdq.captured_table;
begin
  altered := 0;
  unrecorded := '{}';
  for found in select u.table_id, min(u.what) as what from gdq.unwitnessed(tables) u group by 1 order by 1 loop
    select * into t from gdq.captured_table ct where ct.table_id = found.table_id;
    begin
      if not exists (select from pg_class c where c.oid = t.relid) then
        perform gdq.note_dropped(t.table_id, 'DROP');
        altered := altered + 1;
        continue;
      elsif found.what is null then
        found.what := gdq.witness_again(t);
        continue when found.what is null;
      end if;
      if gdq.switch_off(t.queue_id, t.relid, found.what) then
        altered := altered + 1;
      else
        unrecorded := unrecorded || t.table_id;
      end if;
    exception
      when lock_not_available then
        unrecorded := unrecorded || t.table_id;
      when no_data_found or undefined_function or undefined_table or foreign_key_violation then
        null;  -- the table has left the queue meanwhile
    end;
  end loop;
  for t in select ct.* from gdq.captured_table ct join pg_class c on c.oid = ct.relid
            where ct.table_id = any (tables) and gdq.table_name(ct.relid) <> gdq.last_table_name(ct.table_id) loop
    begin
      perform gdq.note_ddl(t.table_id, 'ALTER TABLE', gdq.note_rename(t.table_id));
    exception when lock_not_available then
      unrecorded := unrecorded || t.table_id;
    end;
  end loop;
end
$$;
comment on function gdq.check_witness(integer[]) is
  'Switches capture off for tables of which the catalogs hold something else than was witnessed.';

-- witness_again(t): witnesses the differences of a captured table that cannot concern capture. A table without any
-- witness, as an older gdq left it, is witnessed when capture fits it. Result: the reason why it does not fit; NULL
-- when it does. Writes: witness, log_ring.
create or replace function gdq.witness_again(t gdq.captured_table) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  found record;
  fault text;
  version bigint := gdq.current_version(t.table_id);
begin
  if not exists (select from gdq.witness w where w.table_id = t.table_id) then
    fault := gdq.table_fault(t);
    if fault is null then
      perform gdq.witness(array[t.table_id]);
    end if;
  end if;
  for found in select * from gdq.unwitnessed(array[t.table_id]) u where u.what is null and fault is null loop
    if (found.present).relid is null then
      perform gdq.witness_functions(version);
    else
      -- not what another transaction has witnessed meanwhile
      update gdq.witness w
         set file = (found.present).file, basis = (found.present).basis, seen = (found.present).seen
       where w.table_id = t.table_id and w.relid = found.relid and w = found.was;
    end if;
  end loop;
  return fault;
exception when lock_not_available then
  return null;  -- the next check tries again
end
$$;
comment on function gdq.witness_again(gdq.captured_table) is
  'Witnesses the differences of a captured table that cannot concern capture.';

-- table_fault(t): the reason why capture does not fit a table; NULL when it fits. Writes: nothing.
create or replace function gdq.table_fault(t gdq.captured_table) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.table_version;
begin
  select * into v from gdq.table_version tv where tv.version_id = gdq.current_version(t.table_id);
  if not gdq.version_fits(v.version_id, gdq.describe_table(t.table_id)) then
    return 'its columns were altered and no event trigger saw it';
  end if;
  perform gdq.check_key(t.table_id, v.columns);
  return coalesce(gdq.capture_fault(t.table_id), gdq.trigger_fault(t.table_id),
                  (select format('%s %s', f.name, f.fault) from gdq.function_faults(t.table_id) f limit 1));
exception when others then
  return sqlerrm;
end
$$;
comment on function gdq.table_fault(gdq.captured_table) is
  'The reason why capture does not fit a table; NULL when it fits.';

-- check_before_tick(queue_id, patient): compares the tables of a queue with their witness, if the event triggers are
-- off, and those of all queues after an unanswered alarm. Result: how many tables were switched off; NULL, if patient,
-- when that could not be recorded for one of this queue. Writes: as check_witness(); alarm_check. Errors: 55000, unless
-- patient, for such a table.
create or replace function gdq.check_before_tick(queue_id integer, patient boolean default false) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  alarm record;
  checked record;
  unrecorded integer;
  altered integer := 0;
begin
  alarm := gdq.alarms();
  if alarm.due or not gdq.event_triggers_on() then
    checked := gdq.check_witness(array(
      select t.table_id from gdq.watched_tables(case when not alarm.due then queue_id end) t));
    altered := checked.altered;
    select ct.table_id into unrecorded
      from gdq.captured_table ct
     where ct.table_id = any (checked.unrecorded) and ct.queue_id = check_before_tick.queue_id limit 1;
    if unrecorded is not null and not patient then
      raise exception 'table % was altered, and that could not be recorded', gdq.last_table_name(unrecorded)
        using errcode = 'object_not_in_prerequisite_state',
              hint = 'Another session has locked tables of gdq, as VACUUM FULL does. Try again when it has ended.';
    elsif unrecorded is not null then
      return null;
    elsif checked.unrecorded <> '{}' then
      return altered;
    end if;
  end if;
  if alarm.changed then
    perform gdq.settle_alarms(alarm.seen, alarm.open, alarm.settled);
  end if;
  return altered;
end
$$;
comment on function gdq.check_before_tick(integer, boolean) is
  'Compares the tables of a queue with their witness where an alarm asks for it.';
