-- alter_table_options(queue, tbl, options): captures a table with other options from now on, without removing it: its
-- logs with their unread changes stay, and consumers go on taking it.
--   options: a jsonb object of options of add_table(), lists as arrays: {"exclude": ["note"], "where": null}. Options
--   that it does not name stay as they are; null stands for the default.
-- The function waits for writers that are at work. It puts a ddl event with the tag alter_table_options and a new
-- version of the table between their changes and later ones; each side is read with the options of its time. A resync
-- follows where consumers need values that no event brings: of columns that are logged from now on, or after another
-- row filter, more operations, or another key in mode pk.
-- Result: true; false when the table has these options already.
-- Writes: captured_table, a version, triggers, capture functions, the event log, resync.
-- Errors: as add_table(); 0A000 for origin, which cannot be switched off, and for unchanged "omit" without a key; 55000
-- while capture of the table is off; 55006 when a view reads the table; 55P03 when writers hold the table:
-- nothing is changed, try again.
create or replace function gdq.alter_table_options(queue text, tbl regclass, options jsonb) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set lock_timeout = '500ms' set client_min_messages = warning
as $$
declare
  id integer := gdq.find_table(queue, tbl);
  t gdq.captured_table;
  wanted gdq.captured_table;
  old_version gdq.table_version;
  version bigint;
  described jsonb;
  missed text;
begin
  perform gdq.require_read_committed('alter_table_options');
  select * into strict t from gdq.captured_table ct where ct.table_id = id;
  wanted := gdq.new_options(t, options);
  if wanted is not distinct from t then
    return false;
  end if;
  perform gdq.refuse_new_options(t, wanted);
  begin
    perform gdq.lock_writers(t);
    perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
    if t is distinct from (select ct from gdq.captured_table ct where ct.table_id = id)
       or gdq.capture_state(t.queue_id, t.relid) <> 'armed'
       or not gdq.version_fits(gdq.current_version(id), gdq.describe_table(id)) then
      raise exception 'table % was altered meanwhile', gdq.table_name(tbl) using errcode = 'lock_not_available';
    end if;
    perform gdq.refuse_new_options(t, wanted);  -- again: a view may have been made meanwhile
    if (wanted.operations, wanted.granularity, wanted.always)
       is distinct from (t.operations, t.granularity, t.always) then
      perform gdq.replace_triggers(t, wanted);
    end if;
  exception when lock_not_available or deadlock_detected then
    raise exception 'table % is busy: %', gdq.table_name(tbl), sqlerrm using errcode = 'lock_not_available',
      hint = 'Nothing was changed. Try again when no long transaction holds the table.';
  end;
  select * into strict old_version from gdq.table_version v where v.version_id = gdq.current_version(id);
  perform gdq.store_options(wanted);
  described := gdq.describe_table(id);
  perform gdq.check_key(id, described);
  perform gdq.check_omitted(id, described);
  version := gdq.create_version(id, described, 3);
  if 'truncate' = any (wanted.operations) then
    perform gdq.replace_capture(t.queue_id, t.relid, 't', gdq.truncate_body(t.queue_id, t.relid, wanted.origin));
  end if;
  perform gdq.arm(version, 0);
  perform gdq.note_ddl(id, 'alter_table_options', jsonb_build_object(
    'options', options,
    'old_version', old_version.version_id,
    'new_version', version,
    'old_columns', gdq.column_list(old_version.columns),
    'new_columns', gdq.column_list(described)));
  missed := gdq.missed_by_options(t, wanted, old_version.columns, described);
  if missed is not null then
    perform gdq.note_resync(t.queue_id, t.relid, 'gap', 'other options of capture: ' || missed);
  end if;
  perform gdq.witness(array[id]);
  perform gdq.warn_wide(tbl, wanted.mode, described);
  return true;
end
$$;
comment on function gdq.alter_table_options(text, regclass, jsonb) is
  'Captures a table with other options from now on; false when it has them already.';

