-- guard_columns(table_id, tag): gives a table whose columns have changed a new version and capture functions to match,
-- and tells consumers of that and of a new name.
-- Writes: table_version, log_ring, log_segment, one segment, the capture functions, table_rename, a ddl event.
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
  -- also when nothing else has changed: the index that made the key unique may have gone
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
    raise exception 'one transaction with that many changes of tables would fill the lock table';
  end if;
  perform pg_advisory_xact_lock(gdq.lock_key('capture', t.relid));
  version := gdq.create_version(t.table_id, columns, 1);
  perform gdq.arm(version, 0);
  perform gdq.note_ddl(t.table_id, tag, renamed || jsonb_build_object(
    'old_version', old_version.version_id,
    'new_version', version,
    'old_columns', gdq.column_list(old_version.columns),
    'new_columns', gdq.column_list(columns)));
  perform gdq.note_values(t.queue_id, t.relid, old_version.columns, columns);
end
$$;
comment on function gdq.guard_columns(integer, text) is
  'Gives a table whose columns have changed a new log version and capture functions to match.';

-- note_values(queue_id, relid, old_columns, new_columns): a gap when old rows show other values from now on for which
-- there is no event. A rewrite is seen by rewrite_guard(); here is what needs none: a column added with a default (no
-- look at atthasmissing, which a rewrite for another reason clears, and a partitioned table does not have), a type that
-- reads the same bytes as another value (oid and integer; timestamp and timestamptz in UTC).
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
  'Records that new columns or types show other values in old rows.';
