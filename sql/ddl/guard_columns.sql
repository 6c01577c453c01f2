-- guard_columns(table_id, tag): gives a table whose columns have changed a new log version and capture functions to
-- match. A ddl event tells consumers of that, and of a new name of the table.
-- Writes: table_version, log_ring, log_segment, one segment, the capture functions, table_rename, a ddl event, resync.
-- Errors: any; the caller switches off.
create or replace function gdq.guard_columns(table_id integer, tag text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  old_version gdq.table_version;
  columns jsonb := gdq.describe_table(table_id);
  version bigint;
  renamed jsonb := gdq.note_rename(table_id);
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = guard_columns.table_id;
  select * into strict old_version
    from gdq.table_version v where v.table_id = t.table_id order by v.version_id desc limit 1;
  -- checked even when no column has changed: the index that made the key unique may have been dropped
  perform gdq.check_key(t.table_id, columns);
  if gdq.version_fits(old_version.version_id, columns) then
    if renamed <> '{}' then
      perform gdq.note_ddl(t.table_id, tag, renamed);
    end if;
    return;
  end if;
  -- A log takes about ten locks. One transaction with hundreds of them would leave no room to the others.
  if (select count(*) from pg_locks l where l.pid = pg_backend_pid())
       > current_setting('max_locks_per_transaction')::bigint
         * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 5 then
    raise exception 'a transaction that alters this many captured tables would fill the lock table';
  end if;
  perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
  version := gdq.create_version(t.table_id, columns, 1);
  perform gdq.arm(version, 0);
  perform gdq.note_ddl(t.table_id, tag, renamed || jsonb_build_object(
    'old_version', old_version.version_id,
    'new_version', version,
    'old_columns', gdq.column_list(old_version.columns),
    'new_columns', gdq.column_list(columns)) || gdq.replaced_columns(old_version.columns, columns));
  perform gdq.note_values(t.queue_id, t.relid, old_version.columns, columns);
end
$$;
comment on function gdq.guard_columns(integer, text) is
  'Gives a table whose columns have changed a new log version and capture functions to match.';

-- replaced_columns(old, new): {"replaced_columns": [names]} of the columns that were dropped and added again under
-- their names, which the lists of columns do not show; {} for none. Writes: nothing.
create or replace function gdq.replaced_columns(old jsonb, new jsonb) returns jsonb
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select case when count(*) = 0 then '{}'
              else jsonb_build_object('replaced_columns', jsonb_agg(n.name order by n.attnum)) end
    from jsonb_to_recordset(new) n(attnum int, name text)
    join jsonb_to_recordset(old) o(attnum int, name text) using (name)
   where o.attnum <> n.attnum
     and not exists (select from jsonb_to_recordset(new) k(attnum int) where k.attnum = o.attnum)
$$;
comment on function gdq.replaced_columns(jsonb, jsonb) is
  'The columns that were dropped and added again under their names.';

-- note_values(queue_id, relid, old_columns, new_columns): records a gap when existing rows show other values from now
-- on without an event. rewrite_guard() sees rewrites; this finds changes without one: a column added with a default, or
-- a type that reads the same bytes as another value (oid and integer; timestamp and timestamptz in UTC). A default
-- counts with or without atthasmissing, which a rewrite for another reason clears and a partitioned table does not
-- have.
-- Writes: resync and the event log.
create or replace function gdq.note_values(queue_id integer, relid oid, old_columns jsonb, new_columns jsonb)
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  filled text;
  retyped text;
begin
  select string_agg(quote_ident(n.name), ', ') filter (where o.attnum is null and (a.atthasdef or a.atthasmissing)),
         string_agg(quote_ident(n.name), ', ') filter (where o.log_type <> n.log_type
           and not (o.log_type in ('text', 'character varying') and n.log_type in ('text', 'character varying')))
    into filled, retyped
    from jsonb_to_recordset(new_columns) n(attnum int, name text, log_type text)
    left join jsonb_to_recordset(old_columns) o(attnum int, log_type text) on o.attnum = n.attnum
    join pg_attribute a on a.attrelid = note_values.relid and a.attnum = n.attnum;
  if filled is not null then
    perform gdq.note_once(queue_id, relid, 'gap',
      format('column %s was added with a default: existing rows changed without events', filled));
  end if;
  if retyped is not null then
    perform gdq.note_once(queue_id, relid, 'gap',
      format('column %s changed its type: existing rows changed without events', retyped));
  end if;
end
$$;
comment on function gdq.note_values(integer, oid, jsonb, jsonb) is
  'Records a gap when existing rows show other values because of new columns or types.';