-- lock_writers(t): waits for the writers of a captured table, and keeps others out until this transaction ends. Making
-- a trigger anew as it was takes the lock for that, and needs only the right to put triggers on the table. A trigger
-- with option always would lose that setting; but the option needs the rights of the table's owner, so LOCK TABLE is
-- allowed there. Writes: triggers. Errors: 42501, 55P03.
create or replace function gdq.lock_writers(t gdq.captured_table) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if t.always then
    execute format('lock table %s in share row exclusive mode', gdq.table_name(t.relid));
  else
    perform gdq.create_triggers(t.queue_id, t.relid, t.relid, t.operations, t.granularity, t.always);
  end if;
end
$$;
comment on function gdq.lock_writers(gdq.captured_table) is
  'Waits for the writers of a captured table, and keeps others out.';

-- missed_by_options(t, wanted, old_columns, new_columns): the reason why consumers must copy a table whose options
-- change, since they need values that no event has brought. NULL when they need no copy. Writes: nothing.
create or replace function gdq.missed_by_options(t gdq.captured_table, wanted gdq.captured_table, old_columns jsonb,
                                                 new_columns jsonb) returns text
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select nullif(concat_ws('; ',
    (select 'logged from now on: ' || string_agg(quote_ident(n.name), ', ' order by n.attnum)
       from jsonb_to_recordset(new_columns) n(attnum int, name text, log_new text)
      where n.log_new is not null
        and not exists (select from jsonb_to_recordset(old_columns) o(attnum int, log_new text)
                         where o.attnum = n.attnum and o.log_new is not null)),
    case when t.row_filter->'text' is distinct from wanted.row_filter->'text' then 'another row filter' end,
    (select 'captured from now on: ' || string_agg(o, ', ')
       from unnest(wanted.operations) o where o <> all (t.operations)),
    case when wanted.mode = 'pk' and jsonb_path_query_array(new_columns, '$[*] ? (@.key == true).attnum')
                                  <> jsonb_path_query_array(old_columns, '$[*] ? (@.key == true).attnum')
         then 'another key' end), '')
$$;
comment on function gdq.missed_by_options(gdq.captured_table, gdq.captured_table, jsonb, jsonb) is
  'The reason why consumers must copy a table whose options change.';

-- replace_triggers(t, wanted): makes the triggers of a captured table anew, with other operations, granularity or
-- always. Triggers are dropped with their functions, as only the table's owner may drop them alone. The caller arms the
-- functions in the same transaction, and no session can write meanwhile. Writes: functions, triggers. Errors: 42501,
-- 55P03.
create or replace function gdq.replace_triggers(t gdq.captured_table, wanted gdq.captured_table) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform gdq.drop_capture(t.queue_id, t.relid);
  perform gdq.create_capture(t.queue_id, t.relid, wanted.operations, wanted.granularity, wanted.always, wanted.origin);
end
$$;
comment on function gdq.replace_triggers(gdq.captured_table, gdq.captured_table) is
  'Makes the triggers of a captured table anew.';

-- store_options(wanted): stores the options of a captured table. Writes: captured_table.
-- Errors: 0A000 when its partitions do not fit format json.
create or replace function gdq.store_options(wanted gdq.captured_table) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  update gdq.captured_table ct
     set mode = wanted.mode,
         format = wanted.format,
         key_attnums = wanted.key_attnums,
         include_attnums = wanted.include_attnums,
         column_attnums = wanted.column_attnums,
         exclude_attnums = wanted.exclude_attnums,
         operations = wanted.operations,
         granularity = wanted.granularity,
         always = wanted.always,
         origin = wanted.origin,
         pin_search_path = wanted.pin_search_path,
         allow_rls = wanted.allow_rls,
         row_filter = wanted.row_filter,
         unchanged = wanted.unchanged
   where ct.table_id = wanted.table_id;
  if gdq.json_fault(wanted.table_id) is not null then
    raise exception '%', gdq.json_fault(wanted.table_id) using errcode = 'feature_not_supported',
      hint = 'Make the partition anew with CREATE TABLE ... PARTITION OF.';
  end if;
end
$$;
comment on function gdq.store_options(gdq.captured_table) is 'Stores the options of a captured table.';
